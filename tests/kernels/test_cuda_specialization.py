"""Launches of the GPU's sampler, noted instead of run: what they would compile, and what they would
wait for.

Triton compiles a kernel for each combination of constants, argument types, pointers that are
multiples of 16 bytes, and integers that are 1 or multiples of 16. Its own binder tells the
combination of a launch without a GPU. Nothing may be compiled after start, so what it tells for odd
batches must be what it told for the warm-up."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.helpers import LONG_S

NOTE = """
import numpy as np
import torch
from tests.kernels.noted import seen
from tidemill.kernels.cuda import sampling
from tidemill.runner import reports, cuda_sampler
from tidemill.models.base import CausalLM
from tidemill.runner.cuda_sampler import CudaSampler
from tidemill.runner.state import RowState
from tidemill.types.sampling import SamplingParams
from tidemill.sched.plan import StepItem

VOCAB, REQUESTS, HEADER = 3000, 70, 8

class Model:
    def logits(self, hidden, out):
        return out.copy_(hidden @ torch.zeros(16, VOCAB, device=hidden.device))

    pool = CausalLM.pool

KINDS = [
    dict(top_k=5), dict(top_p=0.5), dict(min_p=0.1), dict(typical_p=0.5), dict(temperature=0.0, presence_penalty=1.0),
    dict(logit_bias={3: 1.0}), dict(top_k=16, top_p=0.9, repetition_penalty=1.1), dict(min_tokens=99, stop_token_ids=(1,)),
    dict(allowed_token_ids=(1, 2, 5)), dict(bad_word_ids=((1,), (1, 2), (1, 2, 3))),
]

def set_params(state, num, first):
    for row in range(num):
        kind = KINDS[(first + row) % len(KINDS)]
        state.params[row] = SamplingParams(**kind, logprobs=row % 4, prompt_logprobs=3, pooling="mean")
"""

COMPILES_NOTHING = """
def pick(num, begin, size):
    words = torch.zeros(2000, dtype=torch.int32)
    rows, positions = words[HEADER : HEADER + size], words[HEADER + size : HEADER + 2 * size]
    return sampling.pick_tokens(logits[:num], words[begin : begin + num], rows, positions, state.draws, state.tokens)

state, logits = RowState(REQUESTS + 1, 101, 16), torch.zeros(REQUESTS, VOCAB)
sampler = CudaSampler(state, VOCAB)
pick(1, 100, 4)
sampler.warm_up(Model(), torch.zeros(200, 16), logits)
known = set(seen)
kernels = {name for name, *_ in known}
assert kernels == {"_pick", "_settle", "_survey", "_narrow", "_collect", "_finish", "_summarize", "_normalize"}, kernels
for num in (1, 3, 7, 16, 33, 64, 70):
    for begin in (128, 129, 130, 131):
        tokens = pick(num, begin, num)
    for first in range(len(KINDS)):
        set_params(state, num, first)
        rows = list(range(num))
        sampler.redraw(rows, rows, [17] * num, logits[:num], tokens)
        sampler.logprobs(rows, rows, logits[:num], tokens)
        cuda_sampler.score(logits[:num], state.tokens[1, 1 : 1 + num], first)
assert seen == known, sorted(seen - known)
"""

READS_NOTHING = """
cuda_sampler.upload = lambda values, device: torch.from_numpy(np.array(values)).to(device)
state, logits = RowState(REQUESTS + 1, 101, 16, torch.device("meta")), torch.zeros(REQUESTS, VOCAB, device="meta")
sampler, tokens = CudaSampler(state, VOCAB), torch.zeros(REQUESTS, dtype=torch.int32, device="meta")
sampler.warm_up(Model(), torch.zeros(200, 16, device="meta"), logits)
set_params(state, REQUESTS, 0)
rows = list(range(REQUESTS))
state.masks = {(4, 17): np.zeros(94, np.int32)}
sampler.redraw(rows, rows, [17] * REQUESTS, logits, tokens)
assert sampler.logprobs(rows, rows, logits, tokens).scores.values.shape == (REQUESTS, 20)
state.num_prompt[2] = 90
item = StepItem(seq=1, epoch=0, row=2, start=10, count=75, samples=False)
report = reports.look_at_prompt(Model(), state, item, torch.zeros(75, 16, device="meta"), cuda_sampler.score, logits)
assert report.scores.ids.shape == (75, 3) and report.pooled.shape == (16,)
"""


def run(script, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", NOTE + script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LONG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_odd_batches_need_no_kernels_that_the_warm_up_has_not_made(tmp_path):
    run(COMPILES_NOTHING, tmp_path)


def test_no_stage_reads_from_the_device(tmp_path):
    """Its tensors have no values here, so whatever would wait for one fails: draws, logprobs, and
    what is asked about prompts."""
    run(READS_NOTHING, tmp_path)
