"""A checkpoint of any format we read as float32 tensors under Hugging Face names, with its
config.json and tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.compress.gguf_config import hf_config, write_tokenizer
from tidemill.errors import CheckpointError
from tidemill.models.base import CausalLM
from tidemill.models.registry import model_class
from tidemill.quant.plan import PLAIN
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint, WeightTensor, open_checkpoint
from tidemill.weights.locate import locate

# Copied from a folder to the compressed one, if they are there.
SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a GGUF file as Hugging Face's files have it."""

    name: str
    rows: torch.Tensor | None = None  # their order
    added: float = 0.0  # to every value
    transposed: bool = False


class Source:
    """`config`: as in config.json. Tensors are read when they are asked for, so that a model larger
    than memory can be walked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoint = open_checkpoint(path)
        if not self._checkpoint.has_weights:
            raise CheckpointError(f"{path} holds no weights.", fix="Download them, too.")
        self.is_gguf = self._checkpoint.format == "gguf"
        self._gguf: dict[str, _Stored] | None = None
        if self.is_gguf:
            model = _empty(self._checkpoint)
            self.config = hf_config(self._checkpoint, model.config)
            self._gguf = _gguf_names(self._checkpoint, model, self.config["model_type"])
        else:
            self.config = {
                key: value
                for key, value in self._checkpoint.metadata.items()
                if key != "quantization_config"
            }
        self.shapes = {name: shape for name, shape, _ in self._tensors()}

    @staticmethod
    def open(model: str) -> Source:
        """Opens the source that a user names: a name, a file, a folder or a hub id."""
        return Source(locate(model, fetch=True))

    @property
    def num_bytes(self) -> int:
        """The bytes of the stored tensors."""
        return self._checkpoint.num_bytes

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...], WeightTensor]]:
        for tensor in self._checkpoint.tensors():
            if not self.is_gguf:
                yield tensor.name, tuple(tensor.shape), tensor
            elif tensor.name in self._names:
                own = self._names[tensor.name]
                yield (
                    own.name,
                    tuple(tensor.shape[::-1] if own.transposed else tensor.shape),
                    tensor,
                )

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """These tensors in float32 on the CPU."""
        found: dict[str, torch.Tensor] = {}
        for name, _, tensor in self._tensors():
            if name in names:
                found[name] = self._read(tensor)
                if len(found) == len(names):
                    break
        if missing := sorted(set(names) - found.keys()):
            raise CheckpointError(
                f"{self.path}: tensor {missing[0]} is missing.", fix="Is it the whole checkpoint?"
            )
        return found

    def _read(self, tensor: WeightTensor) -> torch.Tensor:
        values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
        tensor.read_into(values)
        if not self.is_gguf:
            return values
        own = self._names[tensor.name]
        if own.rows is not None:
            values = values[own.rows]
        if own.transposed:
            values = values.t().contiguous()
        return values + own.added if own.added else values

    @property
    def _names(self) -> dict[str, _Stored]:
        """GGUF's names to Hugging Face's; of a folder, as its tensors would be called."""
        if self._gguf is None:
            self._gguf = _gguf_names(
                self._checkpoint, _empty(self._checkpoint), self.config["model_type"]
            )
        return self._gguf

    @property
    def model_config(self) -> ModelConfig:
        return model_class(self._checkpoint).read_config(self._checkpoint)

    def hf_name(self, stored: str) -> str | None:
        """The Hugging Face name of a tensor of a GGUF file."""
        return self._names[stored].name if stored in self._names else None

    def gguf_name(self, own: str) -> str | None:
        """The GGUF name of a tensor of Hugging Face's name; None: GGUF has none."""
        return next((stored for stored, entry in self._names.items() if entry.name == own), None)

    def gguf_rows(self, stored: str) -> torch.Tensor | None:
        """The order in which a GGUF file has the rows of a Hugging Face tensor; None: the same."""
        rows = self._names[stored].rows
        return None if rows is None else torch.argsort(rows)

    def gguf_shape(self, stored: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self._names[stored].transposed else shape

    def as_gguf(self, stored: str, values: torch.Tensor) -> torch.Tensor:
        """Values of a Hugging Face tensor as the file has them."""
        own, rows = self._names[stored], self.gguf_rows(stored)
        values = values.float() - own.added if own.added else values.float()
        values = values.t() if own.transposed else values
        return (values if rows is None else values[rows]).contiguous()

    def write_side_files(self, folder: Path) -> None:
        """Tokenizer and generation settings; not config.json, which a method adds to."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.is_gguf:
            write_tokenizer(self._checkpoint, folder)
            return
        for name in SIDE_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, folder / name)

    def write_config(self, folder: Path, **more: Any) -> None:
        text = json.dumps(self.config | more, indent=2, sort_keys=True)
        (folder / "config.json").write_text(text + "\n")


def _empty(checkpoint: Checkpoint) -> CausalLM:
    """Our model of it without weights, which knows names and orders of rows."""
    cls = model_class(checkpoint)
    config = cls.read_config(checkpoint)
    with torch.device("meta"):
        model = cls(config, PLAIN)
    if not isinstance(model, CausalLM):
        raise CheckpointError(f"{checkpoint.path} is an encoder, which cannot be compressed.")
    return model


def _gguf_names(checkpoint: Checkpoint, model: CausalLM, model_type: str) -> dict[str, _Stored]:
    """GGUF's names to Hugging Face's."""
    is_gemma, is_gpt2 = model_type.startswith("gemma"), model_type == "gpt2"
    names: dict[str, _Stored] = {}
    taken: dict[str, str] = {}
    for _, part, hf, gguf in model.names:
        if not hf or not gguf or hf.startswith("="):
            continue
        for i in range(model.config.num_layers) if "{}" in hf else (0,):
            for suffix in (".weight", ".bias"):
                own, stored = hf.format(i) + suffix, gguf.format(i) + suffix
                if taken.setdefault(own, stored) != stored:
                    raise CheckpointError(
                        f"{checkpoint.path}: tensor {own} is in several tensors of the file."
                    )
                added = -1.0 if is_gemma and own.endswith("norm.weight") else 0.0
                transposed = is_gpt2 and suffix == ".weight" and ".h." in own and ".ln_" not in own
                names[stored] = _Stored(
                    own,
                    model.row_order("gguf", part + suffix.removeprefix(".weight")),
                    added,
                    transposed,
                )
    return names


def num_values(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
