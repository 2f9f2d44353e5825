"""What KV policies cost and save: perplexity, pages held and speed on the default model.

    python -m bench.kv_policies streaming --tokens 32768
    python -m bench.kv_policies h2o --tokens 4096 --texts 4
    python -m bench.kv_policies quest --tokens 4096
    python -m bench.kv_policies budgets --tokens 1024 --texts 1

The text is that of bench/perplexity.py. Requests that are compared run in one engine, side by side;
for speed, in turn.
"""

from __future__ import annotations

import argparse
import math
import time
from statistics import median
from typing import Any, cast

from bench.perplexity import text_ids
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.runner.base import StepResult
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.types.kv_policy import read_policy
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

Policy = dict[str, Any]
BLOCK = 2048


def load(model: str) -> EngineCore:
    return load_core(
        EngineOptions(model=model, prefix_caching=False, kv_memory_bytes=2**30, speculate="off")
    )


def logprobs(
    core: EngineCore, texts: dict[str, tuple[list[int], Policy]]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """By request: of each token of its text after the first, and the most pages it held."""
    found: dict[str, list[float]] = {name: [] for name in texts}
    pages = dict.fromkeys(texts, 0)
    for name, (ids, policy) in texts.items():
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, kv_policy=read_policy(policy)
        )
        core.submit(Submit(name, ids, params))
    while core.has_work:
        for delta in core.step()[0].deltas:
            found[delta.request_id] += [entry.logprob for entry in delta.prompt_logprobs or []]
        for request in core.scheduler.running:
            pages[request.request_id] = max(
                pages[request.request_id], core.scheduler.kv.num_pages_of(request.seq)
            )
    return found, pages


def perplexity(values: list[float]) -> float:
    return math.exp(-sum(values) / len(values))


def tokens_of(
    core: EngineCore, ids: list[int], num: int, policy: Policy
) -> tuple[list[int], float]:
    """Greedy tokens, and the median time of a step that computes one."""
    core.submit(
        Submit(
            "x",
            ids,
            SamplingParams(
                temperature=0.0, max_tokens=num, ignore_eos=True, kv_policy=read_policy(policy)
            ),
        )
    )
    tokens, times = list[int](), list[float]()
    while core.has_work:
        began = time.perf_counter()
        deltas = core.step()[0].deltas
        if tokens:
            times.append(time.perf_counter() - began)
        for delta in deltas:
            tokens += delta.token_ids
    return tokens, median(times)


def streaming(core: EngineCore, model: str, num_tokens: int, _: int) -> None:
    """Each block is printed when it is computed: the whole takes a while."""
    ids = text_ids(model, num_tokens)
    kinds: dict[str, Policy] = {
        "streaming": {"kind": "streaming", "sinks": 4, "recent": 1020},
        "window": {"kind": "window", "recent": 1024},
    }
    for name, policy in kinds.items():
        values: list[float] = []
        readers = cast(CpuRunner, core.runner).readers
        readers[:] = [
            lambda plan, hidden, result, name=name, values=values: _print_blocks(
                name, values, result
            )
        ]
        pages = logprobs(core, {name: (ids, policy)})[1]
        print(
            f"{name}: perplexity {perplexity(values):.2f} on {num_tokens:,} tokens, {pages[name]} pages held at most",
            flush=True,
        )


def _print_blocks(name: str, values: list[float], result: StepResult) -> None:
    before = len(values) // BLOCK
    values += [entry.logprob for entries in result.prompt_logprobs.values() for entry in entries]
    for first in range(before * BLOCK, len(values) // BLOCK * BLOCK, BLOCK):
        print(
            f"{name}: {perplexity(values[first : first + BLOCK]):.2f} in tokens {first:,} to {first + BLOCK:,}",
            flush=True,
        )


def h2o(core: EngineCore, model: str, num_tokens: int, num_texts: int) -> None:
    ids = text_ids(model, num_tokens * num_texts)
    texts = [ids[i * num_tokens : (i + 1) * num_tokens] for i in range(num_texts)]
    budget = num_tokens // 5
    kinds: dict[str, Policy] = {
        "full": {"kind": "full"},
        "h2o 20 %": {"kind": "h2o", "budget": budget},
        "recent only": {"kind": "window", "recent": budget},
        "random": {"kind": "random", "budget": budget},
    }
    totals: dict[str, list[float]] = {name: [] for name in kinds}
    for number, text in enumerate(texts):
        found, pages = logprobs(core, {name: (text, policy) for name, policy in kinds.items()})
        for name in found:
            totals[name] += found[name][budget:]  # before, nothing is given up
        if not number:
            print(
                f"{num_texts} texts of {num_tokens:,} tokens; pages held at most: {pages}",
                flush=True,
            )
    print("| policy | perplexity |\n|---|---|")
    for name, values in totals.items():
        print(f"| {name} | {perplexity(values):.3f} |")
    whole = [tokens_of(core, text[:500], 64, {"kind": "h2o", "budget": 1.0})[0] for text in texts]
    plain = [tokens_of(core, text[:500], 64, {"kind": "full"})[0] for text in texts]
    print(
        f"h2o at 100 %: {sum(one == other for one, other in zip(whole, plain, strict=True))} of {num_texts} outputs identical"
    )


def quest(core: EngineCore, model: str, num_tokens: int, num_texts: int) -> None:
    ids = text_ids(model, num_tokens)
    half = num_tokens // 2
    found, _ = logprobs(core, {
        "full": (ids, {"kind": "full"}),
        "quest": (ids, {"kind": "quest", "budget": 0.25, "dense": half}),
    })  # fmt: skip
    values = {name: perplexity(of[half:]) for name, of in found.items()}
    print(
        f"perplexity of tokens {half:,} to {num_tokens:,}: {values}; quest / full {values['quest'] / values['full']:.4f}"
    )
    times: dict[str, list[float]] = {"full": [], "quest": []}
    for _ in range(num_texts):
        for name, of in times.items():
            of.append(
                tokens_of(
                    core, ids, 32, {"kind": name} | ({"budget": 0.25} if name == "quest" else {})
                )[1]
            )
    took = {name: median(of) for name, of in times.items()}
    print(f"a decode step at {num_tokens:,} tokens: full {1e3 * took['full']:.1f} ms, quest {1e3 * took['quest']:.1f} ms, "
          f"{took['full'] / took['quest']:.2f}x")  # fmt: skip


def budgets(core: EngineCore, model: str, num_tokens: int, num_texts: int) -> None:
    """All policies at one budget, an eighth of the text, after 256 tokens that everything sees."""
    ids, dense, budget = text_ids(model, num_tokens * num_texts), 256, num_tokens // 8
    sparse: Policy = {"budget": 0.125, "dense": dense}
    kinds: dict[str, Policy] = {
        "full": {"kind": "full"},
        "window": {"kind": "window", "recent": budget},
        "streaming": {"kind": "streaming", "sinks": 4, "recent": budget - 4},
        "h2o": {"kind": "h2o", "budget": budget},
        "quest": {"kind": "quest"} | sparse,
        **{
            f"double, {num} channels": {"kind": "double", "channels": num} | sparse
            for num in (8, 16, 32)
        },
    }
    totals: dict[str, list[float]] = {name: [] for name in kinds}
    for i in range(num_texts):
        text = ids[i * num_tokens : (i + 1) * num_tokens]
        for name, values in logprobs(
            core, {name: (text, policy) for name, policy in kinds.items()}
        )[0].items():
            totals[name] += values[dense - 1 :]
    print(
        f"{num_texts} texts of {num_tokens:,} tokens, a budget of {budget}: perplexity of the tokens after {dense}"
    )
    print("| policy | perplexity |\n|---|---|")
    for name, values in totals.items():
        print(f"| {name} | {perplexity(values):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("streaming", "h2o", "quest", "budgets"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=3)
    arguments = parser.parse_args()
    run = {"streaming": streaming, "h2o": h2o, "quest": quest, "budgets": budgets}[arguments.what]
    run(load(arguments.model), arguments.model, arguments.tokens, arguments.texts)


if __name__ == "__main__":
    main()
