"""Builds the compiled CPU kernels where a compiler is there; without them the engine runs on torch.
All else: pyproject.toml."""

import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup

FOLDER = "tidemill/kernels/native"
HASH = runpy.run_path(f"{FOLDER}/sources.py")["source_hash"](Path(FOLDER))
NAMES = (
    "pool",
    "tiles",
    "linear",
    "linear_codes",
    "linear_tokens",
    "rows",
    "norm",
    "glu",
    "sample",
    "kv_write",
    "attention",
    "attention_tiles",
    "kvquant",
    "policy_attention",
    "routing",
    "moe",
    "scan",
    "lora",
    "group",
    "transfer",
    "stream",
    "neurons",
    "program",
)
SOURCES = [f"{FOLDER}/{name}.c" for name in NAMES]
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
]
# One library for each instruction set; the best that the CPU has is loaded. Never -march=native: a
# built wheel may move.
VARIANTS = {
    "aarch64": {"_neon": ["-march=armv8.2-a+dotprod", "-mtune=neoverse-n1"]},
    "arm64": {"_neon": ["-march=armv8.2-a+dotprod", "-mtune=neoverse-n1"]},
    "x86_64": {
        "_avx2": ["-mavx2", "-mfma", "-mf16c"],
        "_avx512": [
            "-mavx2",
            "-mfma",
            "-mf16c",
            "-mavx512f",
            "-mavx512vl",
            "-mavx512bw",
            "-mavx512vnni",
        ],
    },
}

setup(
    ext_modules=[
        Extension(
            f"tidemill.kernels.native.{name}",
            SOURCES,
            depends=[
                f"{FOLDER}/{name}.h"
                for name in (
                    "simd",
                    "rows",
                    "tiles",
                    "tidemill",
                    "linear",
                    "linear_neon",
                    "attention",
                    "kv_codes",
                )
            ],
            define_macros=[("TM_SOURCES", f'"{HASH}"')],
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-pthread"],
            libraries=["m"],
            optional=True,
        )
        for name, flags in VARIANTS.get(platform.machine(), {}).items()
    ]
)
