"""Layer by layer through a model: each layer is loaded, observed, changed, stored and forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from tidemill.compress.decoder import Decoder, matrix_of
from tidemill.compress.work import Work
from tidemill.errors import CalibrationError, CheckpointError

OWN, TRUTH = "own", "truth"
_TOKENS_AT_ONCE = 4096
Quantizer = Callable[[torch.Tensor], torch.Tensor]  # of activations: what a linear gets instead


class Reporter(Protocol):
    """The receiver of a run's progress: a stage with its total, and how far it is."""

    def stage(self, name: str, total: int) -> None: ...
    def at(self, done: int, note: str = "") -> None: ...


class Quiet:
    def stage(self, name: str, total: int) -> None:
        return

    def at(self, done: int, note: str = "") -> None:
        return


@dataclass(slots=True)
class LayerJob:
    """A layer with its weights and the hidden states of the calibration text before it: of the
    model as it is changed so far, and (`truth`) of the original, if that is asked for."""

    decoder: Decoder
    number: int
    layer: nn.Module
    inputs: torch.Tensor | None = None  # [sequences, length, H]
    truth: torch.Tensor | None = None
    target: torch.Tensor | None = None  # the original's hidden states after the layer
    # by linear: activations as they are when the model is served
    act: dict[str, Quantizer] = field(default_factory=dict)

    @property
    def linears(self) -> dict[str, nn.Module]:
        return self.decoder.linears(self.number)

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def batches(self, states: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
        """Batches of hidden states before the layer, [B, length, H]."""
        states = self.inputs if states is None else states
        assert states is not None, "this needs calibration text"
        size = max(1, _TOKENS_AT_ONCE // states.shape[1]) if self.decoder.takes_batches else 1
        for first in range(0, states.shape[0], size):
            yield states[first : first + size].to(self.device)

    def run(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        return self.decoder.run(self.number, hidden_BLH)

    @torch.no_grad()
    def observe(
        self, see: Callable[[str, torch.Tensor], None], states: torch.Tensor | None = None
    ) -> None:
        """`see` gets each linear's name and inputs [T, K], batch by batch."""
        hooks = []
        for name, module in self.linears.items():

            def hook(_: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                see(name, args[0].reshape(-1, args[0].shape[-1]))

            hooks.append(module.register_forward_pre_hook(hook))
        try:
            for batch in self.batches(states):
                self.run(batch)
        finally:
            for one in hooks:
                one.remove()

    @torch.no_grad()
    def outputs(self, out: torch.Tensor, states: torch.Tensor | None = None) -> None:
        """The layer as it is now, on all hidden states; activations go through `act`."""
        hooks = [
            self.linears[name].register_forward_pre_hook(_replacing(act))
            for name, act in self.act.items()
        ]
        first = 0
        try:
            for batch in self.batches(states):
                made = self.run(batch)
                if not bool(made.isfinite().all()):
                    raise CalibrationError(
                        f"Activations of layer {self.number} are not finite.",
                        fix="Is the checkpoint whole? Try it with tidemill generate.",
                    )
                out[first : first + made.shape[0]] = made.to("cpu")
                first += made.shape[0]
        finally:
            for one in hooks:
                one.remove()


def _replacing(act: Quantizer) -> Callable[..., tuple[torch.Tensor, ...]]:
    return lambda _, args: (act(args[0]), *args[1:])


# changes the layer in place; what to keep of it
Change = Callable[[LayerJob], dict[str, torch.Tensor]]


def walk(
    decoder: Decoder,
    work: Work,
    change: Change,
    ids: torch.Tensor | None = None,
    *,
    needs_truth: bool = False,
    seed: int = 0,
    report: Reporter | None = None,
) -> None:
    """All layers that `work` does not have yet. `ids`: the calibration text's tokens [sequences,
    length]; None: layers are changed by their weights alone."""
    report = report or Quiet()
    streams = [] if ids is None else [OWN, TRUTH] if needs_truth else [OWN]
    first = work.num_finished
    report.stage("Layers", decoder.num_layers)
    report.at(first)
    if first == 0:
        for stream in streams:
            _start(decoder, work, stream, ids)
    for number in range(first, decoder.num_layers):
        # so that a layer does not depend on where the run was interrupted
        torch.manual_seed(seed + number)
        with decoder.layer(number) as layer:
            given = {stream: work.states(stream, number) for stream in streams}
            job = LayerJob(decoder, number, layer, given.get(OWN), given.get(TRUTH))
            _check_weights(job)
            if needs_truth:
                _advance(job, work, TRUTH)
                job.target = work.states(TRUTH, number + 1)
            kept = change(job)
            if streams:
                _advance(job, work, OWN)
        work.finish(number, kept)
        report.at(number + 1)


def _check_weights(job: LayerJob) -> None:
    for name, module in job.linears.items():
        if not bool(matrix_of(module).isfinite().all()):
            raise CheckpointError(
                f"Tensor {name}.weight holds values that are not finite.",
                fix="Is the checkpoint whole?",
            )


@torch.no_grad()
def _start(decoder: Decoder, work: Work, stream: str, ids: torch.Tensor | None) -> None:
    assert ids is not None
    hidden_size = decoder.embed(ids[:1, :1]).shape[-1]
    out = work.new_states(stream, 0, (*ids.shape, hidden_size))
    for first in range(ids.shape[0]):
        out[first] = decoder.embed(ids[first : first + 1])[0].to("cpu")
    work.keep_states(stream, 0)


def _advance(job: LayerJob, work: Work, stream: str) -> None:
    """Hidden states after the layer; of the truth, the layer is as it was loaded."""
    states: Any = job.inputs if stream == OWN else job.truth
    out = work.new_states(stream, job.number + 1, tuple(states.shape))
    job.outputs(out, states)
    work.keep_states(stream, job.number + 1)
