"""Draft heads and trees of drafts on the GPU at hand: tokens and logprobs are those without them; then what a draft costs.

    python -m bench.gpu_heads [--model qwen06b] [--skip-times]

Weights and heads are random, so few of the heads' drafts are right; a drafter that knows the answers grows trees, of which many
are.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu_engine_checks import ask
from bench.gpu_workloads import MODELS
from tests.helpers import Grower, guess_with
from tidemill import events
from tidemill.config import HEADS, EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.runner.spec.heads import Target, new_head
from tidemill.runner.spec.stored import save_draft
from tidemill.sampling import SamplingParams
from tidemill.wire import Submit

SMALL = {
    "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 4096,
}  # fmt: skip
SETTINGS = {"medusa": {"num_heads": 4}, "eagle": {}, "exit": {"layer": 2}}


def prompt(seed: int, num: int) -> list[int]:
    return [(seed * 97 + i * i * 31 + i * 7) % 3000 + 10 for i in range(num)]


def requests(num_out: int = 48) -> dict[str, Any]:
    """Two of them go over the end of a split of 512 while trees are verified."""
    sampled: dict[str, Any] = {"temperature": 0.9, "max_tokens": num_out, "ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, logprobs=2)
    return {
        "greedy": (prompt(1, 90), greedy),
        "over a split": (prompt(2, 495), greedy),
        "seeded": (prompt(3, 500), SamplingParams(seed=5, logprobs=1, **sampled)),
        "restricted": (prompt(4, 300), SamplingParams(seed=6, top_k=40, top_p=0.9, min_tokens=9, logit_bias={5: 2.0}, **sampled)),
        "penalties": (prompt(5, 60), SamplingParams(seed=7, repetition_penalty=1.2, **sampled)),
        "long": (prompt(6, 1100), greedy),
    }


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
            head = new_head(kind, target.hidden_size, settings | ({"layer": layer} if layer else {}))
            for value in head.requires_grad_(False).parameters():
                value += torch.randn_like(value) * 0.02
            save_draft(folder / kind / (f"exit-{layer}" if layer else ""), head, target, about)
            if layer == 2:
                save_draft(folder / kind, head, target, about)


def make_core(folder: Path, name: str, **options: Any) -> EngineCore:
    heads = str(folder / "heads" / name.partition("-")[0]) if name in HEADS else None
    given: dict[str, Any] = {"max_context": 2048, "max_requests": 16, "kv_memory_bytes": 2**30, "load_format": "dummy"} | options
    return load_core(
        EngineOptions(model=str(folder), speculate=name, draft_heads=heads, adaptive_drafts=False, max_drafts=6, **given)
    )


def counting(core: EngineCore) -> Callable[[], tuple[int, int]]:
    assert core.drafting is not None
    seen, emit = list[Any](), core.drafting._emit
    core.drafting._emit = lambda event: (seen.append(event), emit(event))[1]  # type: ignore[func-returns-value]
    verified = lambda: [one for event in seen if isinstance(event, events.DraftsVerified) for one in event.of]  # noqa: E731
    return lambda: (sum(one[1] for one in verified()), sum(one[2] for one in verified()))


def check(name: str, core: EngineCore, expected: Any, asked: Any) -> None:
    counted = counting(core)
    begin = time.perf_counter()
    try:
        for _ in range(2):  # again with prefixes from the cache
            made = ask(core, asked)
            wrong = [key for key in asked if made[key] != expected[key]]
            assert not wrong, wrong
        num, right = counted()
        assert num, "no drafts"
        print(f"{name}: right; {right} of {num} drafts ({time.perf_counter() - begin:.1f} s)", flush=True)
    except Exception:
        print(f"{name}: WRONG", flush=True)
        traceback.print_exc()


def check_all() -> None:
    folder, asked = Path(tempfile.mkdtemp()), requests()
    write_model(folder, MODELS["llama8b"] | SMALL)
    plain = make_core(folder, "off")
    expected = ask(plain, asked)
    alone = ask(plain, {"greedy": asked["greedy"]})
    assert alone["greedy"] == expected["greedy"]
    write_heads(folder / "heads", plain, 2000)
    known = {tuple(tokens): expected[key][0] for key, (tokens, _) in asked.items()}
    branching = {key: one for key, one in asked.items() if key != "penalties"}  # which look at a row's tokens
    for name in HEADS:
        try:
            core = make_core(folder, name)
        except Exception:
            print(f"{name}: NOT MADE", flush=True)
            traceback.print_exc()
            continue
        check(name, core, expected, asked)
        if name == "medusa":
            check("trees with right branches", guess_with(core, Grower(known, 0.8, vocab_size=4096)), expected, branching)
        del core
    try:
        chunked = make_core(folder, "medusa", token_budget=64, max_requests=4)
    except Exception:
        traceback.print_exc()
        return
    check("medusa, chunks", chunked, expected, asked)
    check("trees, chunks", guess_with(chunked, Grower(known, 0.8, vocab_size=4096)), expected, branching)


def time_all(model: str) -> None:
    """A step of one request without drafts and with them, and what of it is the heads' own work."""
    folder = Path(tempfile.mkdtemp())
    write_model(folder, MODELS[model])
    core = make_core(folder, "off", max_requests=8)
    write_heads(folder / "heads", core, 32_000)
    for num in (1, 8):
        print(f"{model} without drafts, {num} requests: {_step_ms(core, num)[0]:.2f} ms a step", flush=True)
    for name in ("medusa", "eagle", "eagle-tree", "exit"):
        del core
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
        core = make_core(folder, name, max_requests=8)
        for num in (1, 8):
            step, propose, drafts = _step_ms(core, num)
            print(
                f"{model} {name}, {num} requests: {step:.2f} ms a step, {propose:.2f} of them for {drafts:.1f} drafts", flush=True
            )


def _step_ms(core: EngineCore, num: int, num_steps: int = 40) -> tuple[float, float, float]:
    """A step, the proposals in it, and how many drafts there are."""
    for i in range(num):
        core.submit(Submit(str(i), prompt(i, 128), SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)))
    for _ in range(12):
        core.step()
    proposing, drafts = [0.0], [0]
    if core.drafting is not None:
        drafter: Any = core.drafting._drafters[0]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen06b", choices=MODELS)
    parser.add_argument("--skip-times", action="store_true")
    given = parser.parse_args()
    check_all()
    if not given.skip_times:
        time_all(given.model)


if __name__ == "__main__":
    main()
