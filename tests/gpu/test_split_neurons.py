"""Hot neurons on the GPU at hand, cold ones on its host's cores: the same bits in any company, in
less GPU memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.gpu_neurons import Answers, answers, core_of, error_of, least_bytes, make_model
from bench.gpu_streaming import let_go
from tidemill.engine.core import EngineCore
from tidemill.layers.streamed import resident_bytes
from tidemill.weights.neurons import TENSORS

LAYERS, WIDTH, ACTIVE = 4, 1024, 0.1
Whole = tuple[Path, Answers, float, int]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A folder, and of the model with all weights on the GPU: answers, error and bytes."""
    folder = tmp_path_factory.mktemp("neurons")
    for name in ("model", "often"):
        (folder / name).mkdir()
    make_model(folder / "model", LAYERS, WIDTH, ACTIVE)
    (folder / "model" / TENSORS).rename(folder / "often" / TENSORS)
    core = core_of(folder)
    model: Any = core.runner.model  # type: ignore[attr-defined]
    found = folder, in_any_company(core), error_of(core, folder), resident_bytes(model)
    let_go(core)
    return found


def in_any_company(core: EngineCore) -> Answers:
    """Answers of 32 requests together, which are those of one alone, among others, and again."""
    first = answers(core, [200])[0]["0"]
    for others in (1, 6, 31):
        lengths = [200] + [16 + i for i in range(others)]
        assert answers(core, lengths)[0]["0"] == first, f"other bits beside {others} others"
    found, _ = answers(core, [16 + i for i in range(32)])
    assert answers(core, [16 + i for i in range(32)])[0] == found
    for i in (0, 9):
        assert answers(core, [16 + j for j in range(i + 1)])[0][str(i)] == found[str(i)]
    return found


def test_neurons_on_both(whole: Whole) -> None:
    folder, expected, error, total = whole
    budget = total - int(0.5 * 3 * 2 * LAYERS * WIDTH * (7 * WIDTH // 2))
    core = core_of(folder, budget, hot=True)
    streaming: Any = core.runner.model.streaming  # type: ignore[attr-defined]
    assert streaming.held_bytes <= budget
    assert error_of(core, folder) < 1.3 * error, "against float64, beside all weights on the GPU"
    found = in_any_company(core)
    num_equal = 0
    for number, theirs in expected.items():
        for (token, p), (other, q) in zip(found[number], theirs, strict=True):
            if token != other:  # two tokens were nearly as likely
                break
            assert abs(p - q) < 0.1
            num_equal += 1
    assert num_equal > 0.5 * sum(map(len, expected.values()))
    let_go(core)


def test_layers_that_are_streamed(whole: Whole) -> None:
    """In the memory of two layers: the bits of the model with all weights on the GPU."""
    folder, expected, _, total = whole
    core = core_of(folder, least_bytes(total, LAYERS, WIDTH))
    assert in_any_company(core) == expected
    let_go(core)
