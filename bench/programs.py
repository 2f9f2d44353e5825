"""Branches of a program with a shared prefix, against the same calls without sharing, in turns: computed tokens and time.

.venv/bin/python -m bench.programs --branches 32 --prefix 2048 --turns 2
"""

from __future__ import annotations

import argparse
import time

from tidemill import LLM, gen, join, program
from tidemill.programs import State, Usage

_WORDS = "tide mill pond wheel sluice gate moon stone grain flour miller harbour stream winter summer water".split()


def prefix_of(llm: LLM, num_tokens: int) -> str:
    """A text without repeated pages."""
    lines, num = [], 0
    while num < num_tokens:
        line = f"{len(lines) + 1}. The {' and the '.join(_WORDS[(len(lines) * k + k) % len(_WORDS)] for k in (1, 3, 7))} were there.\n"
        num += len(llm.tokenizer.encode(line, add_special=False))
        lines.append(line)
    return "".join(lines)


@program
def thoughts(s: State, prefix: str, first: int, num: int, length: int) -> None:
    s += prefix
    branches = s.fork(num)
    for i, branch in enumerate(branches, first):
        branch += f"Thought {i} about this:" + gen("thought", max_tokens=length, temperature=0, ignore_eos=True)
    join(branches)


def timed(llm: LLM, *arguments: object, share: bool) -> tuple[list[str], Usage, float]:
    llm.core.scheduler.kv.clear_prefixes()
    begun = time.perf_counter()
    state = thoughts.run(*arguments, backend=llm, share_prefix=share)
    return state["thought"], state.usage, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--branches", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--length", type=int, default=32, help="tokens that each branch generates")
    parser.add_argument(
        "--turns", type=int, default=2, help="parts of the calls without sharing; with it they are made before each"
    )
    given = parser.parse_args()
    llm = LLM(given.model, max_context=given.prefix + 1024, max_requests=given.branches, progress=False)
    prefix = prefix_of(llm, given.prefix)
    thoughts.run("Warm up.", 0, 2, 2, backend=llm)
    shared_s, alone_s, alone, alone_texts = [], 0.0, 0, []
    part = given.branches // given.turns
    for turn in range(given.turns):
        texts, usage, seconds = timed(llm, prefix, 0, given.branches, given.length, share=True)
        shared_s.append(seconds)
        print(f"with sharing: {usage.num_requests} requests, {usage.num_computed} tokens computed, {seconds:.1f} s", flush=True)
        made, used, seconds = timed(llm, prefix, turn * part, part, given.length, share=False)
        alone_texts += made
        alone += used.num_computed
        alone_s += seconds
        print(f"without: {used.num_requests} requests, {used.num_computed} tokens computed, {seconds:.1f} s", flush=True)
    assert alone_texts == texts[: len(alone_texts)], "sharing changed a text"
    mean_s = sum(shared_s) / len(shared_s)
    print(f"computed tokens: {alone / usage.num_computed:.1f}x fewer; time: {alone_s / mean_s:.1f}x faster; texts equal")


if __name__ == "__main__":
    main()
