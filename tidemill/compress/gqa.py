"""`tidemill convert --gqa`: fewer KV heads, each the mean of several, and a short training towards
the original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tidemill.compress.calibration import Calibration
from tidemill.compress.decoder import Decoder, compute_device
from tidemill.compress.folder import names_outside, output_dtype
from tidemill.compress.prune import calibration_tokens
from tidemill.compress.source import Source
from tidemill.compress.student import Learning, build, layer_tensors, learn, write_student
from tidemill.compress.walk import Quiet, Reporter
from tidemill.compress.work import Work
from tidemill.errors import ConfigError

_OF_KV_HEADS = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    model: str
    out: Path
    num_kv_heads: int
    out_dtype: str | None = None
    device: str = "cpu"
    learning: Learning = field(default_factory=Learning)
    calibration: Calibration = field(default_factory=Calibration)

    def settings(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        own = {"kv_heads": self.num_kv_heads, "model": self.model, "out_dtype": self.out_dtype}
        return (
            own
            | asdict(self.learning)
            | (self.calibration.settings() if self.learning.steps else {})
        )


def pool_heads(tensor: torch.Tensor, num_before: int, num_after: int) -> torch.Tensor:
    """Rows of `num_before` heads to the means of neighbouring ones."""
    heads = tensor.view(
        num_after, num_before // num_after, tensor.shape[0] // num_before, *tensor.shape[1:]
    )
    return heads.mean(1).flatten(0, 1)


def convert(
    options: ConvertOptions,
    report: Reporter | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Writes the folder. What was done, in numbers."""
    compute_device(options.device)
    options.learning.check()
    if options.learning.steps:
        options.calibration.check()
    report = report or Quiet()
    source = Source.open(options.model)
    dtype = output_dtype(source, options.out_dtype)
    decoder = Decoder(source)
    num_before = _check(options, decoder)
    work = Work(options.out, options.settings())
    layers = list(range(decoder.num_layers))
    tensors = decoder.read(names_outside(decoder)) | layer_tensors(decoder, layers)
    config = source.config | {"num_key_value_heads": options.num_kv_heads}
    student = build(config, _pooled(tensors, num_before, options.num_kv_heads), options.device)
    if options.learning.steps:
        with work.begins():
            ids = calibration_tokens(source, decoder, options.calibration, work, report)
        learn(
            student,
            build(source.config, tensors, options.device),
            layers,
            ids,
            options.learning,
            work,
            report,
            is_stopped,
        )
    num_bytes = write_student(student, decoder, config, work, dtype)
    return {"kv_heads": options.num_kv_heads, "of": num_before, "bytes": num_bytes}


def _check(options: ConvertOptions, decoder: Decoder) -> int:
    """Checks the options; returns the number of KV heads."""
    config = decoder.model.config
    names = [name for name in decoder.tensor_names(0) if name.endswith(_OF_KV_HEADS[:2])]
    if len(names) != 2:
        raise ConfigError(
            f"A {config.model_type} stores keys and values in no matrices of their own.",
            fix="Convert another model.",
        )
    norms = [
        decoder.stored_name(name)
        for name in decoder.tensor_names(0)
        if name.endswith("k_norm.weight")
    ]
    if any(decoder.source.shapes[name][0] != config.head_dim for name in norms):
        raise ConfigError(
            "The norms of this model go over all KV heads, so that they cannot be pooled."
        )
    before = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if not 1 <= options.num_kv_heads < before or before % options.num_kv_heads:
        some = [num for num in range(1, before) if before % num == 0]
        what = f"--gqa is {options.num_kv_heads}; the model has {before} KV heads."
        fix = f"Give one of {', '.join(map(str, some))}." if some else "It cannot have fewer."
        raise ConfigError(what, fix=fix, param="gqa")
    return before


def _pooled(tensors: dict[str, torch.Tensor], before: int, after: int) -> dict[str, torch.Tensor]:
    return {
        name: pool_heads(value, before, after) if name.endswith(_OF_KV_HEADS) else value.clone()
        for name, value in tensors.items()
    }
