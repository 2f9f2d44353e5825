"""Nothing is compiled after start: what Triton would compile for odd batches is what the warm-up has compiled.

Triton compiles a kernel for each combination of constants, argument types, pointers that are multiples of 16 bytes, and integers
that are 1 or multiples of 16. Its own binder tells the combination of a launch without a GPU: launches are noted, not run."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

NOTE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit
from tidemill.kernels.cuda import sampling
from tidemill.runner.cuda_sampler import CudaSampler
from tidemill.runner.state import RowState
from tidemill.sampling import SamplingParams

backend, seen, binders = make_backend(GPUTarget("cuda", 90, 32)), set(), {}

def run(self, *args, grid, warmup, **options):
    if self not in binders:
        binders[self] = jit.create_function_from_signature(self.signature, self.params, backend)
    _, specialization, more = binders[self](*args, **options)
    seen.add((self.fn.__name__, str(specialization), str(sorted(more.items()))))

jit.JITFunction.run = run
VOCAB, REQUESTS, HEADER = 3000, 70, 8

def pick(num, begin, size):
    words = torch.zeros(2000, dtype=torch.int32)
    rows, positions = words[HEADER : HEADER + size], words[HEADER + size : HEADER + 2 * size]
    return sampling.pick_tokens(logits[:num], words[begin : begin + num], rows, positions, state.draws, state.tokens)

state, logits = RowState(REQUESTS + 1, 101, 16), torch.zeros(REQUESTS, VOCAB)
sampler = CudaSampler(state, VOCAB)
pick(1, 100, 4)
sampler.warm_up(logits)
known = set(seen)
kernels = {name for name, *_ in known}
assert kernels == {"_pick", "_settle", "_survey", "_narrow", "_collect", "_finish"}, kernels

kinds = [
    dict(top_k=5), dict(top_p=0.5), dict(min_p=0.1), dict(typical_p=0.5), dict(temperature=0.0, presence_penalty=1.0),
    dict(logit_bias={3: 1.0}), dict(top_k=16, top_p=0.9, repetition_penalty=1.1),
]
for num in (1, 3, 7, 16, 33, 64, 70):
    for begin in (128, 129, 130, 131):
        tokens = pick(num, begin, num)
    for first in range(len(kinds)):
        for row in range(num):
            state.params[row] = SamplingParams(**kinds[(first + row) % len(kinds)])
        rows = list(range(num))
        sampler.redraw(rows, rows, [17] * num, logits[:num], tokens[1:] if num > 64 else tokens)
assert seen == known, sorted(seen - known)

"""


def test_odd_batches_need_no_kernels_that_the_warm_up_has_not_made(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", NOTE], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
