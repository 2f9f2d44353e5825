"""What it costs to say which tokens may come next, for answers of a given form.

    python -m bench.masks [--model smollm2] [--answers 20]

Random tokens are drawn from what the form allows, as a model with random weights would; the time of each mask is taken alone.
xgrammar is measured beside llguidance where it is installed.
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
from tidemill.sampling import Grammar
from tidemill.weights.locate import locate

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["ebb", "flow", "slack"]}, "maxItems": 5},
        "home": {"type": "object", "properties": {"port": {"type": "string", "maxLength": 20}}, "required": ["port"]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
FORMS = {
    "schema": Grammar("json_schema", json.dumps(PERSON)),
    "any JSON object": Grammar("json_schema", '{"type": "object"}'),
    "regex": Grammar("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}: [a-z ]{10,60}\."),
}
MAX_TOKENS = 100


def allowed(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def follow(mask: Callable[[], np.ndarray], take: Callable[[int], bool], draw: random.Random) -> list[float]:
    """One answer; the time of each of its masks, with that of taking a token. `take`: a token has come; is it over?"""
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


def measure(backend: str, tokenizer: Tokenizer, form: Grammar, num_answers: int) -> tuple[float, list[float]]:
    """How long the form took to compile, and each mask."""
    grammars = Grammars.of(backend, tokenizer, tokenizer.vocab_size)
    begin = time.perf_counter()
    grammars.matcher(form)
    compiled_s, times = time.perf_counter() - begin, []
    for i in range(num_answers):
        matcher = grammars.matcher(form)

        def take(token: int, matcher: Matcher = matcher) -> bool:
            matcher.take([token])
            return matcher.is_over

        times += follow(matcher.mask, take, random.Random(i))
    return compiled_s, times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=int, default=20)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(locate(arguments.model))
    backends = [name for name in BACKENDS if find_spec(name)]
    print(f"{tokenizer.vocab_size} tokens")
    for name, form in FORMS.items():
        for backend in backends:
            compiled_s, times = measure(backend, tokenizer, form, arguments.answers)
            micros = [1e6 * one for one in times]
            tail = statistics.quantiles(micros, n=100)[98]
            print(
                f"{name:16} {backend:11} compiled in {1000 * compiled_s:7.1f} ms; {len(micros):5} masks: "
                f"mean {statistics.mean(micros):7.1f} us, median {statistics.median(micros):7.1f}, p99 {tail:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
