"""Steps in two halves on the GPU at hand: the bits of whole ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from bench.gpu_nano import drop
from tests.gpu.engines import ask, random_llama
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.types.sampling import SamplingParams


def test_steps_in_halves_have_the_bits_of_whole_ones(tmp_path: Path) -> None:
    folder, draw = tmp_path, random.Random(0)
    random_llama(folder)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    common = ids(600)
    requests = {
        f"r{i}": (
            (common if i % 5 == 0 else []) + ids(1 + (i * 37) % 900),
            SamplingParams(
                temperature=float(i % 2),
                max_tokens=10 + i % 50,
                seed=i,
                logprobs=2,
                ignore_eos=True,
            ),
        )
        for i in range(200)
    }
    seen = {}
    for how in ("off", "on"):
        options = {
            "kv_memory_bytes": 2**29,
            "max_requests": 128,
            "token_budget": 512,
            "nano_batching": how,
        }
        core = load_core(EngineOptions(model=str(folder), **options))  # type: ignore[arg-type]
        runner: Any = core.runner
        cuts = dict(runner.microbatches.cuts)
        seen[how] = ask(core, requests)
        alone = ask(core, {"r40": requests["r40"]})["r40"]
        assert bool(cuts) == (how == "on")
        assert alone == seen[how]["r40"]
        drop(core)
    assert seen["on"] == seen["off"]
