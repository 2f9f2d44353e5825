"""A GGUF file like the one a model was read from, with quantized matrices: Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.compress.decoder import Decoder
from tidemill.compress.stored import IntWeight, Stored, from_state
from tidemill.compress.walk import Reporter
from tidemill.compress.work import Work
from tidemill.errors import ConfigError
from tidemill.weights.choose import parts
from tidemill.weights.gguf import GGUFFile

GROUP = 32  # values of a block
_TYPES = {(4, True): "Q4_0", (4, False): "Q4_1", (5, True): "Q5_0", (5, False): "Q5_1", (8, True): "Q8_0"}  # bits, symmetric


def block_type(name: str, stored: Stored) -> str:
    """Of a matrix; refuses what no type holds."""
    why = ""
    if not isinstance(stored, IntWeight):
        why = "it is not made of integers"
    elif (stored.bits, stored.zeros_NG is None) not in _TYPES:
        why = f"no type has {stored.bits} bits {'without' if stored.zeros_NG is None else 'with'} an offset"
    elif stored.groups_K is not None or stored.act_per is not None:
        why = "its columns are not in order" if stored.groups_K is not None else "its activations are quantized"
    elif stored.codes_NK.shape[1] % GROUP or (stored.group % GROUP and stored.group < stored.codes_NK.shape[1]):
        why = f"its {stored.codes_NK.shape[1]} columns in groups of {stored.group} are no whole blocks of {GROUP}"
    if why:
        fix = "Choose --bits 4, 5 or 8 (8: --symmetric) and a --group that is a multiple of 32, or another --format."
        raise ConfigError(f"{name} cannot be written as GGUF: {why}.", fix=fix, param="format")
    assert isinstance(stored, IntWeight)
    return _TYPES[stored.bits, stored.zeros_NG is None]


def blocks(stored: IntWeight) -> np.ndarray:
    """uint8 [N, bytes of a row]. Scales of larger groups are repeated."""
    num_out, width = stored.codes_NK.shape
    index = torch.arange(0, width, GROUP) // stored.group
    scales = stored.scales_NG[:, index].to(torch.float16)
    pieces: list[np.ndarray] = [scales.numpy().view(np.uint8).reshape(num_out, -1, 2)]
    codes = stored.codes_NK
    if stored.zeros_NG is not None:
        offsets = (-stored.zeros_NG[:, index].float() * scales.float()).to(torch.float16)
        pieces.append(offsets.numpy().view(np.uint8).reshape(num_out, -1, 2))
    elif stored.bits < 8:
        codes = codes + 2 ** (stored.bits - 1)
    numbers = codes.to(torch.int8 if stored.bits == 8 else torch.uint8).numpy().view(np.uint8).reshape(num_out, -1, GROUP)
    if stored.bits == 8:
        return np.concatenate([*pieces, numbers], axis=2).reshape(num_out, -1)
    if stored.bits == 5:
        pieces.append(np.packbits(numbers >> 4, axis=2, bitorder="little"))
    low = numbers & 15
    pieces.append(low[:, :, : GROUP // 2] | low[:, :, GROUP // 2 :] << 4)
    return np.concatenate(pieces, axis=2).reshape(num_out, -1)


def write_gguf(decoder: Decoder, work: Work, report: Reporter) -> tuple[int, int]:
    """How many values were quantized, and the bytes they take. Everything else is copied as it is stored."""
    import gguf

    source = decoder.source
    files = [GGUFFile(part) for part in parts(source.path)]
    writer = gguf.GGUFWriter(work.result, files[0].metadata["general.architecture"])
    _copy_keys(writer, source.path)
    report.stage("Writing", decoder.num_layers)
    num_values = num_bytes = 0
    layers = {name: number for number in range(decoder.num_layers) for name in decoder.tensor_names(number)}
    at, stored, changed = -1, dict[str, Stored](), dict[str, torch.Tensor]()
    for tensor in (one for file in files for one in file.tensors.values()):
        name = source.hf_name(tensor.name) or ""
        number = layers.get(name, -1)
        if number >= 0 and number != at:
            at, (stored, changed) = number, from_state(work.tensors(number))
            report.at(number + 1)
        matrix = stored.get(name.removesuffix(".weight")) if number >= 0 and name.endswith(".weight") else None
        if matrix is not None:
            kind = block_type(name, matrix)
            assert isinstance(matrix, IntWeight)
            raw, rows = blocks(matrix), source.gguf_rows(tensor.name)
            writer.add_tensor(tensor.name, raw if rows is None else raw[rows.numpy()], raw_dtype=gguf.GGMLQuantizationType[kind])
            num_values, num_bytes = num_values + matrix.codes_NK.numel(), num_bytes + raw.nbytes
        elif number >= 0 and name in changed:
            writer.add_tensor(tensor.name, source.as_gguf(tensor.name, changed[name]).numpy())
        else:
            raw = np.ascontiguousarray(tensor.raw).reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType(tensor.qtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return num_values, num_bytes


def _copy_keys(writer: Any, path: Path) -> None:
    import gguf

    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith(("GGUF.", "split.")) or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
