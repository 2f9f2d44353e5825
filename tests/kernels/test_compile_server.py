"""Kernels compiled by other processes are found in Triton's cache by the process that needs them.
For an H200; none is needed."""

from __future__ import annotations

import os
import subprocess
import sys

_NEEDS_THREE_KERNELS = """
import sys
from pathlib import Path
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from tidemill.kernels.cuda import compile_server, logprobs, norm
from tidemill.kernels.cuda.launch import compile_only

class NoDriver(compile_server._NoDriver):
    def get_current_stream(self, device):
        return 0

compile_server._GPU = Path("/")
driver.set_active(NoDriver(GPUTarget("cuda", 90, 32)))
hits = []
knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
x, weight = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)

def needs():
    with compile_only():
        norm.add_rms_norm(x, x.clone(), weight, 1e-5)
        logprobs.score(x.float(), torch.zeros(4, dtype=torch.int32), 0)

with compile_server.compile_elsewhere():
    needs()
assert not hits, "compiled here"
assert compile_server._server is None, "still running"
needs()
print(hits)

sent = len(hits)
compile_server._server = type("Server", (), {"kill": lambda _: None, "communicate": lambda _: None})()  # not asked: no stdin
for kernel in (norm._add_rms_norm, logprobs._summarize, logprobs._normalize):
    kernel.device_caches.clear()
with compile_server.compile_elsewhere():
    needs()
assert hits[sent:] == [True] * 3, "known to be in the cache"
"""


def test_compiled_elsewhere_and_found_here(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _NEEDS_THREE_KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[True, True, True]", done.stdout + done.stderr
