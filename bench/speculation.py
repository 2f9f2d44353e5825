"""What speculation saves on the CPU at hand: the same requests without it and with it, in turns;
every token is compared.

    python -m bench.speculation [--speculate auto] [--turns 3] [--requests 1] [--model smollm2]

Prompts of two kinds: what follows copies from the prompt (code, JSON records, a text that is
quoted), or it does not. Each is asked with a salt of its own, so that no earlier output helps, and
then once more with the same salt.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import inspect, load_core
from tidemill.engine.parts.drafting import Drafting
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

CODE = """def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

def variance(values):
    center = mean(values)
    total = 0.0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)

def deviation(values):
    return variance(values) ** 0.5
"""
RECORDS = [
    {"id": i, "name": f"item {i}", "price": 5, "in_stock": True, "tags": ["new", "sale"]}
    for i in range(6)
]
TEXT = (
    "The mill stands where the river meets the sea. At high tide its pond fills through a gate that the water itself pushes "
    "open; at low tide the gate is shut and the pond turns the wheel. The miller works when the moon says so, twice a day, an "
    "hour later each day, and sleeps in between."
)
COPYING = {  # to be continued, so that a small model copies as well as a large one that is asked to
    "code": f"# statistics.py\n{CODE}\n# a copy of statistics.py\n{CODE}\n# a copy of statistics.py\ndef mean(values):\n",
    "edit": f"Before:\n{CODE}\nAfter:\n{CODE.replace('mean', 'average')}\nBefore:\n{CODE}\nAfter:\ndef average(values):\n",
    "json": "\n".join(json.dumps(record) for record in RECORDS) + "\n",
    "quote": f"{TEXT}\n\n{TEXT}\n\nThe mill stands",
}
FREE = {
    "story": "Write a short story about a lighthouse keeper who finds a letter.",
    "advice": "How should a beginner start to learn the piano?",
    "facts": "Explain how tides work.",
    "poem": "Write a poem about the first snow in a city.",
}


def run(
    core: EngineCore,
    prompts: dict[str, list[int]],
    num_requests: int,
    num_tokens: int,
    salt: str = "",
) -> tuple[float, dict[str, list[int]], int, int]:
    """Seconds of decoding, answers, drafts, drafts that were right; `num_requests` at a time."""
    seconds, answers, num_drafts, num_right = 0.0, {name: list[int]() for name in prompts}, 0, 0
    names = list(prompts)
    for first in range(0, len(names), num_requests):
        batch = names[first : first + num_requests]
        for name in batch:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            core.submit(Submit(name, prompts[name], params, salt=salt))
        began = 0.0
        while core.has_work:
            output, failed = core.step()
            assert not failed, failed
            if began == 0.0 and output.deltas:
                began = time.perf_counter()
            for delta in output.deltas:
                answers[delta.request_id] += delta.token_ids
            for event in output.events:
                if isinstance(event, events.DraftsVerified):
                    num_drafts += sum(num for _, num, _ in event.of)
                    num_right += sum(num for _, _, num in event.of)
        seconds += time.perf_counter() - began
    return seconds, answers, num_drafts, num_right


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--draft-model")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--json")
    given = parser.parse_args()
    options = EngineOptions(
        model=given.model,
        speculate=given.speculate,
        draft_model=given.draft_model,
        kv_memory_bytes=2**29,
    )
    core = load_core(options)
    drafting = core.part(Drafting)
    tokenizer = Tokenizer.load(inspect(given.model)[0].path)
    lines = []
    for kind, texts in (("copying", COPYING), ("free", FREE)):
        for name, text in texts.items():
            if kind == "free":
                text = tokenizer.render_chat(
                    [{"role": "user", "content": text}], add_generation_prompt=True
                )
            prompt = tokenizer.encode(text)
            prompts = {f"{name}{i}": prompt for i in range(given.requests)}
            best: dict[str, float] = {}
            expected: dict[str, list[int]] = {}
            counts: dict[str, list[int]] = {}
            for turn in range(given.turns):
                for how in ("off", "first", "again"):
                    core.use(*core.parts_but(Drafting), *[drafting] * (how != "off"))
                    seconds, answers, *counts[how] = run(
                        core, prompts, given.requests, given.tokens, f"{name}{turn}"
                    )
                    assert not expected or answers == expected, "drafts changed a token"
                    expected = answers
                    best[how] = min(best.get(how, seconds), seconds)
            line: dict[str, Any] = {
                "kind": kind,
                "prompt": name,
                "gain": best["off"] / best["first"],
            }
            line |= {
                "drafts": counts["first"][0],
                "right": counts["first"][1],
                "again": best["off"] / best["again"],
            }
            lines.append(line)
            drafts = f"{line['right']} of {line['drafts']} drafts right"
            print(
                f"{kind:8} {name:8} {line['gain']:.2f} x; {drafts}; again {line['again']:.2f} x",
                flush=True,
            )
    for kind in ("copying", "free"):
        for key in ("gain", "again"):
            gains = [line[key] for line in lines if line["kind"] == kind]
            print(
                f"{kind} {key}: {min(gains):.2f} to {max(gains):.2f}, mean {sum(gains) / len(gains):.2f}"
            )
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
