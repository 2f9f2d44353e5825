"""From measured steps to a cost: least squares on relative errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from tidemill.errors import ConfigError
from tidemill.sim.cost import Curve, FittedCost, StepShape, padded

_LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
_ROUNDS = 4  # of leaving out what the others contradict
_OUTLIER = 5.0  # times the median error
_LEAST = 3  # samples of a point


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that was measured. `follows`: directly after another, so that its time is from that one's end to its own; else it
    is from where the host began to plan it."""

    shape: StepShape
    seconds: float
    follows: bool = True


@dataclass(frozen=True, slots=True)
class Errors:
    """Of the fit on what it was made from, relative: the median, the 90th percentile, and the sum of all steps."""

    num_samples: int
    median: float
    p90: float
    total: float


def fit(
    samples: Sequence[Sample],
    decode_sizes: Sequence[int] = (),
    mixed_sizes: Sequence[int] = (),
    steps_ahead: int = 0,
    shared_unit: int = 0,
) -> tuple[FittedCost, Errors]:
    """`decode_sizes`, `mixed_sizes`: what steps are padded to. `steps_ahead`: of the runner; without, the host's time is part of
    every step's. `shared_unit`: of attention, see `Shapes`."""
    steady = [sample for sample in samples if sample.follows]
    decode = [sample for sample in steady if not sample.shape.num_prompt]
    mixed = [sample for sample in steady if sample.shape.num_prompt]
    if len(decode) < 2 * _LEAST or len(mixed) < 2 * _LEAST:
        raise ConfigError("There are too few measured steps to fit a profile.", fix="Measure for longer: --seconds.")
    d_curve, (d_context, d_longest, d_new, d_shared) = _fit_kind(
        [padded(one.shape.num_decoding, decode_sizes) for one in decode],
        [[one.shape.decode_context, one.shape.longest, one.shape.num_new, one.shape.num_shared] for one in decode],
        [one.seconds for one in decode],
        decode_sizes,
    )
    m_curve, (m_context, m_pairs, m_draws, m_new) = _fit_kind(
        [padded(one.shape.num_decoding + one.shape.num_prompt, mixed_sizes) for one in mixed],
        [[one.shape.decode_context, one.shape.pairs, one.shape.num_draws, one.shape.num_new] for one in mixed],
        [one.seconds - d_shared * one.shape.num_shared for one in mixed],
        mixed_sizes,
    )
    rates = (d_context, d_longest, m_context, m_pairs, m_draws, m_new or d_new)
    cost = FittedCost(d_curve, m_curve, *rates, 0.0, d_shared, shared_unit, [*decode_sizes], [*mixed_sizes])
    waits = [one.seconds - cost.shape_s(one.shape) for one in samples if not one.follows]
    if steps_ahead and waits:
        cost = msgspec.structs.replace(cost, host_s=max(statistics.median(waits), 0.0))
    return cost, errors_of(cost, steady)


def errors_of(cost: FittedCost, samples: Sequence[Sample]) -> Errors:
    said = [cost.shape_s(one.shape) for one in samples]
    off = sorted(abs(own / one.seconds - 1) for own, one in zip(said, samples, strict=True))
    total = sum(said) / sum(one.seconds for one in samples) - 1
    return Errors(len(off), off[len(off) // 2], off[len(off) * 9 // 10], total)


def _fit_kind(
    sizes: Sequence[int], more: Sequence[Sequence[int]], seconds: Sequence[float], ladder: Sequence[int]
) -> tuple[Curve, list[float]]:
    """A curve over the sizes, and a rate for each other column; none is negative. `ladder`: sizes that there are, if they are
    few: for each of them other code may run, so the curve may fall. Else it never does."""
    knots = _knots(sizes, ladder)
    hats = np.array([_hat(knots, size) for size in sizes])
    # A point is the sum of the rises up to it, each of them 0 or more.
    points = np.eye(len(knots)) if ladder else np.tril(np.ones((len(knots), len(knots))))
    matrix = np.hstack([hats @ points, np.array(more, float)])
    measured = np.array(seconds)
    kept = np.ones(len(measured), bool)
    found = np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        found = _least_squares(matrix[kept] / measured[kept, None])
        off = np.abs(matrix @ found / measured - 1)
        kept = off <= max(_OUTLIER * float(np.median(off[kept])), 0.02)
    curve = points @ found[: len(knots)]
    return Curve(knots, [float(value) for value in curve]), [float(rate) for rate in found[len(knots) :]]


def _least_squares(matrix: np.ndarray) -> np.ndarray:
    """Of matrix @ x = 1, without negative x: columns that would be are left out, the most negative first."""
    scale = np.linalg.norm(matrix, axis=0)
    used = scale > 0
    found = np.zeros(matrix.shape[1])
    while used.any():
        solved = np.linalg.lstsq(matrix[:, used] / scale[used], np.ones(len(matrix)), rcond=None)[0]
        if (solved >= 0).all():
            found[used] = solved / scale[used]
            break
        used[np.flatnonzero(used)[np.argmin(solved)]] = False
    return found


def _knots(sizes: Sequence[int], given: Sequence[int]) -> list[int]:
    """Points of the ladder that enough samples are near to."""
    low, high = min(sizes), max(sizes)
    ladder = sorted({low, *(point for point in given or (*_LADDER, *range(2560, high, 512)) if low < point < high), high})
    kept = [ladder[0]]
    for point in ladder[1:]:
        if point == high or sum(1 for size in sizes if kept[-1] < size <= point) >= _LEAST:
            kept.append(point)
    return kept


def _hat(knots: Sequence[int], size: int) -> list[float]:
    """Weights of the points that a size is between."""
    weights = [0.0] * len(knots)
    i = next((i for i, knot in enumerate(knots) if size <= knot), len(knots) - 1)
    if i == 0:
        weights[0] = 1.0
        return weights
    part = (size - knots[i - 1]) / (knots[i] - knots[i - 1])
    weights[i - 1], weights[i] = 1 - part, part
    return weights
