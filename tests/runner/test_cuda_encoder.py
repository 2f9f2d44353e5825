"""Encoders on the GPU's runner without a GPU, see test_cuda_runner.py: what the CPU's engine and
Transformers say."""

import pytest
import torch

from tests.encoders import make_encoder, reference_embedding
from tests.helpers import load_model, make_core
from tests.models.test_encoders import pooled
from tests.runner.test_cuda_runner import Again, folder, on_gpu  # noqa: F401 - fixtures
from tidemill.errors import ConfigError
from tidemill.kernels.cuda.pooling import pool, pool_reference
from tidemill.kernels.flex_attention import FlexAttention
from tidemill.runner import cuda_encoder
from tidemill.types.events import KernelsFellBack
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

COMPILE = cuda_encoder.CudaEncoder.compile
SMALL = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 48, "max_position_embeddings": 70
}  # fmt: skip


def texts(*lens):
    generator = torch.Generator().manual_seed(1)
    return {str(num): torch.randint(4, 90, (num,), generator=generator).tolist() for num in lens}


@pytest.fixture
def encoder(on_gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cuda_encoder.CudaEncoder, "compile", lambda self: None)
    monkeypatch.setattr(cuda_encoder, "capture", lambda step, pool, run_first: Again(step))
    monkeypatch.setattr(
        cuda_encoder, "num_prompt_programs", lambda num_tiles, num_kv_heads, by_roles: 2
    )

    def make(path, **options):
        return on_gpu(
            path,
            **{"max_context": 64, "token_budget": 64, "max_requests": 4, "kv_memory_bytes": 2**20}
            | options,
        )

    return make


@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("MPNetModel", "RobertaModel")),
    ],
)
def test_embeddings_equal_transformers_alone_and_among_others(name, encoder, tmp_path):
    num_layers = 2 if name == "BertModel" else 1  # layers use one place of the cache in turn
    reference = make_encoder(tmp_path, name, **SMALL | {"num_hidden_layers": num_layers})
    core, asked = encoder(tmp_path), texts(1, 5, 33)
    together = pooled(core, asked, "mean")
    for key, ids in asked.items():
        assert (
            torch.tensor(together[key]) - reference_embedding(reference, ids)
        ).abs().max() < 1e-5
    assert pooled(core, {"5": asked["5"]}, "mean")["5"] == together["5"]
    cls = pooled(core, {"1": asked["1"]}, "cls")["1"]
    assert (
        torch.tensor(cls) - reference_embedding(reference, asked["1"], "cls")
    ).abs().max() < 1e-5
    each = pooled(core, asked, "none", is_normalized=False)
    for key, ids in asked.items():
        mean = torch.nn.functional.normalize(
            torch.tensor(each[key]).reshape(len(ids), -1).mean(0), dim=0
        )
        assert (mean - reference_embedding(reference, ids)).abs().max() < 1e-5


def test_scores_of_pairs_equal_the_cpus(encoder, monkeypatch, tmp_path):
    """Every kernel is run before the graphs are captured, as at a real start."""
    monkeypatch.setattr(cuda_encoder.CudaEncoder, "compile", COMPILE)
    make_encoder(
        tmp_path, "BertForSequenceClassification", num_labels=1, type_vocab_size=2, **SMALL
    )
    asked = texts(4, 20)
    on_cpu, made = (
        make_core(load_model(tmp_path), max_requests=4),
        encoder(tmp_path, token_budget=64),
    )
    for pair_start in (0, 2):
        expected, scores = (
            pooled(core, asked, "score", pair_start=pair_start) for core in (on_cpu, made)
        )
        for key, [score] in scores.items():
            assert abs(score - expected[key][0]) < 1e-5
    assert pooled(made, {"4": asked["4"]}, "score", pair_start=2)["4"] == scores["4"]


@pytest.mark.slow
def test_heads_that_no_kernel_takes_go_to_flex_attention(encoder, monkeypatch, tmp_path):
    reference = make_encoder(tmp_path, "BertModel", **SMALL | {"hidden_size": 24})
    monkeypatch.setattr(
        cuda_encoder, "FlexAttention", lambda kv: FlexAttention(kv, is_compiled=False)
    )
    core, asked = encoder(tmp_path), texts(3, 20)
    [event] = [event for event in core.take_events() if isinstance(event, KernelsFellBack)]
    assert "not of 12" in event.reason
    for key, made in pooled(core, asked, "mean").items():
        assert (torch.tensor(made) - reference_embedding(reference, asked[key])).abs().max() < 1e-5


def test_a_state_that_is_not_finite_fails_its_request_alone(encoder, tmp_path):
    make_encoder(tmp_path, "BertModel", **SMALL)
    core = encoder(tmp_path)
    expected = pooled(core, {"good": [5, 6, 8]}, "mean")["good"]
    with torch.inference_mode():
        core.runner.model.embed.weight._weight_NK[7] = float("nan")
    params, made, failed = SamplingParams(max_tokens=1, pooling="mean"), {}, []
    for name, ids in {"bad": [7, 8], "good": [5, 6, 8]}.items():
        core.submit(Submit(name, ids, params))
    while core.has_work:
        output, broken = core.step()
        failed += [one.request_id for one in broken]
        made |= {delta.request_id: delta.embedding for delta in output.deltas}
    assert failed == ["bad"]
    assert made["good"] == expected


def test_adapters_are_refused(encoder, tmp_path):
    make_encoder(tmp_path, "BertModel", **SMALL)
    with pytest.raises(ConfigError, match="adapters of encoders"):
        encoder(tmp_path, max_loras=2)


def test_sums_of_tokens():
    hidden = torch.randn(60, 70, generator=torch.Generator().manual_seed(0))
    spans = torch.tensor([(0, 1), (1, 16), (17, 40), (59, 1), (0, 0)], dtype=torch.int32)
    made = pool(hidden, spans)
    assert torch.allclose(made, pool_reference(hidden, spans), rtol=1e-12)
    assert torch.equal(
        pool(hidden[17:].contiguous(), torch.tensor([(0, 40)], dtype=torch.int32))[0], made[2]
    )
