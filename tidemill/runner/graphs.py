"""Forward passes recorded once and replayed, so that a step costs no Python between its kernels."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.native.program import Program
from tidemill.kernels.native_attention import NativeAttention, NativeStep
from tidemill.models.base import Model

# Tokens from which a step reaches every path of the kernels: unpacked panels (WIDE_ROWS of linear.c), norms by more than one
# thread (SERIAL_VALUES of rows.c).
_WIDE_ROWS, _SERIAL_VALUES = 8, 8192


@torch.inference_mode()
def record_forward(model: Model, attention: NativeAttention) -> Program | None:
    """Run the model on two tokens and note its kernels. None if a replay does not give the model's bits, for two tokens or for
    many: then the model does something in between that was not noted, and must run op by op. Uses pages, and clears them."""
    try:
        return _record(model, attention)
    finally:
        used = attention.kv.table[0].unique()
        attention.kv.cache[used] = 0  # what a broken embedding left there must not reach a sequence
        attention.kv.table[0] = 0


def _record(model: Model, attention: NativeAttention) -> Program | None:
    assert native.lib is not None
    step, embedded = _sequence(model, attention, 2)
    with native.lib.recording() as recording:
        given = embedded.clone()
        result = model(given, step)
    program = recording.compile(given, result)
    if program is None or not _same_bits(step.replay(program, embedded), result):
        return None
    step, embedded = _sequence(model, attention, max(_WIDE_ROWS + 1, _SERIAL_VALUES // model.config.hidden_size + 2))
    result = model(embedded.clone(), step)
    return program if _same_bits(step.replay(program, embedded), result) else None


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN included."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _sequence(model: Model, attention: NativeAttention, num_tokens: int) -> tuple[NativeStep, torch.Tensor]:
    """A prefill of so many tokens, or as many as the cache and the context hold, and its embeddings."""
    kv, max_context = attention.kv, model.config.max_context
    num_pages = min(-(-num_tokens // kv.page_size), kv.cache.shape[0] - 1, kv.table.shape[1])
    longest = min((angles.cos.shape[0] for angles in kv.angles if angles is not None), default=num_tokens)
    num_tokens = min(num_tokens, num_pages * kv.page_size, longest, max_context)
    kv.table[0, :num_pages] = torch.arange(1, num_pages + 1)
    positions = torch.arange(num_tokens)
    step = attention.plan(np.array([0]), np.array([0]), np.array([num_tokens]), positions, positions + kv.page_size)
    return step, model.embed_at(positions % model.config.vocab_size, positions, None)
