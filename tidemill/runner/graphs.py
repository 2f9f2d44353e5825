"""Forward passes recorded once and replayed, so that a step costs no Python between its kernels."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.native.program import Program
from tidemill.kernels.native_attention import NativeAttention
from tidemill.models.base import CausalLM


@torch.inference_mode()
def record_forward(model: CausalLM, attention: NativeAttention) -> Program | None:
    """Run the model on two tokens in the null page and note its kernels. None if the replay does not give the same bits: then
    the model does something in between that was not noted, and must run op by op."""
    assert native.lib is not None
    step = attention.plan(
        np.array([0]), np.array([0]), np.array([2]), positions_T=torch.tensor([0, 1]), slots_T=torch.tensor([0, 0])
    )
    embedded = model.embed_tokens(torch.tensor([0, min(1, model.config.vocab_size - 1)]))
    with native.lib.recording() as recording:
        given = embedded.clone()
        result = model(given, step)
    program = recording.compile(given, result)
    if program is not None and torch.equal(step.replay(program, embedded), result):
        return program
    return None
