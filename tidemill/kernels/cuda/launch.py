"""Kernels that are set up before the one before them has ended.

Every kernel is launched as a programmatic dependent of its predecessor: its launch overlaps the other's last programs, and it
waits inside, before it reads anything the kernel before it wrote. Every program of every kernel waits, so that what is true of
ordinary launches (all earlier kernels are done) holds from there on; and before that, all earlier ones but the last are done.
(Letting the next kernel in any earlier, when all programs of this one have begun, made a decoding step slower: those that wait
take room from those that work.)
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOW = {"AHEAD": not IS_INTERPRETED, "launch_pdl": not IS_INTERPRETED}  # of every launch


@triton.jit
def begin(AHEAD: tl.constexpr):
    """Go on when the kernel before is done."""
    if AHEAD:
        gdc_wait()
