"""The experts' GPU kernels without a GPU: interpreted against torch, and compiled for Hopper. In
float32, since the interpreter's bfloat16 arithmetic is wrong; tests/gpu checks them in bfloat16 on
a GPU."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

from tests.helpers import LONG_S
from tidemill.kernels.cuda import expert_blocks, moe
from tidemill.kernels.cuda.gemm import Tile
from tidemill.kernels.cuda.launch import compile_only
from tidemill.kernels.glu import glu_reference
from tidemill.layers.host_experts import ExpertSlots, HostStacks
from tidemill.layers.host_experts import Layer as HostLayer
from tidemill.quant.base import ExpertStacks
from tidemill.types.model_config import MoESpec

HIDDEN, INNER = 40, 24
PLAIN, BULK = Tile(16, 32, 32, 2, 4), Tile(16, 32, 16, 2, 4, bulk=1)
HALVES = Tile(32, 32, 32, 2, 4, halves=1), Tile(32, 32, 16, 2, 4, bulk=1, halves=1)


def reference(
    x,
    logits,
    gate_up,
    down,
    top_k,
    renormalise,
    act,
    gate_up_bias=None,
    down_bias=None,
    scoring="softmax_then_topk",
):
    order = torch.argsort(logits, dim=1, descending=True, stable=True)[:, :top_k]
    if scoring == "topk_then_softmax":
        weights = logits.gather(1, order).softmax(1)
    else:
        weights = logits.softmax(1).gather(1, order)
        weights = weights / weights.sum(1, keepdim=True) if renormalise else weights
    out = torch.zeros_like(x)
    for token, (experts, shares) in enumerate(zip(order.tolist(), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            inner = gate_up[expert] @ x[token] + (
                0 if gate_up_bias is None else gate_up_bias[expert]
            )
            out[token] += share * (
                down[expert] @ glu_reference(inner, act)
                + (0 if down_bias is None else down_bias[expert])
            )
    return out


def given(num_tokens, num_experts, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, logits = (
        torch.randn(num_tokens, HIDDEN, generator=g),
        torch.randn(num_tokens, num_experts, generator=g),
    )
    gate_up = torch.randn(num_experts, 2 * INNER, HIDDEN, generator=g) / HIDDEN**0.5
    return x, logits, gate_up, torch.randn(num_experts, HIDDEN, INNER, generator=g) / INNER**0.5


@pytest.fixture
def tiles(monkeypatch):
    """Products take these instead of what a GPU would."""

    def take(up, down):
        monkeypatch.setattr(
            moe, "choose_tile", lambda *shape, adds=False: up if shape[-1] == HIDDEN else down
        )

    return take


@pytest.mark.parametrize("num_tokens", [1, 21])
@pytest.mark.parametrize(("up", "down"), [(BULK, PLAIN), HALVES])
def test_experts(num_tokens, up, down, tiles):
    tiles(up, down)
    tensors = given(num_tokens, 5)
    assert_close(
        moe.moe(*tensors, 2, True, "silu"),
        reference(*tensors, 2, True, "silu"),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize(
    ("num_tokens", "scoring", "act"),
    [
        (1, "softmax_then_topk", "gelu_tanh"),
        (6, "softmax_then_topk", "gelu_tanh"),
        (6, "topk_then_softmax", "swiglu_clamped"),
    ],
)
def test_biases_scoring_and_a_shared_expert(num_tokens, scoring, act, tiles):
    tiles(PLAIN, BULK)
    tensors, shared = given(num_tokens, 3, 1), torch.randn(num_tokens, HIDDEN)
    biases = 8 * torch.randn(3, 2 * INNER), torch.randn(3, HIDDEN)
    out = moe.moe(*tensors, 2, False, act, *biases, scoring, shared)
    assert_close(
        out, reference(*tensors, 2, False, act, *biases, scoring) + shared, atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("num_tokens", [1, pytest.param(21, marks=pytest.mark.slow), 70])
def test_experts_of_several_ranks(num_tokens, tiles):
    """Each adds up what its own give: together that is all, and what it has not computed is not
    read."""
    tiles(PLAIN, BULK)
    x, logits, gate_up, down = given(num_tokens, 7, 3)
    logits[:, 1] += 2.0
    whole = moe.moe(x, logits, gate_up, down, 3, True, "silu")
    total = torch.zeros_like(whole)
    for first, end in ((0, 3), (3, 5), (5, 7)):
        own = gate_up[first:end].contiguous(), down[first:end].contiguous()
        some = moe.moe(x, logits, *own, 3, True, "silu", first=first)
        for tokens in (slice(1), slice(-5, None)):
            alone = moe.moe(
                x[tokens].clone(), logits[tokens].clone(), *own, 3, True, "silu", first=first
            )
            assert torch.equal(alone, some[tokens])
        total += some
    assert_close(total, whole, atol=1e-5, rtol=1e-5)


def test_a_rank_whose_experts_nobody_chose_adds_nothing(tiles):
    tiles(PLAIN, BULK)
    x, logits, gate_up, down = given(6, 4)
    logits[:, 3] = -99.0
    some = moe.moe(
        x, logits, gate_up[3:].contiguous(), down[3:].contiguous(), 2, True, "silu", first=3
    )
    assert torch.equal(some, torch.zeros_like(x))


def test_a_token_has_the_same_bits_alone_among_others_and_padded(tiles):
    """Through all kernels: two launches for few tokens, five for more. All in one tile, since numpy
    multiplies here."""
    tiles(PLAIN, BULK)
    x, logits, *weights = given(40, 4)
    logits[:, 2] += 2.0  # one expert has most tokens, and several blocks
    whole = moe.moe(x, logits, *weights, 2, False, "silu")
    for tokens in (slice(5, 6), slice(30, 32), slice(20, 37)):
        assert torch.equal(
            moe.moe(x[tokens].clone(), logits[tokens].clone(), *weights, 2, False, "silu"),
            whole[tokens],
        )
    padded = (
        torch.cat([x[:9], torch.full((7, HIDDEN), float("nan"))]),
        torch.cat([logits[:9], torch.full((7, 4), float("nan"))]),
    )
    assert torch.equal(moe.moe(*padded, *weights, 2, False, "silu")[:9], whole[:9])


@pytest.mark.parametrize("num_tokens", [1, 40, 520])
def test_routing(num_tokens):
    """Equal logits go by number; what is not a number still gets experts that exist; every pair is
    in one block of its expert."""
    logits = torch.randint(-3, 3, (num_tokens, 60)).float()
    logits[0, 7:12] = float("nan")
    logits[-1] = torch.where(logits[-1] == 0, torch.tensor(-0.0), logits[-1])
    routing = moe.route(logits, 4, True, 16, 32)
    expected = torch.argsort(logits, dim=1, descending=True, stable=True)[:, :4]
    experts = routing.experts_P.view(-1, 4)
    assert torch.equal(experts.long(), expected)
    if num_tokens <= moe.MOST_DIRECT:  # an expert's output is its number
        rows, down = (
            torch.ones(4 * num_tokens, 16) / 16,
            torch.arange(60.0)[:, None, None].expand(60, 1, 16).contiguous(),
        )
        gate_up = torch.zeros(60, 32, 32)
        _, shares = moe.multiply_gated_directly(
            torch.ones(num_tokens, 32), logits, gate_up, PLAIN, 4, True, "silu"
        )
        assert torch.equal(shares.nan_to_num(-9.0), routing.weights_P.nan_to_num(-9.0))
        direct = moe.multiply_directly(rows, logits, shares, down, PLAIN, 4)
        outputs = routing.experts_P.float()[:, None]
        assert torch.equal(
            direct.nan_to_num(-9.0), moe.combine(outputs, routing, 4).nan_to_num(-9.0)
        )
    assert_close(
        routing.weights_P.view(-1, 4)[1:],
        logits.softmax(1).gather(1, expected)[1:],
        atol=1e-6,
        rtol=1e-6,
    )
    by_expert = torch.argsort(experts.flatten(), stable=True)
    assert torch.equal(routing.order_P.long(), by_expert)
    for blocks, rows in ((routing.up_blocks, 16), (routing.down_blocks, 32)):
        assert len(blocks) == moe.most_blocks(4 * num_tokens, 60, rows)
        covered = []
        for expert, first, num, _ in blocks.tolist():
            assert 0 <= num <= rows
            assert set(experts.flatten()[by_expert[first : first + num]].tolist()) <= {expert}
            covered += range(first, first + num)
        assert covered == list(range(4 * num_tokens))


@pytest.mark.parametrize(("num_tokens", "live"), [(4, 2), (20, 17)])
def test_tokens_of_experts_are_counted(num_tokens, live, tiles):
    """But for those that fill the step up; added to what was there."""
    tiles(PLAIN, BULK)
    x, logits, *weights = given(num_tokens, 5)
    tally = expert_blocks.Tally(
        torch.full((5,), 100, dtype=torch.int32), torch.tensor([live], dtype=torch.int32)
    )
    out = moe.moe(x, logits, *weights, 2, True, "silu", tally=tally)
    chosen = torch.argsort(logits[:live], dim=1, descending=True)[:, :2]
    assert (tally.totals_E - 100).tolist() == torch.bincount(chosen.flatten(), minlength=5).tolist()
    assert torch.equal(out, moe.moe(x, logits, *weights, 2, True, "silu"))


def two_layers(num_slots):
    """Of five experts with biases, that share slots; and what each of them computes."""
    num_experts, spec = 5, MoESpec(num_experts=5, top_k=2, expert_size=INNER, renormalise=False)
    whole, layers = [], []
    for number in range(2):
        x, logits, gate_up, down = given(5, num_experts, number)
        biases = torch.randn(num_experts, 2 * INNER), torch.randn(num_experts, HIDDEN)
        stacks = HostStacks(
            num_experts, ExpertStacks(torch.empty_like(gate_up[:1]), torch.empty_like(down[:1]))
        )
        stacks.gate_up_E2IH.copy_(gate_up)
        stacks.down_EHI.copy_(down)
        router = torch.randn(num_experts, HIDDEN)
        layers.append(
            HostLayer(
                num_experts * number, spec, stacks, biases, lambda x, router=router: x @ router.t()
            )
        )
        whole.append((x, logits, gate_up, down, biases))
    return whole, layers, ExpertSlots(num_slots, layers, torch.device("cpu"))


def in_slots(slots, number, x, logits, live):
    return moe.moe_in_slots(
        x, logits, partial(slots.find, number, x, live), (2 * INNER, HIDDEN), 2, False, "silu"
    )


def test_experts_in_slots_have_the_same_bits(tiles):
    """Of two layers that share slots: with biases, in any order, with tokens that only fill the
    step up."""
    tiles(PLAIN, BULK)
    (whole, layers, slots), live = two_layers(6), torch.tensor([3], dtype=torch.int32)
    for number in (0, 1, 0):
        x, logits, gate_up, down, biases = whole[number]
        expected = moe.moe(x, logits, gate_up, down, 2, False, "silu", *biases)
        found = in_slots(slots, number, x, logits, live)
        assert torch.equal(found[:3], expected[:3])
        assert found.isfinite().all()
    assert slots.places.num_asked > slots.places.num_read > 6
    assert slots.places.num_foreseen > 0
    assert slots.num_bytes == slots.places.num_read * layers[0].stacks.expert_bytes


@pytest.fixture
def poisoned():
    """Memory that nobody has written holds the largest numbers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tile", [PLAIN, HALVES[0]])
def test_experts_in_slots_are_compiled_before_anything_is_routed(tiles, tile, poisoned):
    """No op of torch, which run also then, takes an index that was not computed; and nothing is
    copied."""
    tiles(PLAIN, tile)
    whole, _, slots = two_layers(6)
    with compile_only():
        for number, (x, logits, *_) in enumerate(whole):
            assert (
                in_slots(slots, number, x, logits, torch.empty(1, dtype=torch.int32)).shape
                == x.shape
            )
    assert slots.num_bytes == slots.places.num_asked == 0


def test_choices_end_where_those_of_matmuls_do():
    for rule in (moe.choose_tile, lambda tokens, *_: moe.is_direct(tokens, 8, 128)):
        for low, high in ((2, 4), (5, 16), (129, 192), (513, 2048), (2049, 8192)):
            assert rule(low, 8, 128, 1536, 2048) == rule(high, 8, 128, 1536, 2048)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tidemill.kernels.cuda import moe, moe_direct, routing

B, F, I = "*bf16", "*fp32", "*i32"
types = dict(x_ptr=B, weight=B, bias_ptr=B, out_ptr=B, order_ptr=I, list_ptr=I, logits_ptr=F, experts_ptr=I, weights_ptr=F,
             weight_ptr=B, fetched_ptr=B, shares_ptr=F, counts_ptr=I, up_ptr=I, down_ptr=I, pairs_ptr=B, shared_ptr=B, x=B,
             totals_ptr=I, live_ptr=I)

def build(kernel, warps=4, stages=3, descs={}, **constants):
    constants = {name: value for name, value in (constants | {"AHEAD": 2}).items() if name in kernel.arg_names}
    signature = {name: (types | descs).get(name, "i32") for name in kernel.arg_names} | {name: "constexpr" for name in constants}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names)
               if signature[name].startswith("*") or name in ("num_in", "num_out", "width")}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
    print(kernel.__name__)
    return done

shape = dict(TOP_K=8, NUM_EXPERTS=60, EXPERTS=64, CHUNK=16, UP_ROWS=128, DOWN_ROWS=64, WEIGHING=0, EVEN=True,
             HAS_BIAS=False, ACT="silu", HALVES=True, FETCH=True, COUNT=True, FIRST=32, NUM_OWN=32)
if __name__ == "__main__":
    build(moe._route, **shape)
    build(moe._route, **shape | {"WEIGHING": 2})
    scored = dict(TOP_K=8, IS_SOFTMAX=False, RENORMALISE=True, NUM_GROUPS=8, GROUPS=8, TOP_GROUPS=4, BEST_OF_GROUP=2,
                  EXPERTS=256, HAS_BIAS=True, HAS_SHARED=True)
    build(routing._score_experts, 1, descs=dict(bias_ptr=F, out_ptr=F, scale="fp32"), **scored)
    build(routing._score_experts, 1, descs=dict(bias_ptr=F, out_ptr=F, scale="fp32"), **scored | {"IS_SOFTMAX": True})
    build(moe._place, **shape)
    build(moe._combine, **shape, HAS_SHARED=True, BLOCK=1024)
    few = dict(ROWS=16, OUTS=16, INS=64, BULK=False, HAS_SHARED=False, RANKS=8)
    build(moe_direct._up_direct, **shape | {"ACT": "swiglu_clamped"}, **few)
    build(moe_direct._down_direct, **shape, **few)
    listed = dict(ROWS=16, OUTS=32, INS=256, BULK=False)  # few tokens whose experts are in slots
    build(moe._up, **shape | {"HALVES": False}, **listed | {"OUTS": 16})
    build(moe._down, **shape | {"HALVES": False}, **listed)
    many = dict(ROWS=128, OUTS=32, INS=64, BULK=True)
    desc = "tensordesc<bf16[32, 64]>"
    build(moe._up, 8, descs=dict(weight=desc), **shape, **many)
    rows = dict(x="tensordesc<bf16[128, 64]>", half_x="tensordesc<bf16[64, 64]>")
    build(moe._down, 8, descs=dict(weight=desc, **rows), **shape, **many)
"""


def test_every_kernel_compiles_for_hopper(tmp_path):
    environment = {
        "PATH": "/usr/bin:/bin",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        env=environment,
        timeout=LONG_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    of_products = {"_combine", "_up_direct", "_down_direct", "_up", "_down"}
    assert set(done.stdout.split()) == {"_score_experts", "_route", "_place"} | of_products
