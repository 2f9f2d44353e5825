"""The layout that a folder's `quantization_config` names, and its matrices among the tensors of all
files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.errors import CheckpointError
from tidemill.weights.mxfp4 import Mxfp4
from tidemill.weights.packed.base import Scheme, Stored
from tidemill.weights.packed.bitnet import BitNet
from tidemill.weights.packed.bnb import BitsAndBytes
from tidemill.weights.packed.compressed import CompressedTensors
from tidemill.weights.packed.fp8 import FP8
from tidemill.weights.packed.gobo import GOBO
from tidemill.weights.packed.gptq import AWQ, GPTQ
from tidemill.weights.packed.lowrank import LowRank

if TYPE_CHECKING:
    from tidemill.weights.checkpoint import WeightTensor

METHODS: dict[str, type[Scheme]] = {
    "gptq": GPTQ,
    "awq": AWQ,
    "compressed-tensors": CompressedTensors,
    "fp8": FP8,
    "fbgemm_fp8": FP8,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": Mxfp4,
    "bitnet": BitNet,
    "low_rank": LowRank,
    "gobo": GOBO,
}


def read_scheme(settings: object, path: Path) -> Scheme | None:
    """Reads the scheme of `quantization_config`; None if there is none."""
    if not settings:
        return None
    if not isinstance(settings, dict):
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config is {str(settings)[:50]!r}, not a table."
        )
    method = settings.get("quant_method", "bitsandbytes" if settings.get("load_in_4bit") else None)
    scheme = METHODS.get(method) if isinstance(method, str) else None
    if scheme is None:
        raise CheckpointError(
            f"{path} is quantized by {str(method)[:50]!r}, which cannot be read.",
            fix=f"{', '.join(METHODS)} can be. Else use the unquantized checkpoint or a GGUF of it.",
        )
    return scheme(settings, path)


def gathered(
    scheme: Scheme, files: Iterable[tuple[Path, Any]]
) -> Iterator[WeightTensor | tuple[Any, str, Path]]:
    """The matrices of open files, whose parts may lie in different ones; what is no part comes as
    file, name and path."""
    modules: dict[str, dict[str, Stored]] = {}
    order: list[tuple[Any, str, Path, tuple[str, str] | None]] = []
    for path, file in files:
        for name in file.keys():  # noqa: SIM118 - not a dict
            if name.endswith(tuple(f".{part}" for part in scheme.dropped)):
                continue
            found = scheme.split(name)
            order.append((file, name, path, found))
            if found is not None:
                if found[1] in modules.setdefault(found[0], {}):
                    raise CheckpointError(f"{path}: tensor {name} stands in the checkpoint twice.")
                modules[found[0]][found[1]] = Stored(file, name, path)
    tensors: dict[str, WeightTensor | None] = {}
    for file, name, path, found in order:
        if found is None:
            yield file, name, path
            continue
        module = found[0]
        if module not in tensors:
            tensors[module] = tensor = scheme.tensor(module, modules[module])
            if tensor is not None:
                yield tensor
        if tensors[module] is None:
            yield file, name, path
