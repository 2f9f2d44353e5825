"""Scores of experts: the compiled op and the GPU's kernel against the reference, which is tested
against DeepSeek-V3's router of Transformers."""

import pytest
import torch
from torch.testing import assert_close

from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.kernels.native import lib
from tidemill.kernels.routing import ExpertScores, score_experts_reference
from tidemill.types.model_config import MoESpec, Routing

SPECS = {
    "sigmoid": {"routing": Routing(score="sigmoid", scale=2.5)},
    "sigmoid, biased, a shared expert": {
        "routing": Routing(score="sigmoid", has_bias=True), "shared_size": 32, "top_k": 1,
    },
    "groups by their best two": {
        "routing": Routing(score="sigmoid", has_bias=True, num_groups=4, top_groups=2, scale=1.7),
        "top_k": 5,
    },
    "groups by their best": {
        "routing": Routing(score="softmax", num_groups=3, top_groups=1, best_of_group=1),
        "renormalise": False, "top_k": 4,
    },
    "groups of one": {
        "routing": Routing(score="sigmoid", num_groups=12, top_groups=3), "top_k": 3,
    },
    "softmax, biased": {"routing": Routing(score="softmax", has_bias=True), "renormalise": False},
}  # fmt: skip


def spec_of(name: str) -> MoESpec:
    plain = {"num_experts": 12, "top_k": 3, "expert_size": 32, "renormalise": True}
    return MoESpec(**plain | {"scoring": "scores"} | SPECS[name])


def inputs(spec: MoESpec, num_rows: int):
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, spec.num_experts, generator=generator) * 2
    bias = torch.randn(spec.num_experts, generator=generator) * 0.3
    return logits, bias if spec.routing.has_bias else None


@pytest.mark.parametrize("name", SPECS)
def test_compiled_scores_are_the_references(name):
    if lib is None:
        pytest.skip(native.why)
    spec = spec_of(name)
    logits, bias = inputs(spec, 70)
    logits[3] = 0.5  # all alike
    logits[4, ::2] = float("-inf")
    made, expected = ExpertScores(spec, bias)(logits), score_experts_reference(logits, spec, bias)
    assert torch.equal(made.isfinite(), expected.isfinite())
    assert_close(made, expected, rtol=2e-6, atol=1e-7)
    assert ((made[:, : spec.num_experts] > float("-inf")).sum(1) == spec.top_k).all()


@pytest.mark.parametrize("name", SPECS)
def test_a_rows_bits_do_not_depend_on_others(name):
    spec = spec_of(name)
    logits, bias = inputs(spec, 70)
    score = ExpertScores(spec, bias)
    together = score(logits)
    for first, last in ((0, 1), (13, 14), (20, 61)):
        assert torch.equal(score(logits[first:last].contiguous()), together[first:last])


@pytest.mark.parametrize("name", SPECS)
def test_what_is_not_a_number_stays_so(name):
    spec = spec_of(name)
    logits, bias = inputs(spec, 3)
    logits[1] = float("nan")
    for made in (ExpertScores(spec, bias)(logits), score_experts_reference(logits, spec, bias)):
        assert made[1].isnan().any()
        assert not made[[0, 2]].isnan().any()


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_reference_is_deepseeks_router(num_groups):
    """Weights of Transformers' module, for which the router's matrix is the identity."""
    from transformers.models.deepseek_v3 import configuration_deepseek_v3, modeling_deepseek_v3

    config = configuration_deepseek_v3.DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=num_groups,
        topk_group=min(2, num_groups), norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = modeling_deepseek_v3.DeepseekV3TopkRouter(config)
    router.weight.data = torch.eye(16)
    router.e_score_correction_bias.normal_()
    routing = Routing(
        score="sigmoid",
        has_bias=True,
        num_groups=num_groups,
        top_groups=min(2, num_groups),
        scale=2.5,
    )
    spec = MoESpec(
        num_experts=16, top_k=4, expert_size=8, renormalise=True, scoring="scores", routing=routing
    )
    logits = torch.randn(50, 16)
    made = score_experts_reference(logits, spec, router.e_score_correction_bias)
    _, weights, chosen = router(logits)
    assert_close(made.gather(1, chosen), weights)
    assert ((made > float("-inf")).sum(1) == 4).all()


@pytest.mark.parametrize("name", SPECS)
def test_the_gpus_kernel_is_the_reference(name):
    pytest.importorskip("triton")
    spec = spec_of(name)
    from tidemill.kernels.cuda.routing import score_experts

    logits, bias = inputs(spec, 5)
    logits[3] = 0.5
    made, expected = score_experts(logits, spec, bias), score_experts_reference(logits, spec, bias)
    assert_close(made, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"routing": Routing(score="sigmoid", num_groups=5)}, "5 groups"),
        ({"routing": Routing(score="sigmoid", num_groups=6), "top_k": 3}, "3 a token from 1"),
    ],
)
def test_groups_that_cannot_be_are_refused(more, said):
    plain = {"num_experts": 12, "top_k": 3, "expert_size": 32, "renormalise": True}
    with pytest.raises(ConfigError, match=said):
        MoESpec(**plain | {"scoring": "scores"} | more)


@pytest.mark.parametrize("wrong", [{"score": "cosine"}, {"score": "sigmoid", "scale": 0.0}])
def test_routings_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError):
        Routing(**wrong)
