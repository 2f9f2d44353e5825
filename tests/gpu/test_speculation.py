"""Speculative decoding on the GPU at hand: the tokens are those without it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_spec import Oracle, run
from bench.gpu_workloads import MODELS
from tests.helpers import guess_with
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.drafting import Drafting
from tidemill.runner.spec import SLOPES


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    folder = tmp_path_factory.mktemp("speculation")
    small = {
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
    }
    (folder / "config.json").write_text(
        json.dumps(MODELS["llama8b"] | small | {"num_key_value_heads": 4})
    )
    return load_core(
        EngineOptions(
            model=str(folder), load_format="dummy", max_context=8192, kv_memory_bytes=2**31
        )
    )


def test_sampled(core: EngineCore) -> None:
    """Seeded, with penalties; where steps wait for drafts to be verified, and where they follow
    them however often in vain."""
    draw = random.Random(1)
    prompts = [[draw.randrange(10, 1000) for _ in range(40)] * 3 for _ in range(6)]
    for params in (
        {"temperature": 0.8, "seed": 3},
        {
            "temperature": 1.0,
            "seed": 4,
            "top_p": 0.9,
            "top_k": 40,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
        },
    ):
        core.use(*core.parts_but(Drafting))
        expected = run(core, prompts, 64, **params).answers
        for chance, sure in ((0.0, 1.0), (0.7, 1.0), (0.7, 1e-30), (1.0, 1e-30)):
            guess_with(core, Oracle(expected, chance), slope=SLOPES["cuda"])
            core.part(Drafting).sure = sure
            made = run(core, prompts, 64, **params)
            assert made.answers == expected, params
            assert made.num_drafts
    core.use(*core.parts_but(Drafting))


def test_draft_model(tmp_path: Path) -> None:
    """A model drafts for another with other random weights: hardly a draft is right, and the tokens
    are those without drafts."""
    folder = tmp_path
    small = {
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
    }
    (folder / "config.json").write_text(
        json.dumps(MODELS["llama8b"] | small | {"num_key_value_heads": 2, "head_dim": 128})
    )
    options: dict[str, Any] = {
        "load_format": "dummy",
        "max_context": 2048,
        "max_requests": 16,
        "kv_memory_bytes": 2**30,
    }
    core = load_core(
        EngineOptions(
            model=str(folder),
            draft_model=str(folder),
            max_drafts=4,
            adaptive_drafts=False,
            **options,
        )
    )
    drafting, draw = core.part(Drafting), random.Random(2)
    prompts = [[draw.randrange(10, 1000) for _ in range(20 + 150 * i)] for i in range(6)]
    for params in (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2},
    ):
        core.use(*core.parts_but(Drafting))
        expected = run(core, prompts, 64, **params).answers
        core.use(*core.parts_but(Drafting), drafting)
        made = run(core, prompts, 64, **params)
        assert made.answers == expected, params
        assert made.num_drafts > 0
