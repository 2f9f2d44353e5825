"""Kernels that start before the one before them has ended.

Every kernel is launched as a programmatic dependent of its predecessor: it may be set up while that one still runs, and waits
inside, before it reads anything a kernel wrote. Every program of every kernel waits, so that what was true of ordinary launches
(all earlier kernels are done) holds past that point.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LAUNCH_AHEAD = 0 if os.environ.get("TRITON_INTERPRET") == "1" else int(os.environ.get("AHEAD", "0"))


@triton.jit
def begin_after(AHEAD: tl.constexpr):
    """The next kernel may be set up; go on when the one before is done."""
    if AHEAD == 2:
        gdc_launch_dependents()
    if AHEAD > 0:
        gdc_wait()
