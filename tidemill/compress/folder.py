"""A Hugging Face folder, written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tidemill.compress.decoder import Decoder
from tidemill.compress.source import Source
from tidemill.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHARD_BYTES = 2**31


def output_dtype(source: Source, dtype: str | None) -> str:
    """The type that the source says it is stored in; GGUF's values are all float16's."""
    name = dtype or source.config.get("dtype") or source.config.get("torch_dtype") or "float16"
    if name not in DTYPES:
        raise ConfigError(
            f"--out-dtype {name} is not known.",
            fix=f"Give one of {', '.join(DTYPES)}.",
            param="out-dtype",
        )
    return str(name)


class FolderWriter:
    """`add` tensors, then `close`. No more than one file of them is in memory."""

    def __init__(self, folder: Path, dtype: str, shard_bytes: int = _SHARD_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()  # of an interrupted run
        self._folder, self._dtype, self._shard_bytes = folder, dtype, shard_bytes
        self._waiting: dict[str, torch.Tensor] = {}
        self._num_bytes, self.total_bytes = 0, 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor, *, as_is: bool = False) -> None:
        """Floats are stored in the folder's type, unless they are to stay `as_is`."""
        if tensor.is_floating_point() and not as_is:
            tensor = tensor.to("cpu", DTYPES[self._dtype])
            if not bool(tensor.isfinite().all()):
                fix = "Give --out-dtype bfloat16 or float32."
                raise ConfigError(
                    f"Tensor {name} holds values that {self._dtype} does not.",
                    fix=fix,
                    param="out-dtype",
                )
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._num_bytes + size > self._shard_bytes:
            self._flush()
        self._waiting[name] = tensor.contiguous().clone()
        self._num_bytes += size
        self.total_bytes += size

    def _file(self, number: int) -> Path:
        return self._folder / f"model-{number:05}.safetensors"

    def _flush(self) -> None:
        save_file(self._waiting, self._file(len(self._files)), metadata={"format": "pt"})
        self._files.append(sorted(self._waiting))
        self._waiting, self._num_bytes = {}, 0

    def close(self, source: Source, config: dict[str, Any]) -> None:
        """Closes the folder, with config.json and what belongs to the tokenizer."""
        self._flush()
        num = len(self._files)
        if num == 1:
            self._file(0).rename(self._folder / "model.safetensors")
        else:
            places: dict[str, str] = {}
            for number, names in enumerate(self._files):
                path = self._folder / f"model-{number + 1:05}-of-{num:05}.safetensors"
                self._file(number).rename(path)
                places |= dict.fromkeys(names, path.name)
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
            (self._folder / "model.safetensors.index.json").write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n"
            )
        source.write_side_files(self._folder)
        settings = {key: value for key, value in config.items() if key != "torch_dtype"} | {
            "dtype": self._dtype
        }
        (self._folder / "config.json").write_text(
            json.dumps(settings, indent=2, sort_keys=True) + "\n"
        )


def names_outside(decoder: Decoder) -> list[str]:
    """Stored tensors that belong to no layer. A head that is the embedding is not stored."""
    inside = {name for number in range(decoder.num_layers) for name in decoder.tensor_names(number)}
    names = [name for name in decoder.model.state_dict() if name not in inside]
    if not decoder.source.config.get(
        "tie_word_embeddings", getattr(decoder.model.config, "tie_word_embeddings", False)
    ):
        return names
    head = decoder.model.get_output_embeddings()
    return [name for name in names if head is None or name != f"{decoder.name_of(head)}.weight"]
