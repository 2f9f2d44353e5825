"""`tidemill measure-neurons`: how often the neurons of each layer are used, for --hot-neurons."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from tidemill.compress.calibration import Calibration
from tidemill.compress.decoder import Decoder
from tidemill.compress.predictors import find_linears, observe
from tidemill.compress.prune import calibration_tokens
from tidemill.compress.source import Source
from tidemill.compress.walk import LayerJob, Quiet, Reporter, walk
from tidemill.compress.work import Work
from tidemill.errors import ConfigError
from tidemill.weights.neurons import TENSORS, tensor_name

_USED_BELOW = 0.9  # of tokens, on average: no ReLU is above zero more often


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    model: str
    out: Path
    device: str = "cpu"
    calibration: Calibration = field(default_factory=Calibration)


def measure_neurons(options: MeasureOptions, report: Reporter | None = None) -> list[torch.Tensor]:
    """Writes the folder. Of each layer, for which part of the text's tokens each neuron is not
    zero."""
    options.calibration.check()
    report = report or Quiet()
    source = Source.open(options.model)
    decoder = Decoder(source, options.device)
    work = Work(
        options.out, {"model": options.model, "what": "neurons"} | options.calibration.settings()
    )
    with work.begins():
        ids = calibration_tokens(source, decoder, options.calibration, work, report)

    def measure(job: LayerJob) -> dict[str, torch.Tensor]:
        _, down = find_linears(job, ("gate_proj", "down_proj"), "a gated feed-forward")
        often = (observe(job, (down,))[down] != 0).float().mean(0).cpu()
        if float(often.mean()) > _USED_BELOW:
            raise ConfigError(
                f"Neurons of layer {job.number} are not zero for {float(often.mean()):.0%} of tokens: its activation is no ReLU.",
                fix="Use a model with ReLU gates (hidden_act relu or relu2).",
            )
        return {"frequency": often}

    with work.begins():
        walk(decoder, work, measure, ids, seed=options.calibration.seed, report=report)
    frequencies = [work.tensors(number)["frequency"] for number in range(decoder.num_layers)]
    work.result.mkdir(exist_ok=True)
    save_file(
        {tensor_name(number): often for number, often in enumerate(frequencies)},
        work.result / TENSORS,
    )
    work.publish()
    return frequencies
