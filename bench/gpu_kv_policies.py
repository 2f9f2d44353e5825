"""Milliseconds of decode steps of long contexts with each KV policy, on the GPU at hand.

python -m bench.gpu_kv_policies [--model llama8b]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.gpu_workloads import MODELS
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.types.kv_policy import read_policy
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


@cache
def loaded(model: str) -> EngineCore:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return load_core(
        EngineOptions(
            model=str(folder),
            load_format="dummy",
            max_context=20480,
            kv_memory_bytes=24 * 2**30,
            speculate="off",
            kv_policy="full",
        )
    )


def time_speed(model: str, length: int = 16384, batch: int = 4) -> None:
    """Decode steps of `batch` requests with contexts of `length` tokens, once every request
    decodes."""
    core, draw = loaded(model), random.Random(1)
    vocab = int(str(MODELS[model]["vocab_size"]))
    prompts = [[draw.randrange(10, vocab) for _ in range(length)] for _ in range(batch)]
    asked: dict[str, Any] = {
        "full": None, "window": {"kind": "window"}, "streaming": {"kind": "streaming"}, "snapkv": {"kind": "snapkv"},
        "quest, a quarter": {"kind": "quest"}, "quest, 1,024 tokens": {"kind": "quest", "budget": 1024},
        "h2o, a fifth": {"kind": "h2o"},
    }  # fmt: skip
    for name, policy in asked.items():
        try:
            begin = time.perf_counter()
            for i, prompt in enumerate(prompts):
                params = SamplingParams(
                    temperature=0.0, max_tokens=80, ignore_eos=True, kv_policy=read_policy(policy)
                )
                core.submit(Submit(str(i), prompt, params))
            began, times, decoding = set[str](), list[float](), 0.0
            while core.has_work:
                at = time.perf_counter()
                output, failed = core.step()
                assert not failed
                began |= {delta.request_id for delta in output.deltas}
                if len(began) == batch:
                    decoding = decoding or at
                    times.append(time.perf_counter() - at)
            steps = sorted(1000 * one for one in times[2:])
            print(f"  {model}, {batch} x {length:,}, {name}: prompts {decoding - begin:.2f} s, decode step "
                  f"{sum(steps) / len(steps):.2f} ms (median {steps[len(steps) // 2]:.2f})", flush=True)  # fmt: skip
        except Exception:
            traceback.print_exc()
            print(f"  {name}: FAILED", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama8b", choices=MODELS)
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    time_speed(given.model)


if __name__ == "__main__":
    main()
