"""Nothing is compiled after start, also with KV policies: launches of an engine noted instead of
run, as in tests/kernels/test_cuda_specialization.py. Tokens are zeros, and what a step launches
does not depend on them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.helpers import LONG_S

SCRIPT = '''
import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from tests.kernels.noted import seen

class Zeros(TorchFunctionMode):
    """Of what kernels would write."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        return made.zero_() if func in (torch.empty, torch.empty_like, torch.Tensor.new_empty) else made

from tests.helpers import greedy, make_llama, run as answer
from tests.runner.test_cuda_policies import POLICIES
from tests.runner.test_cuda_runner import COMPILE, engines, ids
from tidemill.kernels.cuda import launch
from tidemill.runner import cuda_runner

assert not launch.IS_INTERPRETED
folder = Path(sys.argv[1])
make_llama(
    folder, vocab_size=64, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=1, max_position_embeddings=2048,
)
patch = pytest.MonkeyPatch()
patch.setattr(torch.cuda, "get_device_capability", lambda *given: (9, 0))
with Zeros(), engines(folder, patch) as make:
    patch.setattr(cuda_runner.CudaRunner, "compile", COMPILE)
    core = make(folder, kv_policy="full", token_budget=64)
    assert core.runner.state.tokens.numel() % 4  # else tables would be at multiples of 16 bytes by chance
    known = set(seen)
    for kind, policy in POLICIES.items():
        asked, plain = greedy(9, logprobs=1, ignore_eos=True, kv_policy=policy), greedy(3, ignore_eos=True)
        answer(core, {"x": (ids(90, 1), asked), "y": (ids(20, 2), plain), "z": (ids(60, 3), asked)})
        assert not seen - known, (kind, sorted(seen - known))
    assert {"_attend_single", "_attend_prompts", "_weigh_slots", "_add_to_slots", "_bound_pages"} <= {name for name, *_ in known}
'''


def test_steps_with_policies_need_no_kernels_that_start_has_not_made(tmp_path):
    """With page tables that would begin at odd addresses if they were laid behind the tokens as
    they come."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LONG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
