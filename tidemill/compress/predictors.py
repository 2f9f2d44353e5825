"""`tidemill train-predictors`: of each layer, small predictors of which neurons and heads a token
needs (contextual sparsity).

A predictor is of low rank and learns from what the layer does with text: for each token, which
units together make up most of what the layer adds. Served, units whose score is not above 0 are not
computed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tidemill.compress.calibration import Calibration
from tidemill.compress.decoder import Decoder, matrix_of
from tidemill.compress.prune import calibration_tokens
from tidemill.compress.source import Source
from tidemill.compress.walk import LayerJob, Quiet, Reporter, walk
from tidemill.compress.work import Work
from tidemill.errors import CalibrationError, ConfigError
from tidemill.weights.predictors import HEADS, NEURONS, SETTINGS, TENSORS, VERSION, Predictor

UNITS = ("neurons", "heads", "both")
_HELD_OUT = 0.2  # of the tokens: where thresholds are chosen
_BATCH = 512
_RATE = 1e-3
_FIGURES = ("share", "kept")
_SLOPE = 4.0  # of a logit where a half of the tokens need a unit
_DAMPING = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorOptions:
    """`keep`: of the square of what a layer's units add to the hidden state, the part that stays on
    average. `rank`: 0: a sixteenth of the hidden size, at least 8."""

    model: str
    out: Path
    units: str = "neurons"
    keep: float = 0.95
    rank: int = 0
    steps: int = 300
    device: str = "cpu"
    calibration: Calibration = field(default_factory=Calibration)

    def check(self) -> None:
        if self.units not in UNITS:
            raise ConfigError(
                f"--units {self.units} is not known.",
                fix=f"Give one of {', '.join(UNITS)}.",
                param="units",
            )
        if not 0 < self.keep < 1:
            raise ConfigError(
                f"--keep is {self.keep}.", fix="It must be between 0 and 1.", param="keep"
            )
        if not 0 <= self.rank <= 2**14:
            raise ConfigError(
                f"--rank is {self.rank}.", fix="It must be 1 to 16384, or 0.", param="rank"
            )
        if not 1 <= self.steps <= 10**6:
            raise ConfigError(
                f"--steps is {self.steps}.", fix="It must be 1 to 1000000.", param="steps"
            )
        self.calibration.check()

    def settings(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        own = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("out", "calibration", "device")
        }
        return own | self.calibration.settings() | {"what": "predictors"}


@dataclass(slots=True)
class Observed:
    """The observations of some tokens: what went into a layer's block, and the squared length of
    what each unit added to the hidden state."""

    x_TH: torch.Tensor
    added_TU: torch.Tensor


def train_predictors(options: PredictorOptions, report: Reporter | None = None) -> dict[str, Any]:
    """Writes the folder. By kind, the share of units that is computed and what they keep, layer by
    layer."""
    options.check()
    report = report or Quiet()
    source = Source.open(options.model)
    decoder = Decoder(source, options.device)
    kinds = (NEURONS, HEADS) if options.units == "both" else (options.units,)
    work = Work(options.out, options.settings())
    with work.begins():
        ids = calibration_tokens(source, decoder, options.calibration, work, report)
    num_tokens = ids.numel()
    if num_tokens < 64:
        raise CalibrationError(
            f"{num_tokens} tokens are too few to learn from.", fix="Give more with --samples."
        )

    def change(job: LayerJob) -> dict[str, torch.Tensor]:
        kept: dict[str, torch.Tensor] = {}
        for kind in kinds:
            observed = _neurons(job) if kind == NEURONS else _heads(job)
            predictor, figures = train(observed, options)
            kept |= {
                f"{kind}.a": predictor.a_RH,
                f"{kind}.b": predictor.b_UR,
                f"{kind}.bias": predictor.bias_U,
                f"{kind}.figures": figures,
            }
        return kept

    walk(decoder, work, change, ids, seed=options.calibration.seed, report=report)
    return _write(options, decoder, work, kinds)


def _write(
    options: PredictorOptions, decoder: Decoder, work: Work, kinds: tuple[str, ...]
) -> dict[str, Any]:
    work.result.mkdir(exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    figures_by_kind: dict[str, Any] = {kind: {name: [] for name in _FIGURES} for kind in kinds}
    for number in range(decoder.num_layers):
        for name, tensor in work.tensors(number).items():
            kind, _, part = name.partition(".")
            if part != "figures":
                tensors[f"{kind}.{number}.{part}"] = tensor
                continue
            for figure, value in zip(_FIGURES, tensor.tolist(), strict=True):
                figures_by_kind[kind][figure].append(round(value, 6))
    save_file(tensors, work.result / TENSORS)
    about = {
        "version": VERSION,
        "keep": options.keep,
        "num_layers": decoder.num_layers,
        **figures_by_kind,
    }
    (work.result / SETTINGS).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
    work.publish()
    return figures_by_kind


# ---- what layers do


def _neurons(job: LayerJob) -> Observed:
    """The observed neurons of a gated feed-forward: a neuron adds its value times its column of
    down."""
    gate, _, down = find_linears(job, ("gate_proj", "up_proj", "down_proj"), "a gated feed-forward")
    seen = observe(job, (gate, down))
    lengths = matrix_of(job.linears[down]).square().sum(0)
    return Observed(seen[gate], seen[down].square() * lengths)


def _heads(job: LayerJob) -> Observed:
    """A KV head with its query heads, which read the same keys and values, adds what the matrix
    behind makes of them."""
    query, out = find_linears(job, ("q_proj", "o_proj"), "separate matrices of attention")
    config = job.decoder.model.config
    num = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    seen = observe(job, (query, out))
    outputs, weights = (
        seen[out].unflatten(1, (num, -1)),
        matrix_of(job.linears[out]).unflatten(1, (num, -1)),
    )
    added = [outputs[:, head] @ weights[:, head].t() for head in range(num)]
    return Observed(seen[query], torch.stack([part.square().sum(1) for part in added], 1))


def find_linears(job: LayerJob, endings: tuple[str, ...], what: str) -> list[str]:
    """The names of the layer's matrices that end so."""
    found = {name.rpartition(".")[2]: name for name in job.linears}
    if missing := [ending for ending in endings if ending not in found]:
        raise ConfigError(
            f"Layer {job.number} has no {missing[0]}, a part of {what}.",
            fix="Use a Llama-like model.",
        )
    return [found[ending] for ending in endings]


def observe(job: LayerJob, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The inputs of these linears of a layer, of all tokens."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in names}

    def see(name: str, x_TK: torch.Tensor) -> None:
        if name in found:
            found[name].append(x_TK.clone())

    job.observe(see)
    observed = {name: torch.cat(parts) for name, parts in found.items()}
    for name, values in observed.items():
        if not bool(values.isfinite().all()):
            raise CalibrationError(
                f"Inputs of {name} are not finite.",
                fix="Is the checkpoint whole? Try tidemill generate.",
            )
    return observed


# ---- learning


def train(observed: Observed, options: PredictorOptions) -> tuple[Predictor, torch.Tensor]:
    """The predictor, and on tokens that it did not learn from: the share of units that it chooses,
    and what they keep."""
    x, added = observed.x_TH, observed.added_TU
    num_learned = x.shape[0] - max(1, int(x.shape[0] * _HELD_OUT))
    wanted = _needed(added, options.keep)
    model = _Learned(
        x[:num_learned], wanted[:num_learned], options.rank or max(8, x.shape[1] // 16)
    )
    optimizer = torch.optim.Adam(model.parameters(), _RATE)
    order = torch.Generator().manual_seed(options.calibration.seed)
    weights = _weights(added)
    with torch.enable_grad():
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = _RATE * (1 - 0.9 * step / options.steps)
            rows = torch.randint(num_learned, (_BATCH,), generator=order).to(x.device)
            loss = F.binary_cross_entropy_with_logits(
                model(x[rows]), wanted[rows].float(), weights[rows]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    predictor = model.predictor()
    scores = predictor.scores(x[num_learned:])
    threshold, share, kept = _threshold(scores, added[num_learned:], options.keep)
    return Predictor(predictor.a_RH, predictor.b_UR, predictor.bias_U - threshold), torch.tensor(
        [share, kept]
    )


class _Learned(torch.nn.Module):
    """Inputs are scaled to a like size while it learns. It begins with the least squares of this
    rank."""

    def __init__(self, x_TH: torch.Tensor, wanted_TU: torch.Tensor, rank: int) -> None:
        super().__init__()
        rank = min(rank, *wanted_TU.shape[1:], *x_TH.shape[1:])
        self.register_buffer("scale_H", 1 / x_TH.square().mean(0).sqrt().clamp(min=1e-6))
        often = wanted_TU.float().mean(0).clamp(0.01, 0.99)
        a, b = _least_squares(
            x_TH * self.scale_H, wanted_TU.float() - wanted_TU.float().mean(0), rank
        )
        self.a_RH, self.b_UR = torch.nn.Parameter(a), torch.nn.Parameter(_SLOPE * b)
        self.bias_U = torch.nn.Parameter(torch.logit(often))
        self.scale_H: torch.Tensor

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return (x_TH * self.scale_H) @ self.a_RH.t() @ self.b_UR.t() + self.bias_U

    @torch.no_grad()
    def predictor(self) -> Predictor:
        return Predictor(self.a_RH * self.scale_H, self.b_UR.clone(), self.bias_U.clone())


def _least_squares(
    x_TH: torch.Tensor, y_TU: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """a [R, H] and b [U, R], of which b a x is nearest to y (reduced-rank regression)."""
    x, y = x_TH.double(), y_TU.double()
    moments = x.t() @ x / x.shape[0] + _DAMPING * torch.eye(
        x.shape[1], dtype=x.dtype, device=x.device
    )
    root = torch.linalg.cholesky(moments)
    explained_HU = torch.linalg.solve_triangular(root, x.t() @ y / x.shape[0], upper=False)
    _, directions = torch.linalg.eigh(explained_HU @ explained_HU.t())
    best_HR = directions[:, -rank:]
    a = torch.linalg.solve_triangular(root.t(), best_HR, upper=True).t()
    return a.float().contiguous(), (explained_HU.t() @ best_HR).float().contiguous()


def _needed(added_TU: torch.Tensor, keep: float) -> torch.Tensor:
    """The fewest units of each token that keep that part of its sum."""
    ordered, order = added_TU.sort(1, descending=True)
    before = ordered.cumsum(1) - ordered
    needed = (before < keep * ordered.sum(1, keepdim=True)) & (ordered > 0)
    return torch.zeros_like(needed).scatter(1, order, needed)


def _weights(added_TU: torch.Tensor) -> torch.Tensor:
    """The weight of each unit's choice: the part that it adds, relative to the token's mean; at
    least a little, so that zeros are learned."""
    part = added_TU / added_TU.mean(1, keepdim=True).clamp(min=1e-30)
    return part.sqrt().clamp(0.3, 4.0)


def _threshold(
    scores_TU: torch.Tensor, added_TU: torch.Tensor, keep: float
) -> tuple[float, float, float]:
    """The highest one at which units above it keep that part of all sums; the share of units, and
    what they keep."""
    total = added_TU.sum(1, keepdim=True).clamp(min=1e-30)
    parts, scores = (added_TU / total).flatten(), scores_TU.flatten()
    ordered, order = scores.sort(descending=True)
    sums = parts[order].double().cumsum(0)
    num = min(int((sums < keep * float(sums[-1])).sum()) + 1, len(scores))
    lowest = float(ordered[num - 1])
    below = float(ordered[num]) if num < len(scores) else lowest - 1.0
    threshold = (lowest + below) / 2 if below < lowest else lowest - abs(lowest) * 1e-6 - 1e-12
    chosen = scores > threshold
    return (
        threshold,
        float(chosen.float().mean()),
        float(parts[chosen].double().sum() / max(float(sums[-1]), 1e-30)),
    )
