"""Cost of token masks for structured output.

    python -m bench.masks [--model smollm2] [--outputs 20]

Random tokens are drawn from what the grammar allows, as a model with random weights would; each
mask is timed alone. xgrammar is measured beside llguidance where it is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np

from tidemill.frontend.structured import BACKENDS, Grammars, Matcher
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.sampling import Grammar
from tidemill.weights.locate import locate

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["ebb", "flow", "slack"]}, "maxItems": 5},
        "home": {
            "type": "object",
            "properties": {"port": {"type": "string", "maxLength": 20}},
            "required": ["port"],
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(PERSON)),
    "any JSON object": Grammar("json_schema", '{"type": "object"}'),
    "regex": Grammar("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}: [a-z ]{10,60}\."),
}
MAX_TOKENS = 100


def allowed(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def follow(
    mask: Callable[[], np.ndarray], take: Callable[[int], bool], draw: random.Random
) -> list[float]:
    """The times of one output's masks, each with that of accepting a token. `take` accepts it; was
    it the last?"""
    times = []
    for _ in range(MAX_TOKENS):
        begin = time.perf_counter()
        words = mask()
        middle = time.perf_counter()
        choice = allowed(words)
        if not len(choice):
            break
        token = int(choice[draw.randrange(len(choice))])
        again = time.perf_counter()
        is_over = take(token)
        times.append(middle - begin + time.perf_counter() - again)
        if is_over:
            break
    return times


def measure(
    backend: str, tokenizer: Tokenizer, grammar: Grammar, num_outputs: int
) -> tuple[float, list[float]]:
    """Seconds to compile the grammar, and of each mask."""
    grammars = Grammars.of(backend, tokenizer, tokenizer.vocab_size)
    begin = time.perf_counter()
    grammars.matcher(grammar)
    compiled_s, times = time.perf_counter() - begin, []
    for i in range(num_outputs):
        matcher = grammars.matcher(grammar)

        def take(token: int, matcher: Matcher = matcher) -> bool:
            matcher.take([token])
            return matcher.is_over

        times += follow(matcher.mask, take, random.Random(i))
    return compiled_s, times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--outputs", type=int, default=20)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(locate(arguments.model))
    backends = [name for name in BACKENDS if find_spec(name)]
    print(f"{tokenizer.vocab_size} tokens")
    for name, grammar in GRAMMARS.items():
        for backend in backends:
            compiled_s, times = measure(backend, tokenizer, grammar, arguments.outputs)
            micros = [1e6 * one for one in times]
            tail = statistics.quantiles(micros, n=100)[98]
            print(
                f"{name:16} {backend:11} compiled in {1000 * compiled_s:7.1f} ms; {len(micros):5} masks: "
                f"mean {statistics.mean(micros):7.1f} us, median {statistics.median(micros):7.1f}, p99 {tail:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
