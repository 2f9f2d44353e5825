"""Draft heads and trees of drafts on the GPU at hand: tokens and log probabilities are those
without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu_heads import make_core, prompt, write_heads, write_model
from bench.gpu_workloads import MODELS
from tests.gpu.engines import ask
from tests.helpers import Grower, guess_with, watch
from tidemill.config import HEADS
from tidemill.engine.core import EngineCore
from tidemill.engine.parts.drafting import Drafting
from tidemill.types import events
from tidemill.types.sampling import SamplingParams

SMALL = {
    "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 4096,
}  # fmt: skip


def requests(num_out: int = 48) -> dict[str, Any]:
    """Two of them go over the end of a split of 512 while trees are verified."""
    sampled: dict[str, Any] = {"temperature": 0.9, "max_tokens": num_out, "ignore_eos": True}
    greedy = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, logprobs=2)
    return {
        "greedy": (prompt(1, 90), greedy),
        "over a split": (prompt(2, 495), greedy),
        "seeded": (prompt(3, 500), SamplingParams(seed=5, logprobs=1, **sampled)),
        "restricted": (
            prompt(4, 300),
            SamplingParams(
                seed=6, top_k=40, top_p=0.9, min_tokens=9, logit_bias={5: 2.0}, **sampled
            ),
        ),
        "penalties": (prompt(5, 60), SamplingParams(seed=7, repetition_penalty=1.2, **sampled)),
        "long": (prompt(6, 1100), greedy),
    }


def counting(core: EngineCore) -> Callable[[], tuple[int, int]]:
    assert core.part(Drafting)
    seen = watch(core)

    def verified():
        return [
            one for event in seen if isinstance(event, events.DraftsVerified) for one in event.of
        ]

    return lambda: (sum(one[1] for one in verified()), sum(one[2] for one in verified()))


def assert_same(core: EngineCore, expected: Any, asked: Any) -> None:
    counted = counting(core)
    for _ in range(2):  # again with prefixes from the cache
        made = ask(core, asked)
        assert not [key for key in asked if made[key] != expected[key]]
    assert counted()[0], "no drafts"


def test_tokens_are_those_without_drafts(tmp_path: Path) -> None:
    asked = requests()
    write_model(tmp_path, MODELS["llama8b"] | SMALL)
    plain = make_core(tmp_path, "off")
    expected = ask(plain, asked)
    alone = ask(plain, {"greedy": asked["greedy"]})
    assert alone["greedy"] == expected["greedy"]
    write_heads(tmp_path / "heads", plain, 2000)
    known = {tuple(tokens): expected[key][0] for key, (tokens, _) in asked.items()}
    # which look at a row's tokens
    branching = {key: one for key, one in asked.items() if key != "penalties"}
    for name in HEADS:
        core = make_core(tmp_path, name)
        assert_same(core, expected, asked)
        if name == "medusa":
            assert_same(guess_with(core, Grower(known, 0.8, vocab_size=4096)), expected, branching)
    chunked = make_core(tmp_path, "medusa", token_budget=64, max_requests=4)
    assert_same(chunked, expected, asked)
    assert_same(guess_with(chunked, Grower(known, 0.8, vocab_size=4096)), expected, branching)
