"""A GGUF file of quantized matrices: like the one a model was read from, or of a Hugging Face
folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.compress.decoder import Decoder
from tidemill.compress.folder import DTYPES, names_outside
from tidemill.compress.gguf_keys import Described, describe
from tidemill.compress.gguf_vocab import vocabulary
from tidemill.compress.layouts.gguf_blocks import block_type, blocks
from tidemill.compress.stored import IntWeight, Stored, from_state
from tidemill.compress.walk import Reporter
from tidemill.compress.work import Work
from tidemill.errors import CheckpointError, ConfigError
from tidemill.weights.choose import parts
from tidemill.weights.gguf import GGUFFile, GGUFTensor

_FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILE_TYPES = {"Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S"}


@dataclass(slots=True)
class _Entry:
    """A tensor of the file. `make`: its bytes, or its values in float32."""

    name: str
    kind: str  # of GGUF
    shape: tuple[int, ...]  # of values
    make: Callable[[], np.ndarray]


class GGUFLayout:
    """Made before a run, so that what the format cannot hold is refused; written after it, one
    layer in memory at a time."""

    def __init__(self, decoder: Decoder, dtype: str) -> None:
        """`dtype`: of what a folder has as floats; of a GGUF file, that is copied as it is stored."""
        self._decoder, self._source, self._dtype = decoder, decoder.source, dtype
        self._files = (
            [GGUFFile(part) for part in parts(self._source.path)] if self._source.is_gguf else []
        )
        self._layers = {
            name: number
            for number in range(decoder.num_layers)
            for name in decoder.tensor_names(number)
        }
        self._described: Described | None = None
        if not self._source.is_gguf:
            names = self._folder_names().items()
            shapes = {
                stored: self._source.gguf_shape(stored, decoder.shape_of(own))
                for own, stored in names
            }
            self._described = describe(self._source.model_config, self._source.path, shapes)
            self._described.keys |= vocabulary(
                self._source.path, self._source.model_config.vocab_size
            )

    def _folder_names(self) -> dict[str, str]:
        """Hugging Face's names to GGUF's."""
        found: dict[str, str] = {}
        for own in [*names_outside(self._decoder), *self._layers]:
            stored = self._source.gguf_name(own)
            if stored is None:
                raise CheckpointError(
                    f"GGUF has no name for the tensor {own}.", fix="Choose another --format."
                )
            found[own] = stored
        return found

    def write(self, work: Work, report: Reporter) -> tuple[int, int]:
        """Writes the file; returns the number of quantized values, and the bytes they take."""
        import gguf

        kinds: Counter[str] = Counter()
        num_values = num_bytes = 0
        arch = (
            self._described.architecture
            if self._described
            else self._files[0].metadata["general.architecture"]
        )
        writer = gguf.GGUFWriter(work.result, arch)
        for entry in self._entries(work):
            kind = gguf.GGMLQuantizationType[entry.kind]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            nbytes = int(np.prod(entry.shape)) // block * size
            writer.add_tensor_info(
                entry.name, entry.shape, np.dtype(np.float32), nbytes, raw_dtype=kind
            )
            if entry.kind.startswith("Q") and entry.name.startswith("blk."):
                kinds[entry.kind] += int(np.prod(entry.shape))
        self._write_keys(writer, kinds)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        report.stage("Writing", self._decoder.num_layers)
        for entry in self._entries(work, report):
            values = entry.make()
            writer.write_tensor_data(values)
            if entry.kind in kinds and entry.name.startswith("blk."):
                num_values, num_bytes = (
                    num_values + int(np.prod(entry.shape)),
                    num_bytes + values.nbytes,
                )
        writer.close()
        return num_values, num_bytes

    def _entries(self, work: Work, report: Reporter | None = None) -> Iterator[_Entry]:
        """In the file's order, so that a layer's results are read once."""
        entries: list[tuple[str, str, GGUFTensor | None]]
        if self._described is None:
            tensors = [tensor for file in self._files for tensor in file.tensors.values()]
            entries = [
                (tensor.name, self._source.hf_name(tensor.name) or "", tensor) for tensor in tensors
            ]
        else:
            entries = [(stored, own, None) for own, stored in self._folder_names().items()]
            for name, values in self._described.tensors.items():
                yield _Entry(name, "F32", tuple(values.shape), values.float().numpy)
        at, stored, changed = -1, dict[str, Stored](), dict[str, torch.Tensor]()
        for name, own, copied in entries:
            number = self._layers.get(own, -1)
            if number >= 0 and number != at:
                at, (stored, changed) = number, from_state(work.tensors(number))
                if report is not None:
                    report.at(number + 1)
            matrix = (
                stored.get(own.removesuffix(".weight"))
                if number >= 0 and own.endswith(".weight")
                else None
            )
            if matrix is not None:
                yield self._quantized(name, own, matrix)
            elif number >= 0 and own in changed:
                yield self._plain(
                    name, tuple(changed[own].shape), partial(changed.__getitem__, own)
                )
            elif copied is not None:
                yield _Entry(
                    name, copied.type_name, copied.shape, partial(np.ascontiguousarray, copied.raw)
                )
            else:
                yield self._plain(name, self._decoder.shape_of(own), partial(self._read, own))

    def _read(self, own: str) -> torch.Tensor:
        return self._decoder.read([own])[own]

    def _quantized(self, name: str, own: str, matrix: Stored) -> _Entry:
        kind = block_type(own, matrix)
        assert isinstance(matrix, IntWeight)
        rows = self._source.gguf_rows(name)

        def make() -> np.ndarray:
            raw = blocks(matrix)
            return raw if rows is None else raw[rows.numpy()]

        return _Entry(name, kind, tuple(matrix.codes_NK.shape), make)

    def _plain(self, name: str, shape: tuple[int, ...], read: Callable[[], torch.Tensor]) -> _Entry:
        """Vectors stay float32, as llama.cpp expects them."""
        kind = "F32" if len(shape) < 2 else _FLOATS[self._dtype]

        def make() -> np.ndarray:
            tensor = self._source.as_gguf(name, read())
            typed = tensor if kind == "F32" else tensor.to(DTYPES[self._dtype])
            if not bool(typed.isfinite().all()):
                fix = "Give --out-dtype bfloat16 or float32."
                raise ConfigError(
                    f"Tensor {name} holds values that {self._dtype} does not.",
                    fix=fix,
                    param="out-dtype",
                )
            return typed.contiguous().view(torch.uint8).numpy()

        return _Entry(name, kind, self._source.gguf_shape(name, shape), make)

    def _write_keys(self, writer: Any, kinds: Counter[str]) -> None:
        import gguf

        kind = kinds.most_common(1)[0][0] if kinds else "F16"
        writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES.get(kind, f"MOSTLY_{kind}")])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        if self._described is None:
            _copy_keys(writer, self._source.path)
            return
        writer.add_name(self._source.path.resolve().name)
        for name, value in self._described.keys.items():
            is_list = isinstance(value, list)
            found = gguf.GGUFValueType.get_type(value[0] if is_list else value)
            if found == gguf.GGUFValueType.INT32 and not is_list:
                found = gguf.GGUFValueType.UINT32  # what readers expect of sizes and ids
            writer.add_key_value(
                name,
                value,
                gguf.GGUFValueType.ARRAY if is_list else found,
                found if is_list else None,
            )


def _copy_keys(writer: Any, path: Path) -> None:
    import gguf

    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith(("GGUF.", "split.")) or name in (
            "general.architecture", "general.file_type", "general.quantization_version",
        ):  # fmt: skip
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
