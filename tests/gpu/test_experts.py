"""The experts' kernels on the GPU at hand: near torch, and the same bits in other batches."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.testing import assert_close

from bench.gpu_moe import EXPERTS, HIDDEN, INNER, TOP_K, Weights, all_weights, new_tokens
from tidemill.kernels.cuda import moe
from tidemill.kernels.cuda.routing import score_experts
from tidemill.kernels.routing import score_experts_reference
from tidemill.types.model_config import MoESpec, Routing


def reference(x: torch.Tensor, logits: torch.Tensor, weights: Weights) -> torch.Tensor:
    """float32 from bfloat16 weights, rounded where our kernels round."""
    gate_up, down = weights
    shares, experts = logits.softmax(1).topk(TOP_K, 1)
    shares = shares / shares.sum(1, keepdim=True)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(EXPERTS):
        tokens, rank = (experts == expert).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = (
                (x[tokens].float() @ gate_up[expert].float().T).bfloat16().float().chunk(2, 1)
            )
            inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            out.index_add_(
                0,
                tokens,
                (inner @ down[expert].float().T).bfloat16().float() * shares[tokens, rank][:, None],
            )
    return out


def run(x: torch.Tensor, logits: torch.Tensor, weights: Weights) -> torch.Tensor:
    return moe.moe(x, logits, *weights, TOP_K, True, "silu")


def test_tokens() -> None:
    """Near float32; a token has the same bits at any number of tokens, also beside padding."""
    weights = all_weights()[0]
    x, logits = new_tokens(8192, 7)
    whole = run(x, logits, weights)
    expected = reference(x, logits, weights)
    for num in (1, 2, 3, 4, 5, 8, 16, 37, 64, 128, 256, 300, 512, 2048, 8192):
        first = 8192 - num if num < 8192 else 0
        some = slice(first, first + num)
        out = run(x[some].clone(), logits[some].clone(), weights)
        error = (out.float() - expected[some]).norm() / expected[some].norm()
        worst = (out.float() - expected[some]).abs().max() / expected.abs().max()
        padded = num + 3 if num < 8192 else num
        nan_x, nan_logits = (torch.full((3, width), math.nan, device="cuda", dtype=dtype) for width, dtype in
                             ((HIDDEN, torch.bfloat16), (EXPERTS, torch.float32)))  # fmt: skip
        beside = (
            run(torch.cat([x[some], nan_x]), torch.cat([logits[some], nan_logits]), weights)[:num]
            if padded > num
            else out
        )
        equal, equal_padded = torch.equal(out, whole[some]), torch.equal(beside, whole[some])
        assert error < 0.006, (num, float(error), float(worst))
        assert equal, num
        assert equal_padded, num


def test_options() -> None:
    """Biases, both scorings and a shared expert: a token's bits alone and among others."""
    weights = all_weights()[0]
    x, logits = new_tokens(8192, 7)
    generator = torch.Generator("cuda").manual_seed(5)
    new = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    biases, shared = (new(EXPERTS, 2 * INNER), new(EXPERTS, HIDDEN)), new(300, HIDDEN)
    for scoring, renormalise in (
        ("softmax_then_topk", False),
        ("softmax_then_topk", True),
        ("topk_then_softmax", False),
    ):
        call = partial(
            moe.moe, top_k=TOP_K, renormalise=renormalise, act="gelu_tanh", scoring=scoring
        )
        call = partial(
            call,
            gate_up_E2IH=weights[0],
            down_EHI=weights[1],
            gate_up_bias_E2I=biases[0],
            down_bias_EH=biases[1],
        )
        whole = call(x[:300], logits[:300], shared_TH=shared)
        alone = [call(x[i : i + n].clone(), logits[i : i + n].clone(), shared_TH=shared[i : i + n].clone())
                 for i, n in ((7, 1), (20, 3), (40, 20))]  # fmt: skip
        same = torch.equal(torch.cat(alone), torch.cat([whole[7:8], whole[20:23], whole[40:60]]))
        assert same, (scoring, renormalise)


def test_graph() -> None:
    """A captured step takes any routing: also all tokens to the same experts."""
    weights = all_weights()[0]
    for num in (1, 64, 2048):
        x, logits = new_tokens(num, 11)
        run(x, logits, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x, logits, weights)
        for seed in (12, 13):
            other_x, other_logits = new_tokens(num, seed)
            if seed == 13:
                other_logits[:] = other_logits[:1]
            x.copy_(other_x)
            logits.copy_(other_logits)
            graph.replay()
            assert torch.equal(out, run(other_x, other_logits, weights)), (num, seed)


def test_scores() -> None:
    """Experts by their scores: the reference's, and the same bits for a token alone."""
    generator = torch.Generator("cuda").manual_seed(3)
    for num_experts, shared_size, routing in (
        (128, 0, Routing(score="sigmoid", has_bias=True, scale=2.5)),
        (160, 64, Routing(score="sigmoid", has_bias=True, num_groups=8, top_groups=4)),
        (256, 0, Routing(score="softmax", num_groups=8, top_groups=2, best_of_group=1)),
    ):
        spec = MoESpec(
            num_experts=num_experts, top_k=8, expert_size=64, renormalise=True, scoring="scores", routing=routing,
            shared_size=shared_size,
        )  # fmt: skip
        logits = torch.randn(300, num_experts, device="cuda", generator=generator) * 2
        bias = (
            torch.randn(num_experts, device="cuda", generator=generator) * 0.1
            if routing.has_bias
            else None
        )
        made, expected = (
            score_experts(logits, spec, bias),
            score_experts_reference(logits, spec, bias),
        )
        assert_close(made, expected, rtol=1e-5, atol=1e-7)
        for i in (0, 7, 299):
            assert torch.equal(score_experts(logits[i : i + 1].clone(), spec, bias)[0], made[i]), i
        logits[5] = math.nan
        broken = score_experts(logits, spec, bias)
        assert broken[5, :num_experts].isnan().sum() == spec.top_k
        assert torch.equal(broken[6:], made[6:])
