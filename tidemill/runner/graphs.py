"""Forward passes recorded once and replayed, so that a step costs no Python between its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.kernels.mixers import MixedStep, Mixers
from tidemill.kernels.native.program import Program
from tidemill.layers.phased import PhasedWeights
from tidemill.models.base import Model
from tidemill.runner.cpu_kinds import ForwardFn

# Tokens from which a step reaches every path of the kernels: unpacked panels (WIDE_ROWS of
# linear.c), norms by more than one thread (SERIAL_VALUES of rows.h).
_WIDE_ROWS, _SERIAL_VALUES = 8, 8192


@torch.inference_mode()
def record_forward(
    model: Model, mixers: Mixers, cache: torch.Tensor, forward: ForwardFn | None = None
) -> Program | None:
    """Run the model on two tokens and note its kernels. None if a replay does not give the model's
    bits, for two tokens or for many: then the model does something in between that was not noted,
    and must run op by op. Uses pages, and clears them. `forward`: another forward pass than the
    whole model."""
    with _clearing(mixers, cache):
        return _record(model, mixers, cache.shape[0], forward or model)


@contextmanager
def _clearing(mixers: Mixers, cache: torch.Tensor) -> Iterator[None]:
    try:
        yield
    finally:
        for table, _ in mixers.tables:
            cache[table[0].unique()] = (
                0  # what a broken embedding left there must not reach a sequence
            )
            table[0] = 0


@torch.inference_mode()
def check_phases(model: Model, mixers: Mixers, cache: torch.Tensor, phased: PhasedWeights) -> None:
    """That a step has the same bits in both ways of the layout phased. Uses pages, and clears them."""
    with _clearing(mixers, cache):
        step, embedded = _sequence(model, mixers, cache.shape[0], _wide(model))
        by_heads = model(embedded.clone(), step)
        by_rows = phased.forward(model)(embedded.clone(), step)
    if not _same_bits(by_heads, by_rows):
        raise ConfigError(
            "tensor_layout phased is not for this model: the bits of a token would depend on how many are in its step.",
            fix="Use --tensor-layout 1d.",
            param="tensor_layout",
        )


def _wide(model: Model) -> int:
    """Tokens with which every rank reaches all paths of the kernels, also with its own rows."""
    return model.weight_plan.part.tables.size * max(
        _WIDE_ROWS + 1, _SERIAL_VALUES // model.config.hidden_size + 2
    )


def _record(model: Model, mixers: Mixers, num_pages: int, forward: ForwardFn) -> Program | None:
    assert native.lib is not None
    num_ranks = model.weight_plan.part.tables.size
    step, embedded = _sequence(
        model, mixers, num_pages, max(2, num_ranks)
    )  # each rank notes rows of its own
    with native.lib.recording() as recording:
        given = embedded.clone()
        result = forward(given, step)
    program = recording.compile(given, result)
    if program is None or not _same_bits(step.replay(program, embedded), result):
        return None
    step, embedded = _sequence(model, mixers, num_pages, _wide(model))
    result = forward(embedded.clone(), step)
    return program if _same_bits(step.replay(program, embedded), result) else None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN included."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _sequence(
    model: Model, mixers: Mixers, num_pages: int, num_tokens: int
) -> tuple[MixedStep, torch.Tensor]:
    """A prefill of so many tokens, or as many as the cache and the context hold, and its
    embeddings."""
    while sum(-(-num_tokens // size) for _, size in mixers.tables) >= num_pages:
        num_tokens -= 1
    angles = () if mixers.kv is None else mixers.kv.angles
    longest = [one.cos.shape[0] for one in angles if one is not None]
    longest += [table.shape[1] * size for table, size in mixers.tables]
    num_tokens = min([num_tokens, model.config.max_context, *longest])
    positions, slots_GT = torch.arange(num_tokens), use_first_pages(mixers, num_tokens)
    step = mixers.plan(np.array([0]), np.array([0]), np.array([num_tokens]), positions, slots_GT)
    return step, model.trial_input(positions)


def use_first_pages(mixers: Mixers, num_tokens: int) -> torch.Tensor:
    """Row 0 gets the first pages, for use while no sequence is in the cache. The slots of its
    tokens in each group, [G, T]."""
    positions, slots, first = torch.arange(num_tokens), [], 1
    for table, size in mixers.tables:
        num = -(-num_tokens // size)
        table[0, :num] = torch.arange(first, first + num)
        slots.append(first * size + positions)
        first += num
    return torch.stack(slots) if slots else positions[None][:0]
