"""The first promise on the real default model."""

import pytest

from tests.engine.test_invariance import ids
from tests.helpers import greedy, load_model, make_core, run
from tidemill.kernels import native
from tidemill.types.sampling import SamplingParams


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param("quantized", marks=pytest.mark.skipif(native.lib is None, reason=native.why)),
    ],
)
def test_the_real_model_alone_and_in_a_crowd(smollm2_path, dtype):
    """All thirty layers, once: greedy and seeded, in chunks of 7, cached, in pages of 1 and 32, and
    among 31 others."""
    real = load_model(smollm2_path, dtype)
    prompt = ids(real, 70, 0)
    seeded = SamplingParams(temperature=0.8, max_tokens=8, seed=5, logprobs=2)
    for params in (greedy(8, logprobs=2), seeded) if dtype == "quantized" else (seeded,):
        lone = run(make_core(real), {"x": (prompt, params)})["x"]
        core = make_core(real, token_budget=7, max_requests=1)
        for page_size in (1, 32):
            assert run(make_core(real, page_size=page_size), {"x": (prompt, params)})["x"] == lone
        assert run(core, {"x": (prompt, params)})["x"] == lone
        assert run(core, {"x": (prompt, params)})["x"] == lone  # cached now
        crowd = {f"o{i}": (ids(real, 1 + i, i + 1), greedy(4)) for i in range(31)}
        assert (
            run(make_core(real, kv_memory_bytes=2**28), crowd | {"x": (prompt, params)})["x"]
            == lone
        )
