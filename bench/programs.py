"""Branches of a program with a shared prefix, against the same calls without sharing, in turns:
computed tokens and time.

python -m bench.programs --branches 32 --prefix 2048
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

from tidemill import LLM, gen, join, program
from tidemill.programs import State

_WORDS = (
    "tide",
    "mill",
    "pond",
    "wheel",
    "sluice",
    "gate",
    "moon",
    "stone",
    "grain",
    "flour",
    "miller",
    "harbour",
    "stream",
)


def prefix_of(llm: LLM, num_tokens: int) -> str:
    """A text without repeated pages."""
    lines, num = list[str](), 0
    while num < num_tokens:
        words = (_WORDS[(len(lines) * k + k) % len(_WORDS)] for k in (1, 3, 7))
        line = f"{len(lines) + 1}. The {' and the '.join(words)} were there.\n"
        num += len(llm.tokenizer.encode(line, add_special=False))
        lines.append(line)
    return "".join(lines)


@program
def thoughts(s: State, prefix: str, num: int, length: int) -> None:
    s += prefix
    branches = s.fork(num)
    for i, branch in enumerate(branches):
        branch += f"Thought {i} about this:" + gen(
            "thought", max_tokens=length, temperature=0, ignore_eos=True
        )
    join(branches)


@dataclass(slots=True)
class Figures:
    """Of calls that were made together."""

    num_calls: int = 0
    num_computed: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0  # says more than seconds where others use the same cores
    texts: list[str] = field(default_factory=list)

    def measure(self, llm: LLM, *arguments: object, share: bool) -> None:
        llm.core.scheduler.kv.clear_prefixes()
        begun, cpu = time.perf_counter(), time.process_time()
        state = thoughts.run(*arguments, backend=llm, share_prefix=share)
        took, took_cpu = time.perf_counter() - begun, time.process_time() - cpu
        what, usage = "with sharing" if share else "without", state.usage
        print(
            f"{what}: {usage.num_requests} calls, {usage.num_computed} tokens computed, {took:.1f} s, {took_cpu:.1f} CPU s",
            flush=True,
        )
        self.num_calls += usage.num_requests
        self.num_computed += usage.num_computed
        self.seconds += took
        self.cpu_s += took_cpu
        self.texts += state["thought"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--branches", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--length", type=int, default=32, help="tokens that each branch generates")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--calls",
        type=int,
        help="of a turn without sharing; as many as there are branches, unless given",
    )
    given = parser.parse_args()
    num_calls = given.calls or given.branches
    llm = LLM(
        given.model, max_context=given.prefix + 1024, max_requests=given.branches, progress=False
    )
    prefix = prefix_of(llm, given.prefix)
    thoughts.run("Warm up.", 2, 2, backend=llm)
    shared, alone = Figures(), Figures()
    for _ in range(given.turns):
        shared.measure(llm, prefix, given.branches, given.length, share=True)
        alone.measure(llm, prefix, num_calls, given.length, share=False)
    assert alone.texts[:num_calls] == shared.texts[:num_calls], "sharing changed a text"
    ratios = [
        (getattr(alone, name) / alone.num_calls) / (getattr(shared, name) / shared.num_calls)
        for name in ("num_computed", "seconds", "cpu_s")
    ]
    print(
        "per call without sharing / with: computed tokens {:.1f}, seconds {:.1f}, CPU seconds {:.1f}; texts equal".format(
            *ratios
        )
    )


if __name__ == "__main__":
    main()
