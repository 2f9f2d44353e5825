"""KV policies on the GPU at hand: right, the same bits in any company, and what they cost.

    python -m bench.gpu_kv_policies [--parts kernels,engine,speed] [--policies window,quest] [--model llama8b]

kernels: attention with each policy, token by token and in chunks, against the torch reference on the CPU. engine: tokens and log
probabilities alone, among others, in chunks, cached and preempted; those of others are what they are without. speed: milliseconds
of decode steps of long contexts with each policy, beside none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_engine_checks import ask, nothing_compiles, random_llama
from bench.gpu_workloads import MODELS
from tidemill.cache_layout import one_group
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels.cuda import attention_lists
from tidemill.kernels.kv_cache import Angles, PagedKV
from tidemill.kernels.policies import Policies
from tidemill.kernels.policy_attention import plan_policies
from tidemill.kernels.rope import rope_frequencies, rope_tables
from tidemill.kv_policy import read_policy, settle
from tidemill.model_config import AttentionSpec
from tidemill.runner.cuda_policies import CudaPolicies, Launches
from tidemill.sampling import SamplingParams
from tidemill.wire import Submit

GIVEN: dict[str, dict[str, Any]] = {
    "window": {"kind": "window", "recent": 300},
    "streaming": {"kind": "streaming", "sinks": 4, "recent": 300},
    "h2o": {"kind": "h2o", "budget": 300},
    "snapkv": {"kind": "snapkv", "budget": 200, "observed": 32},
    "quest": {"kind": "quest", "budget": 0.3, "dense": 500, "dense_layers": 1},
}
HEADS, KV_HEADS, DIM, PAGE, PROMPT, NUM = 8, 2, 128, 64, 700, 712


def attended(kind: str, cuts: list[int], qkv: torch.Tensor, device: str) -> torch.Tensor:
    """A row with the policy beside one without, two layers; the first layer's results and the second's."""
    policy = settle(read_policy(GIVEN[kind]), PROMPT, NUM - PROMPT, 1024)
    angles = Angles(*(one.to(device) for one in rope_tables(*rope_frequencies(DIM, 1e4, None), 1024)))
    spec = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rotation=None, scale=DIM**-0.5)
    cache = torch.zeros(24, 2, 2, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device=device)
    table = torch.zeros(3, 16, dtype=torch.int32)
    table[0], table[1, 0] = torch.from_numpy(np.random.default_rng(0).permutation(20)[:16] + 1), 22
    kv = PagedKV(cache, [table.to(device)], (spec, spec), [angles, angles], one_group(2, PAGE).places)
    group, made = HEADS // KV_HEADS, []
    roles = device == "cuda" and attention_lists.by_roles((spec,))
    partial = torch.empty(2**12, HEADS, DIM + 2, device=device)
    done = torch.zeros(1024, KV_HEADS, dtype=torch.int32, device=device)
    how = Launches(
        partial, done, attention_lists.shared_rows(group) // group, attention_lists.prompt_rows(group, roles) // group,
        attention_lists.single_rows(group) // group, roles, 64, 16, 32, 16,
    )  # fmt: skip
    rows = CudaPolicies(kv, table.numpy(), how) if device == "cuda" else None
    plain = Policies(kv)
    (plain if rows is None else rows.rows).take(0, policy)
    for start, end in itertools.pairwise(cuts):
        parts = np.array([(1, 0, 2), (0, start, end - start)], np.int32)
        given = torch.cat([qkv[:2], qkv[start:end]]).to(device)
        if rows is not None:
            _, step = rows.plan(parts, np.array([True, True]), len(given))
        else:
            rounds = plain.rounds(*parts.T)
            positions = np.concatenate([np.arange(2), np.arange(start, end)])
            places, row_of = plain.places(rounds, positions), np.array([1, 1] + [0] * (end - start))
            where = table.numpy()[row_of, np.maximum(places, 0) // PAGE] * PAGE + places % PAGE
            slots = torch.from_numpy(np.where(places < 0, -1, where)[None].astype(np.int64))
            step = plan_policies(kv, rounds, torch.from_numpy(positions), slots)  # type: ignore[assignment]
            given = given.float()
        made.append(torch.cat([step.attend(layer, given.clone())[2:].float().cpu() for layer in (0, 1)], 1))
    return torch.cat(made)


def check_kernels(kinds: list[str]) -> None:
    torch.manual_seed(0)
    qkv = (torch.randn(NUM, (HEADS + 2 * KV_HEADS) * DIM) * 1.5).bfloat16()
    whole, pieces = [0, 301, PROMPT, *range(PROMPT + 1, NUM + 1)], [0, 64, 65, 333, 690, NUM - 5, NUM]
    for kind in kinds:
        found = attended(kind, whole, qkv, "cuda")
        same = torch.equal(attended(kind, pieces, qkv, "cuda"), found)
        expected = attended(kind, [0, NUM] if kind != "snapkv" else [0, PROMPT, NUM], qkv, "cpu")
        off = (found - expected).abs().amax(1)
        near = float((off < 0.03).float().mean())
        print(f"  {kind}: {near:.1%} of tokens near the reference, largest difference {float(off.max()):.4f}, other cuts "
              f"{'the same bits' if same else 'OTHER BITS'}", flush=True)  # fmt: skip
        assert same
        assert near > 0.98


def check_engine(kinds: list[str]) -> None:
    folder = Path(tempfile.mkdtemp())
    random_llama(folder)
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    def core(**options: Any) -> EngineCore:
        given: dict[str, Any] = {"kv_memory_bytes": 2**27, "max_requests": 64, "speculate": "off", "max_context": 2048} | options
        return load_core(EngineOptions(model=str(folder), kv_policy="full", **given))

    prompt, plain = ids(PROMPT), SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1)
    others = {f"o{i}": (ids(1 + (i * 37) % 900), plain) for i in range(40)}
    engine, chunked, tight = core(), core(token_budget=64), core(kv_memory_bytes=2**22, max_context=1024)
    alone = {name: ask(engine, {name: one})[name] for name, one in itertools.islice(others.items(), 8)}
    without = ask(engine, {"x": (prompt, plain)})["x"]
    for kind in kinds:
        policy = GIVEN[kind]
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=1, kv_policy=read_policy(policy))
        x = {"x": (prompt, params)}
        try:
            with nothing_compiles():
                lone = ask(engine, x)["x"]
            assert lone[0][:30] != without[0] or lone[1][:30] != without[1], "as without"
            wrong = []
            if ask(engine, x)["x"] != lone:
                wrong.append("again")
            together = ask(engine, others | x)
            if together["x"] != lone:
                wrong.append("among 40 others")
            wrong += [f"{name} beside it" for name, one in alone.items() if together[name] != one]
            if ask(chunked, x)["x"] != lone:
                wrong.append("in chunks of 64")
            if ask(tight, dict(itertools.islice(others.items(), 20)) | x)["x"] != lone:
                wrong.append("preempted")
            if ask(engine, {"x": (prompt, plain)})["x"] != without:
                wrong.append("without it, afterwards")
            print(
                f"  {kind}: {'WRONG: ' + ', '.join(wrong) if wrong else 'the same tokens and logprobs in any company'}",
                flush=True,
            )
        except Exception:
            traceback.print_exc()
            print(f"  {kind}: FAILED", flush=True)


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
    """Decode steps of `batch` requests with contexts of `length` tokens, once every request decodes."""
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
                params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, kv_policy=read_policy(policy))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="kernels,engine,speed")
    parser.add_argument("--policies", default=",".join(GIVEN), help="of the parts kernels and engine")
    parser.add_argument("--model", default="llama8b", choices=MODELS)
    given = parser.parse_args()
    asked = given.policies.split(",")
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for part in given.parts.split(","):
        begin = time.perf_counter()
        try:
            {
                "kernels": lambda: check_kernels(asked),
                "engine": lambda: check_engine(asked),
                "speed": lambda: time_speed(given.model),
            }[part]()
        except Exception:
            traceback.print_exc()
        print(f"{part}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
