"""`tidemill distill`: a student of fewer layers, which begins as some of the teacher's and learns
its distributions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tidemill.compress.calibration import Calibration
from tidemill.compress.decoder import Decoder, compute_device
from tidemill.compress.folder import names_outside, output_dtype
from tidemill.compress.prune import calibration_tokens, with_layers
from tidemill.compress.source import Source
from tidemill.compress.student import Learning, build, layer_tensors, learn, write_student
from tidemill.compress.walk import Quiet, Reporter
from tidemill.compress.work import Work
from tidemill.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    model: str
    out: Path
    layers: int
    out_dtype: str | None = None
    device: str = "cpu"
    learning: Learning = field(default_factory=Learning)
    calibration: Calibration = field(default_factory=Calibration)

    def check(self) -> None:
        compute_device(self.device)
        self.learning.check()
        self.calibration.check()

    def settings(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        own = {"layers": self.layers, "model": self.model, "out_dtype": self.out_dtype}
        return own | asdict(self.learning) | self.calibration.settings()


def spread(num_layers: int, num: int) -> list[int]:
    """Chooses so many of the layers, evenly, the first and the last among them."""
    if not 1 <= num < num_layers:
        what = f"--layers is {num}; the model has {num_layers}."
        raise ConfigError(what, fix=f"Give 1 to {num_layers - 1}.", param="layers")
    if num == 1:
        return [num_layers - 1]
    return [round(i * (num_layers - 1) / (num - 1)) for i in range(num)]


def distill(
    options: DistillOptions,
    report: Reporter | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Writes the folder. What was done, in numbers."""
    options.check()
    report = report or Quiet()
    source = Source.open(options.model)
    dtype = output_dtype(source, options.out_dtype)
    decoder = Decoder(source)
    chosen = spread(decoder.num_layers, options.layers)
    work = Work(options.out, options.settings())
    with work.begins():
        ids = calibration_tokens(source, decoder, options.calibration, work, report)
    outside = decoder.read(names_outside(decoder))
    config = with_layers(source.config, chosen)
    teacher = build(
        source.config,
        outside | layer_tensors(decoder, list(range(decoder.num_layers))),
        options.device,
    )
    fresh = {name: value.clone() for name, value in outside.items()}
    student = build(config, fresh | layer_tensors(decoder, chosen), options.device)
    learn(student, teacher, chosen, ids, options.learning, work, report, is_stopped)
    num_bytes = write_student(student, decoder, config, work, dtype)
    return {
        "layers": len(chosen),
        "of": decoder.num_layers,
        "bytes": num_bytes,
        "tokens": int(torch.numel(ids)),
    }
