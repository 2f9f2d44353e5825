"""The default model in float32, cut over real processes, against Transformers: 9 query and 3 KV
heads, which neither two nor four ranks share evenly."""

import pytest

from tests.helpers import greedy, run
from tests.models.test_smollm2 import answers_agree, asked_of
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core

pytestmark = pytest.mark.slow

LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},
    "pp2": {"pipeline_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fifty_prompts_of_64_tokens_equal_transformers(smollm2_path, smollm2_reference, layout):
    asked, params = asked_of(smollm2_path), greedy(64, ignore_eos=True)
    assert params.repetition_penalty == 1.0
    given = {"dtype": "float32", "threads": 1, "kv_memory_bytes": 2**29}
    core = load_core(EngineOptions(model=str(smollm2_path), **given, **LAYOUTS[layout]))
    try:
        assert core.config.num_ranks == (4 if layout == "tp4" else 2)
        answers = run(core, {text: (ids, params) for text, ids in asked.items()})
    finally:
        core.close()
    reference, _ = smollm2_reference
    excused = answers_agree(reference, asked, answers)
    print(f"{layout}: {64 * len(asked) - excused} tokens of Transformers, {excused} near-ties")
