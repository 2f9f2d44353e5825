"""How stored matrices become weights on the GPU, on a device that is the CPU under another name
(test_cuda_runner.py)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

from tests.runner.test_cuda_runner import OnCpu
from tests.test_config import SMOLLM2
from tidemill.config import EngineOptions, resolve
from tidemill.distributed.world import Stage
from tidemill.errors import ConfigError
from tidemill.kernels import machine
from tidemill.kernels.cuda import hopper_packed
from tidemill.kernels.glu import glu_reference
from tidemill.kernels.low_rank import Factors, Product
from tidemill.kernels.quantized_linear import (
    Activations,
    Codes,
    Outliers,
    quantized_linear_reference,
)
from tidemill.layers.linear import Linear
from tidemill.models.llama import Llama
from tidemill.models.olmoe import OlmoeBlock
from tidemill.quant import PLAIN, cuda_packed
from tidemill.quant.cuda import CudaWeight
from tidemill.quant.cuda_packed import CudaInt4, CudaPackedWeight, CudaQuantized
from tidemill.quant.cuda_scaled import CudaFP8, CudaScaledWeight
from tidemill.quant.cuda_sparse import CudaSparse
from tidemill.types.weight_types import HELD
from tidemill.weights.packed.lowrank import LowRankTensor


class Stored:
    def __init__(self, codes):
        self._codes, self.shape = codes, tuple(codes.codes_NK.shape)

    def codes(self):
        return self._codes


def new_codes(bits=4, outs=32, ins=256, group=128, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    low, high = {8: (-128, 128), 4: (0, 16), 2: (-1, 2)}[bits]
    codes = torch.randint(low, high, (outs, ins), generator=generator).to(torch.int8)
    scales = (torch.rand(outs, ins // group, generator=generator) + 0.5).bfloat16().float()
    return Codes(bits, codes, scales, None, group=group, **more)


def zeros_of(codes):
    return torch.randint(
        0, 16, codes.scales_NG.shape, generator=torch.Generator().manual_seed(3)
    ).float()


def check(weight, values, x, atol=1e-2):
    assert_close(weight(x), x @ values.t(), atol=atol, rtol=1e-2)
    ids = torch.tensor([1, 0], dtype=torch.int32)
    assert_close(weight.rows(ids), values[ids.long()], atol=max(1e-3, atol / 50), rtol=1e-2)
    assert_close(weight.logits(x), x @ values.t(), atol=atol, rtol=1e-2)


def joined(*codes):
    method = CudaQuantized()
    return method.join([method.read(Stored(one), None) for one in codes], None)


@pytest.fixture(autouse=True)
def on_cpu():
    with OnCpu():
        yield


def test_packed_matrices_are_joined():
    one, other = new_codes(), new_codes(seed=1)
    one.zeros_NG, other.zeros_NG = zeros_of(one), zeros_of(other)
    values, x = torch.cat([one.dequantize(), other.dequantize()]), torch.randn(3, 256)
    weight = joined(one, other)
    assert isinstance(weight, CudaPackedWeight)
    assert weight.num_bytes == 64 * 256 // 2 + 64 * 2 * 4
    check(weight, values, x)
    gated = CudaQuantized().join_gated(one, other, None, "silu")
    assert_close(gated(x), glu_reference(x @ values.t()), atol=1e-1, rtol=1e-2)


def test_unlike_matrices_meet_in_bytes():
    """As Q4_K and Q6_K in one file: groups and bits differ."""
    one, other = new_codes(), new_codes(8, group=32, seed=1)
    one.zeros_NG = zeros_of(one)
    weight = joined(one, other)
    assert isinstance(weight, CudaPackedWeight)
    check(weight, torch.cat([one.dequantize(), other.dequantize()]), torch.randn(3, 256), atol=5.0)


def test_split_k_partials_are_left_to_norms_alone(monkeypatch):
    """Neither where an adapter adds to the result, nor where a stage of a pipeline ends."""
    given = []
    monkeypatch.setattr(hopper_packed, "covers", lambda weight, num_rows: True)
    monkeypatch.setattr(
        hopper_packed,
        "gemm_warp_specialized",
        lambda x, weight, leave=False, **_: given.append(leave) or x,
    )
    linear = Linear(256, {"out": 32})
    linear._weight = joined(new_codes(zeros_NG=torch.full((32, 2), 8.0)))
    x = torch.randn(3, 256)
    linear(x), linear.split_k(x)
    linear.loras, linear.lora = (
        SimpleNamespace(is_on=True),
        SimpleNamespace(pending=lambda x, weight: weight.matmul(x)),
    )
    linear.split_k(x)
    assert given == [False, True, False]
    model = Llama(replace(SMOLLM2, layers=SMOLLM2.layers[:4]), PLAIN)
    assert all(block.attn.fused_norm and block.mlp.fused_norm for block in model.blocks)
    assert OlmoeBlock(SMOLLM2, 0, PLAIN).attn.fused_norm
    model.keep(Stage(0, 2, 0, 2))
    assert all(block.attn.fused_norm and not block.mlp.fused_norm for block in model.blocks)


def test_columns_in_another_order():
    codes = new_codes()
    codes.zeros_NG, codes.order_K = zeros_of(codes), torch.randperm(256)
    weight = joined(codes)
    assert isinstance(weight, CudaPackedWeight)
    x = torch.randn(3, 256)
    assert_close(weight(x), x @ codes.dequantize().t(), atol=1e-2, rtol=1e-2)
    other = replace(codes, order_K=torch.randperm(256))
    assert isinstance(joined(codes, other), CudaWeight)  # there is no one order: bfloat16


def test_integers_by_integers():
    codes = new_codes(8, group=256, activations=Activations(None))
    weight = joined(codes)
    assert isinstance(weight, CudaScaledWeight)
    assert weight.handover.dtype is torch.int8
    x = torch.randn(3, 256)
    assert_close(weight(x), x @ codes.dequantize().t(), atol=50.0, rtol=1e-1)
    static = joined(replace(codes, activations=Activations(0.05)))
    assert static.handover is None
    assert_close(
        static(x),
        (x / 0.05).round().clamp(-127, 127) * 0.05 @ codes.dequantize().t(),
        atol=1e-1,
        rtol=1e-3,
    )


def test_centroids_and_single_values():
    """GOBO: each matrix has a table of its own and outliers, so that two are multiplied one after
    the other."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for seed in (0, 1):
        codes = new_codes(4, group=256, seed=seed)
        # a GPU has it in bfloat16
        table = (torch.randn(16, generator=generator).sort().values * 64).round() / 64
        codes.table, codes.scales_NG = table, torch.ones(32, 1)
        places = torch.randperm(32 * 256, generator=generator)[:60].sort().values
        codes.outliers = Outliers(places, torch.randn(60, generator=generator) * 10)
        parts.append(codes)
    x = torch.randn(3, 256, generator=generator)
    weight = joined(parts[0])
    assert isinstance(weight, CudaPackedWeight)
    expected = [x @ one.dequantize().t() for one in parts]
    assert_close(weight(x), expected[0], atol=1e-1, rtol=1e-2)
    assert_close(joined(*parts)(x), torch.cat(expected, 1), atol=1e-1, rtol=1e-2)
    gated = CudaQuantized().join_gated(*parts, None, "silu")
    assert_close(gated(x), glu_reference(torch.cat(expected, 1)), atol=1.0, rtol=1e-2)
    # all in one row: padding would cost more
    parts[0].outliers = Outliers(torch.arange(200), torch.ones(200))
    assert isinstance(joined(parts[0]), CudaWeight)


def test_factors_are_two_matmuls():
    class LowRank(LowRankTensor):
        def __init__(self, b, a):
            self.is_smaller, self._factors, self.shape = (
                True,
                Factors(b, a),
                (b.shape[0], a.shape[1]),
            )

        def factors(self):
            return self._factors

    torch.manual_seed(0)
    gate, up = (LowRank(torch.randn(32, rank), torch.randn(rank, 64)) for rank in (8, 5))
    method, x, bias = CudaQuantized(), torch.randn(3, 64), torch.randn(64)
    values = torch.cat([gate.factors().product(), up.factors().product()])
    read = [method.read(one, None) for one in (gate, up)]
    assert_close(method.join(read, bias)(x), x @ values.t() + bias, atol=0.5, rtol=2e-2)
    gated = method.join_gated(*read, bias, "silu")
    assert_close(gated(x), glu_reference(x @ values.t() + bias), atol=3.0, rtol=3e-2)
    assert_close(gated.activate(gated.matmul(x)), gated(x))
    one = method.join(read[:1], None)
    assert isinstance(one, Product)
    assert_close(one(x), x @ values[:32].t(), atol=0.5, rtol=2e-2)


def test_activations_that_are_no_bytes():
    """LLM.int8(): those of a token beyond the threshold are multiplied as they are, whatever the
    other tokens have."""
    one, other = (
        new_codes(8, group=256, seed=seed, activations=Activations(threshold=6.0))
        for seed in (0, 1)
    )
    x = torch.randn(3, 256)
    x[1:, 40] *= 50
    x[2, 200:] *= 20
    weight = joined(one)
    assert isinstance(weight, CudaScaledWeight)
    made, expected = weight(x), quantized_linear_reference(x, one, None)
    assert_close(made, expected, atol=5e-2, rtol=1e-2)
    without = joined(replace(one, activations=Activations()))
    exact = x @ one.dequantize().t()
    assert (made - exact)[1:].abs().mean() < 0.2 * (without(x) - exact)[1:].abs().mean()
    assert all(torch.equal(weight(x[i : i + 1])[0], made[i]) for i in (0, 2))
    gated = CudaQuantized().join_gated(one, other, None, "silu")
    values = torch.cat([expected, quantized_linear_reference(x, other, None)], 1)
    assert_close(gated(x), glu_reference(values), atol=5.0, rtol=2e-2)


def test_ternary_and_groups_that_no_kernel_has():
    codes = new_codes(2, ins=512, group=512)
    weight = joined(codes)
    assert weight.num_bytes == 32 * 512 // 4 + 32 * 4
    check(weight, codes.dequantize(), torch.randn(3, 512))
    grouped = new_codes(2, ins=512, group=256, activations=Activations())  # as TQ1_0 and TQ2_0
    weight = joined(grouped)
    assert weight.num_bytes == HELD["quantized", "cuda"].bytes_of("TQ2_0", True) * 32 * 512
    check(weight, grouped.dequantize(), torch.randn(3, 512))
    assert isinstance(joined(new_codes(8, group=16)), CudaWeight)


def test_many_rows_are_multiplied_by_the_dequantized_weight(monkeypatch):
    monkeypatch.setattr(cuda_packed, "_MOST_ROWS", 4)
    codes = new_codes()
    codes.zeros_NG = zeros_of(codes)
    weight, x = joined(codes), torch.randn(6, 256)
    assert_close(weight(x), x @ codes.dequantize().t(), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(("method", "error"), [(CudaFP8, 0.05), (CudaInt4, 0.2)])
def test_plain_weights_are_rounded(method, error):
    torch.manual_seed(0)
    plain, x = torch.randn(48, 128), torch.randn(4, 128)
    weight = method().join([plain[:16], plain[16:]], None)
    off = (weight(x) - x @ plain.t()).norm() / (x @ plain.t()).norm()
    assert 0 < off < error


def settled(model, **options):
    here = replace(machine.detect(), gpu="some", gpu_bytes=2**36, gpu_free_bytes=2**36)
    return resolve(EngineOptions(max_context=64, **options), model, here)


def test_schemes_are_settled():
    plain = replace(SMOLLM2, stored={})
    stored = replace(plain, stored={"Q4_K": plain.num_parameters})
    dense, packed, fp8, int4 = (
        settled(model, device="cuda", quantization=asked)
        for model, asked in ((plain, "auto"), (stored, "auto"), (plain, "fp8"), (plain, "int4"))
    )
    assert [one.scheme for one in (dense, packed, fp8, int4)] == [
        "dense",
        "quantized",
        "fp8",
        "int4",
    ]
    assert int4.weight_bytes < fp8.weight_bytes < dense.weight_bytes == 2 * plain.num_parameters
    assert settled(stored, device="cuda", quantization="none").scheme == "dense"
    with pytest.raises(ConfigError, match="it is for plain checkpoints"):
        settled(stored, device="cuda", quantization="fp8")
    with pytest.raises(ConfigError, match="on GPUs only"):
        settled(plain, device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match="'int3' is not known"):
        settled(plain, device="cuda", quantization="int3")


class Cores:
    """In the place of cuSPARSELt: takes rows in multiples of 16, and may add something to rows that
    come with many others."""

    def __init__(self, monkeypatch, off=0.0):
        self.off, self.rows = off, []
        monkeypatch.setattr(torch, "_cslt_compress", lambda weight: weight.clone())
        monkeypatch.setattr(torch, "_cslt_sparse_mm", self.multiply)

    def multiply(self, packed, x, bias=None, transpose_result=False):
        assert transpose_result
        assert x.shape[1] % 16 == 0
        self.rows.append(x.shape[1])
        made = (packed @ x).t().contiguous() + (0 if bias is None else bias)
        return made + self.off if x.shape[1] > 16 else made


def pruned(outs=64, ins=64):
    weight = torch.randn(outs, ins, generator=torch.Generator().manual_seed(5))
    weight.unflatten(1, (-1, 4))[:, :, ::2] = 0
    return weight


def test_two_of_four_are_sparse_and_others_stay_dense(monkeypatch):
    cores = Cores(monkeypatch)
    weight, x, bias = pruned(), torch.randn(5, 64), torch.randn(64)
    made = CudaSparse().join([weight[:32], weight[32:]], bias)
    assert_close(made(x), x @ weight.t() + bias)
    assert cores.rows == [16]
    gate, up = pruned(32), pruned(32) * 2
    assert_close(
        CudaSparse().join_gated(gate, up, None, "silu")(x),
        glu_reference(x @ torch.cat([gate, up]).t(), "silu"),
    )
    weight[7, 9:12] = 1.0  # three of four
    assert isinstance(CudaSparse().join([weight], None), CudaWeight)
    assert isinstance(CudaSparse().join([pruned(33)], None), CudaWeight)


def test_sparse_weights_are_refused_if_bits_depend_on_the_rows(monkeypatch):
    Cores(monkeypatch)
    made = CudaSparse().join([pruned()], None)
    made.prepare({1, 16, 64})
    Cores(monkeypatch, off=0.5)
    with pytest.raises(ConfigError, match="other bits among 1 rows than among 64"):
        made.prepare({1, 64})
    CudaSparse(fast=True).join([pruned()], None).prepare({1, 64})
