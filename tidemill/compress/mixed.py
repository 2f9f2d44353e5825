"""Mixed precision: how much the model suffers from each matrix in few bits, and the bits of each
that fit a budget of bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from tidemill.compress.decoder import Decoder, matrix_of, set_matrix
from tidemill.compress.grid import Grid, quantize
from tidemill.compress.methods.base import Method
from tidemill.compress.methods.inputs import collect, output_error
from tidemill.compress.quality import compare
from tidemill.compress.walk import LayerJob, Reporter
from tidemill.compress.work import Work
from tidemill.errors import ConfigError

KL, SECOND_ORDER = "kl", "second-order"
_SAVED = "bits"
_KL_TOKENS = 1024  # each layer and choice of bits goes through all layers after it


@dataclass(frozen=True, slots=True)
class Budget:
    """`bits`: of a weight on average, scales included. `how`: what a loss of precision is measured
    by: the KL divergence of the model's outputs, a layer at a time; or the second-order error of a
    matrix's outputs, relative to them."""

    bits: float
    choices: tuple[int, ...] = (3, 4, 8)
    how: str = KL

    def check(self, method: Method) -> None:
        """Before the work begins."""
        if "bits" not in method.defaults:
            raise ConfigError(
                f"{method.name} has bits of its own.", fix="Leave out --budget.", param="budget"
            )
        if "gobo" in method.formats:
            raise ConfigError(
                "gobo has the same bits for all matrices.",
                fix="Leave out --budget.",
                param="budget",
            )
        if not 0 < self.bits <= 32:
            raise ConfigError(
                f"--budget is {self.bits}.", fix="Give bits a weight, like 4.5.", param="budget"
            )
        if self.how not in (KL, SECOND_ORDER):
            raise ConfigError(
                f"--sensitivity is {self.how}.",
                fix=f"It must be {KL} or {SECOND_ORDER}.",
                param="sensitivity",
            )
        if len(set(self.choices)) < 2 or not all(2 <= bits <= 8 for bits in self.choices):
            fix = "Give at least two from 2 to 8, like 3,4,8."
            raise ConfigError(
                f"--choices is {','.join(map(str, self.choices))}.", fix=fix, param="choices"
            )

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "choices": list(self.choices), "how": self.how}


@dataclass(frozen=True, slots=True)
class Option:
    """The cost of some matrices in so many bits."""

    bits: int
    num_bytes: int
    loss: float


def choose_bits(
    decoder: Decoder,
    method: Method,
    ids: torch.Tensor,
    budget: Budget,
    work: Work,
    report: Reporter,
) -> dict[str, int]:
    """By matrix."""
    grid = method.grid("")
    names = [name for number in range(decoder.num_layers) for name in decoder.linears(number)]
    saved = work.saved(_SAVED)
    if saved is None:
        measured = (
            _by_kl(decoder, grid, ids, budget, report)
            if budget.how == KL
            else _by_error(decoder, grid, ids, budget, report)
        )
        num_values = sum(torch.Size(decoder.shape_of(f"{name}.weight")).numel() for name in names)
        chosen = allocate(
            {key: options for key, (_, options) in measured.items()},
            int(budget.bits * num_values / 8),
        )
        by_name = {name: chosen[key] for key, (members, _) in measured.items() for name in members}
        saved = {"bits": torch.tensor([by_name[name] for name in names])}
        work.save(_SAVED, saved)
    return dict(zip(names, saved["bits"].tolist(), strict=True))


def allocate(options: dict[str, list[Option]], max_bytes: int) -> dict[str, int]:
    """From the fewest bytes on, what saves the most loss for a byte is raised, while that fits."""
    chosen = {key: min(own, key=lambda option: option.num_bytes) for key, own in options.items()}
    used = sum(option.num_bytes for option in chosen.values())
    if used > max_bytes:
        needed = used / max(max_bytes, 1)
        raise ConfigError(
            f"The budget is {max_bytes} bytes; the fewest bits take {used}.",
            fix=f"Give more: {needed:.2f} times as much, or smaller --choices.",
            param="budget",
        )
    while True:
        raises = [
            (
                (chosen[key].loss - option.loss) / (option.num_bytes - chosen[key].num_bytes),
                key,
                option,
            )
            for key, own in options.items()
            for option in own
            if option.num_bytes > chosen[key].num_bytes
            and option.loss < chosen[key].loss
            and used + option.num_bytes - chosen[key].num_bytes <= max_bytes
        ]
        if not raises:
            return {key: option.bits for key, option in chosen.items()}
        _, key, option = max(raises, key=lambda item: (item[0], item[1]))
        used += option.num_bytes - chosen[key].num_bytes
        chosen[key] = option


# matrices that get the same bits, and what they may be
Measured = dict[str, tuple[list[str], list[Option]]]


@torch.no_grad()
def _by_error(
    decoder: Decoder, grid: Grid, ids: torch.Tensor, budget: Budget, report: Reporter
) -> Measured:
    """tr(E H Eᵀ) / tr(W H Wᵀ) of each matrix, H the second moments of its inputs; the original's
    states go on."""
    states = torch.cat([decoder.embed(ids[i : i + 1]).cpu() for i in range(ids.shape[0])])
    measured: Measured = {}
    report.stage("Sensitivity", decoder.num_layers)
    for number in range(decoder.num_layers):
        with decoder.layer(number) as layer:
            job = LayerJob(decoder, number, layer, states)
            found = collect(job, moments=True)
            for name, module in job.linears.items():
                matrix = matrix_of(module)
                whole = float(output_error(matrix, found[name]))
                options = []
                for bits in budget.choices:
                    rounded = quantize(matrix, replace(grid, bits=bits))
                    loss = float(output_error(rounded.dequantize() - matrix, found[name])) / max(
                        whole, 1e-30
                    )
                    options.append(Option(bits, rounded.num_bytes, loss * matrix.numel()))
                measured[name] = [name], options
            job.outputs(states)
        report.at(number + 1)
    return measured


@torch.no_grad()
def _by_kl(
    decoder: Decoder, grid: Grid, ids: torch.Tensor, budget: Budget, report: Reporter
) -> Measured:
    """The KL divergence of the model's outputs when one layer has so few bits. All variants walk
    through the layers together."""
    ids = ids[: max(1, _KL_TOKENS // ids.shape[1])]
    truth = torch.cat([decoder.embed(ids[i : i + 1]).cpu() for i in range(ids.shape[0])])
    variants: dict[tuple[int, int], torch.Tensor] = {}
    sizes: dict[tuple[int, int], int] = {}
    names: dict[int, list[str]] = {}
    report.stage("Sensitivity", decoder.num_layers)
    for number in range(decoder.num_layers):
        with decoder.layer(number) as layer:
            job = LayerJob(decoder, number, layer, truth)
            for states in variants.values():
                job.outputs(states, states)
            before = {name: matrix_of(module).clone() for name, module in job.linears.items()}
            names[number] = list(before)
            for bits in budget.choices:
                sizes[number, bits] = 0
                for name, module in job.linears.items():
                    rounded = quantize(before[name], replace(grid, bits=bits))
                    sizes[number, bits] += rounded.num_bytes
                    set_matrix(module, rounded.dequantize())
                variants[number, bits] = torch.empty_like(truth)
                job.outputs(variants[number, bits], truth)
            for name, module in job.linears.items():
                set_matrix(module, before[name])
            job.outputs(truth)
        report.at(number + 1)
    losses = {key: compare(decoder, ids, states, truth).mean_kl for key, states in variants.items()}
    return {
        f"{number:05}": (
            names[number],
            [Option(bits, sizes[number, bits], losses[number, bits]) for bits in budget.choices],
        )
        for number in range(decoder.num_layers)
    }
