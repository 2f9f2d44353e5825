"""The mixture of experts: the compiled op and torch's against the reference, and a row's bits
whatever rows are beside it."""

import pytest
import torch

from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.kernels.moe import dense_experts, moe_reference, route_reference
from tidemill.kernels.quantized_linear import Codes, quantize
from tidemill.quant.base import ExpertParts
from tidemill.quant.quantized import Quantized
from tidemill.types.model_config import MoESpec

HIDDEN = 64
SPECS = {
    "renormalised": MoESpec(num_experts=6, top_k=2, expert_size=32, renormalise=True),
    "softmax over all, a shared expert": MoESpec(
        num_experts=7, top_k=3, expert_size=32, renormalise=False, shared_size=96
    ),
    "softmax over the chosen, biases, a clamped gate": MoESpec(
        num_experts=5,
        top_k=4,
        expert_size=32,
        renormalise=True,
        scoring="topk_then_softmax",
        act="swiglu_clamped",
        has_bias=True,
    ),
    "Switch: one expert": MoESpec(
        num_experts=4, top_k=1, expert_size=32, renormalise=False, act="gelu_tanh"
    ),
    "all experts": MoESpec(num_experts=3, top_k=3, expert_size=32, renormalise=False),
}


def weights(spec: MoESpec, seed: int = 0):
    """Gate and up, down, biases and the shared expert's two."""
    generator = torch.Generator().manual_seed(seed)
    num, size = spec.num_experts, spec.expert_size

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.3

    biases = (random(num, 2 * size), random(num, HIDDEN)) if spec.has_bias else (None, None)
    shared = (
        (random(2 * spec.shared_size, HIDDEN), random(HIDDEN, spec.shared_size))
        if spec.shared_size
        else None
    )
    return random(num, 2 * size, HIDDEN), random(num, HIDDEN, size), *biases, shared


def expected(spec: MoESpec, x, logits, gate_up, down, gate_up_bias, down_bias, shared):
    routed = logits[:, : spec.num_experts]
    out = moe_reference(
        x,
        routed,
        gate_up,
        down,
        spec.top_k,
        spec.renormalise,
        spec.act,
        gate_up_bias,
        down_bias,
        scoring=spec.scoring,
    )
    if shared is not None:
        one = torch.ones(x.shape[0], 1)
        whole = moe_reference(x, one, shared[0][None], shared[1][None], 1, True, spec.act)
        out = out + torch.sigmoid(logits[:, spec.num_experts :]) * whole
    return out


def inputs(spec: MoESpec, num_rows: int):
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, HIDDEN, generator=generator)
    return x, torch.randn(num_rows, spec.num_logits, generator=generator) * 2


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_computes_what_the_reference_does(name, dtype, backend):
    spec = SPECS[name]
    gate_up, down, gate_up_bias, down_bias, shared = weights(spec)
    rounded = [tensor.to(dtype) for tensor in (gate_up, down)]
    both = None if shared is None else tuple(tensor.to(dtype) for tensor in shared)
    experts = dense_experts(spec, list(rounded[0]), list(rounded[1]), gate_up_bias, down_bias, both)
    for num_rows in (1, 2, 5, 33):
        x, logits = inputs(spec, num_rows)
        plain = None if both is None else tuple(tensor.float() for tensor in both)
        wanted = expected(
            spec, x, logits, rounded[0].float(), rounded[1].float(), gate_up_bias, down_bias, plain
        )
        assert (experts(x, logits) - wanted).abs().max() < 1e-4


def quantized(values: torch.Tensor, bits: int, has_offsets: bool) -> Codes:
    if bits == 8 and not has_offsets:
        return quantize(values)
    generator = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 16, values.shape, generator=generator).to(torch.int8)
    scales = (
        torch.rand(values.shape[0], values.shape[1] // 32, generator=generator)
        .mul(0.05)
        .to(torch.float16)
    )
    return Codes(bits, codes, scales, (scales * -8))


@pytest.mark.parametrize(("bits", "has_offsets"), [(4, True), (8, True), (8, False)])
def test_quantized_experts(bits, has_offsets):
    """Within what rounding activations to bytes costs."""
    if native.lib is None:
        pytest.skip(native.why)
    for name in ("renormalised", "softmax over all, a shared expert"):
        spec = SPECS[name]
        gate_up, down, *_, shared = weights(spec)
        parts = ExpertParts(
            [[quantized(half, bits, has_offsets) for half in one.chunk(2)] for one in gate_up],
            [quantized(one, bits, has_offsets) for one in down],
            shared=None if shared is None else ([quantize(shared[0])], quantize(shared[1])),
        )
        values = [torch.cat([part.dequantize() for part in one]) for one in parts.gate_ups]
        plain = (
            None
            if parts.shared is None
            else (parts.shared[0][0].dequantize(), parts.shared[1].dequantize())
        )
        experts = Quantized().join_experts(parts, spec)
        x, logits = inputs(spec, 21)
        downs = torch.stack([one.dequantize() for one in parts.downs])
        wanted = expected(spec, x, logits, torch.stack(values), downs, None, None, plain)
        assert (experts(x, logits) - wanted).abs().max() < 0.03 * wanted.abs().max()


@pytest.mark.parametrize("name", SPECS)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(name, backend):
    spec = SPECS[name]
    gate_up, down, gate_up_bias, down_bias, shared = weights(spec)
    experts = dense_experts(spec, list(gate_up), list(down), gate_up_bias, down_bias, shared)
    x, logits = inputs(spec, 70)
    whole = experts(x, logits)
    for first, last in ((0, 1), (69, 70), (3, 5), (10, 43), (1, 70)):
        assert torch.equal(
            experts(x[first:last].clone(), logits[first:last].clone()), whole[first:last]
        )
    crowd = torch.cat([x, x[:1].expand(50, -1)]), torch.cat([logits, logits[:1].expand(50, -1)])
    assert torch.equal(experts(*crowd)[:70], whole)


def test_no_expert_has_a_capacity(backend):
    """Switch gives an expert room for its share of the tokens and drops the rest. Here all are
    computed."""
    spec = SPECS["Switch: one expert"]
    gate_up, down, *_ = weights(spec)
    experts = dense_experts(spec, list(gate_up), list(down), None, None, None)
    x, logits = inputs(spec, 40)
    logits[:, 2] = 9.0
    out = experts(x, logits)
    assert (out - expected(spec, x, logits, gate_up, down, None, None, None)).abs().max() < 1e-4
    assert (out.abs().amax(1) > 1e-3).all()
    assert experts.counts.tolist() == [0, 0, 40, 0]


def test_switch_routing_is_transformers_own():
    """Where nothing overflows."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        SwitchTransformersTop1Router,
    )

    torch.manual_seed(0)
    router = SwitchTransformersTop1Router(
        SwitchTransformersConfig(
            d_model=32, num_experts=8, expert_capacity=1000, router_jitter_noise=0.0
        )
    ).eval()
    hidden = torch.randn(1, 50, 32)
    with torch.inference_mode():
        logits = router.classifier(hidden)[0]
        theirs = next(
            value for value in router(hidden) if value.shape[-1] == 1 and value.is_floating_point()
        )
    weights, _ = route_reference(logits, 1, renormalise=False)
    assert torch.allclose(weights, theirs[0], atol=1e-6)


def test_equal_logits_choose_the_lowest_number(backend):
    spec = SPECS["renormalised"]
    gate_up, down, *_ = weights(spec)
    experts = dense_experts(spec, list(gate_up), list(down), None, None, None)
    experts(torch.randn(5, HIDDEN), torch.zeros(5, 6))
    assert experts.counts.tolist() == [5, 5, 0, 0, 0, 0]


def test_a_row_that_is_not_a_number_leaves_the_others_alone(backend):
    spec = SPECS["softmax over all, a shared expert"]
    gate_up, down, *_, shared = weights(spec)
    experts = dense_experts(spec, list(gate_up), list(down), None, None, shared)
    x, logits = inputs(spec, 9)
    whole = experts(x, logits)
    x[4], logits[4] = float("nan"), float("nan")
    out = experts(x, logits)
    rest = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(out[rest], whole[rest])
    assert out[4].isnan().all()


def test_experts_that_are_not_of_one_kind_are_plain_numbers():
    if native.lib is None:
        pytest.skip(native.why)
    spec = SPECS["all experts"]
    gate_up, down, *_ = weights(spec)
    kinds = [quantize(down[0]), quantized(down[1], 4, True), down[2]]
    parts = ExpertParts([[quantize(one)] for one in gate_up], kinds)
    x, logits = inputs(spec, 9)
    downs = torch.stack([kinds[0].dequantize(), kinds[1].dequantize(), down[2]])
    wanted = expected(
        spec,
        x,
        logits,
        torch.stack([quantize(one).dequantize() for one in gate_up]),
        downs,
        None,
        None,
        None,
    )
    assert (
        Quantized().join_experts(parts, spec)(x, logits) - wanted
    ).abs().max() < 0.03 * wanted.abs().max()


@pytest.mark.parametrize(
    "wrong", [{"top_k": 7}, {"num_experts": 0}, {"scoring": "sigmoid"}, {"num_experts": 10**6}]
)
def test_a_routing_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError):
        MoESpec(**{"num_experts": 6, "top_k": 2, "expert_size": 8, "renormalise": True} | wrong)
