"""Costs of drafts by heads on the GPU at hand: `python -m bench.gpu_heads [--model qwen06b]`

Weights and heads are random, so few of the drafts are right.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.gpu_workloads import MODELS
from tidemill.config import HEADS, EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.drafting import Drafting
from tidemill.runner.spec.heads import Target, new_head
from tidemill.runner.spec.stored import save_draft
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

SETTINGS = {"medusa": {"num_heads": 4}, "eagle": {}, "exit": {"layer": 2}}


def prompt(seed: int, num: int) -> list[int]:
    return [(seed * 97 + i * i * 31 + i * 7) % 3000 + 10 for i in range(num)]


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(shape))


def write_heads(folder: Path, core: EngineCore, num_ids: int) -> None:
    """A folder for each kind; early exits have two."""
    model: Any = core.runner.model  # type: ignore[attr-defined]
    target = Target(model, torch.arange(10, 10 + num_ids))
    about = {"least_probability": 0.0, "draft_cost": 0.1, "step_costs": [1.0, 1.01, 1.02]}
    for kind, settings in SETTINGS.items():
        for layer in (1, 2) if kind == "exit" else (0,):
            torch.manual_seed(layer)
            head = new_head(
                kind, target.hidden_size, settings | ({"layer": layer} if layer else {})
            )
            for value in head.requires_grad_(False).parameters():
                value += torch.randn_like(value) * 0.02
            save_draft(folder / kind / (f"exit-{layer}" if layer else ""), head, target, about)
            if layer == 2:
                save_draft(folder / kind, head, target, about)


def make_core(folder: Path, name: str, **options: Any) -> EngineCore:
    heads = str(folder / "heads" / name.partition("-")[0]) if name in HEADS else None
    given: dict[str, Any] = {
        "max_context": 2048,
        "max_requests": 16,
        "kv_memory_bytes": 2**30,
        "load_format": "dummy",
    } | options
    return load_core(
        EngineOptions(
            model=str(folder),
            speculate=name,
            draft_heads=heads,
            adaptive_drafts=False,
            max_drafts=6,
            **given,
        )
    )


def time_all(model: str) -> None:
    """A step of one request without drafts and with them, and what of it is the heads' own work."""
    folder = Path(tempfile.mkdtemp())
    write_model(folder, MODELS[model])
    core = make_core(folder, "off", max_requests=8)
    write_heads(folder / "heads", core, 32_000)
    for num in (1, 8):
        print(
            f"{model} without drafts, {num} requests: {_step_ms(core, num)[0]:.2f} ms a step",
            flush=True,
        )
    for name in ("medusa", "eagle", "eagle-tree", "exit"):
        del core
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        core = make_core(folder, name, max_requests=8)
        for num in (1, 8):
            step, propose, drafts = _step_ms(core, num)
            print(
                f"{model} {name}, {num} requests: {step:.2f} ms a step, {propose:.2f} of them for {drafts:.1f} drafts",
                flush=True,
            )


def _step_ms(core: EngineCore, num: int, num_steps: int = 40) -> tuple[float, float, float]:
    """A step, the proposals in it, and how many drafts there are."""
    for i in range(num):
        core.submit(
            Submit(
                str(i),
                prompt(i, 128),
                SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True),
            )
        )
    for _ in range(12):
        core.step()
    proposing, drafts = [0.0], [0]
    if core.config.speculate:
        drafter: Any = core.part(Drafting).drafters[0]
        propose = type(drafter).propose.__get__(drafter)

        def timed(asks: Any) -> Any:
            begin = time.perf_counter()
            made = propose(asks)
            proposing[0] += time.perf_counter() - begin
            drafts[0] += sum(map(len, made))
            return made

        drafter.propose = timed
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(num_steps):
        core.step()
    torch.cuda.synchronize()
    took = time.perf_counter() - begin
    while core.has_work:
        core.step()
    return took / num_steps * 1000, proposing[0] / num_steps * 1000, drafts[0] / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen06b", choices=MODELS)
    given = parser.parse_args()
    time_all(given.model)


if __name__ == "__main__":
    main()
