"""Drafts for which the model computes NaN, on the GPU at hand: tokens are those without drafts, and
no page harms another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.gpu.engines import ask, random_llama
from tests.helpers import Guesser, guess_with
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.drafting import Drafting
from tidemill.runner.spec import Ask
from tidemill.types.sampling import SamplingParams

BROKEN = 7


class Poison(Guesser):
    """Now and then the broken token, with more drafts after it."""

    def propose(self, asks: Sequence[Ask]) -> list[Any]:
        nums = [len(one.tokens) for one in asks]
        return [
            [*right[: n % 3], BROKEN, *right] if n % 4 else right
            for n, right in zip(nums, super().propose(asks), strict=True)
        ]


def test_tokens_are_those_without_drafts(tmp_path: Path) -> None:
    folder = tmp_path
    random_llama(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights.get(
        "lm_head.weight", weights["model.embed_tokens.weight"]
    ).clone()
    weights["model.embed_tokens.weight"][BROKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    requests = {
        "greedy": (
            list(range(100, 190)),
            SamplingParams(temperature=0.0, max_tokens=40, logprobs=1),
        ),
        "seeded": (list(range(300, 420)), SamplingParams(temperature=0.8, seed=5, max_tokens=40)),
    }

    def core(speculate: str) -> EngineCore:
        return load_core(
            EngineOptions(
                model=str(folder), speculate=speculate, kv_memory_bytes=2**24, max_requests=16
            )
        )

    expected = ask(core("off"), requests)
    known = {tuple(prompt): expected[name][0] for name, (prompt, _) in requests.items()}
    drafted = guess_with(core("auto"), Poison(known, 1.0))
    drafting = drafted.part(Drafting)
    # later rounds take pages of the first; steps follow such drafts
    for sure in (0.9, 1e-30, 1e-30):
        drafting.sure = sure
        assert ask(drafted, requests) == expected
    drafted.use(*drafted.parts_but(Drafting))
    assert ask(drafted, requests) == expected
    assert not drafted.runner.cache[1:].isnan().any(), "a page that was given up holds NaN"
