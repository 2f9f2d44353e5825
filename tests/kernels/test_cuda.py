"""The GPU kernels without a GPU: interpreted against their references, and compiled for Hopper.

The interpreter's bfloat16 arithmetic is wrong, so everything is float32 here; bench/gpu.py checks them in bfloat16 on a GPU.
"""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from tidemill.kernels.attention import attention_reference
from tidemill.kernels.cuda import attention, elementwise, gemm
from tidemill.kernels.norm import add_rms_norm_reference
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.kernels.swiglu import swiglu_reference
from tidemill.runner.cuda_runner import decode_work, prefill_work


@pytest.mark.parametrize("width", [64, 100])
@pytest.mark.parametrize("with_x", [False, True])
def test_norm(width, with_x):
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    mine, other = residual.clone(), residual.clone()
    given = x if with_x else None
    out, expected = elementwise.add_rms_norm(given, mine, weight, 1e-5), add_rms_norm_reference(given, other, weight, 1e-5)
    assert torch.equal(mine, other)
    assert torch.allclose(out, expected, atol=1e-5)


def test_swiglu():
    gate_up = torch.randn(3, 2 * 1500)
    assert torch.allclose(elementwise.swiglu(gate_up), swiglu_reference(gate_up), atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_heads_enter_the_cache(norm):
    heads, kv_heads, dim, page, layer = 4, 2, 16, 4, 1
    qkv, cache = torch.randn(6, (heads + 2 * kv_heads) * dim), torch.zeros(4, 3, 2, kv_heads, page, dim)
    cos, sin = rope_tables(*rope_frequencies(dim, 1e4, None), 40)
    positions, slots = torch.tensor([30, 1, 2, 0, 7, 8]), torch.tensor([5, 0, 15, 9, 4, 11])
    q_weight, k_weight = torch.randn(2, dim)
    q, k, v = qkv.view(6, -1, dim).clone().split([heads, kv_heads, kv_heads], 1)
    if norm:
        q = torch.nn.functional.rms_norm(q, (dim,), q_weight, 1e-6)
        k = torch.nn.functional.rms_norm(k, (dim,), k_weight, 1e-6)
    q, k = apply_rope(q, cos[positions], sin[positions]), apply_rope(k, cos[positions], sin[positions])
    weights = (q_weight, k_weight, 1e-6) if norm else None
    elementwise.enter_heads(qkv, cache, layer, positions, slots, cos, sin, heads, weights)
    assert torch.allclose(qkv.view(6, -1, dim)[:, :heads], q, atol=1e-5)
    entered = cache[slots // page, layer, :, :, slots % page]
    assert torch.allclose(entered[:, 0], k, atol=1e-5)
    assert torch.equal(entered[:, 1], v)
    assert cache.count_nonzero() == 6 * 2 * kv_heads * dim


@pytest.mark.parametrize("tile", [gemm.Tile(16, 32, 32, 2, 4), gemm.Tile(32, 16, 64, 2, 4), gemm.Tile(32, 32, 32, 2, 4, bulk=1)])
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 40, 64), (50, 72, 96), (33, 16, 104)])
def test_gemm(tile, rows, outs, ins):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, ins), torch.randn(outs, ins)
    assert torch.allclose(gemm.gemm(x, weight, tile), x @ weight.t(), atol=1e-4)


def test_every_measured_tile_is_one():
    known = json.loads((gemm.Path(gemm.__file__).with_name("tiles.json")).read_text())
    for shapes in known.values():
        for by_rows in shapes.values():
            for tile in by_rows.values():
                made = gemm.Tile(*tile)
                assert min(made.rows, made.outs, made.ins) >= 16


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
def test_attention(heads, kv_heads, monkeypatch):
    """Decoding in one split, in splits apart and merged, and prompts with their splits in turn; poison where nobody wrote."""
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr("tidemill.runner.cuda_runner.SPLIT", 32)
    torch.manual_seed(0)
    dim, page, layer = 16, 4, 1
    requests = [(0, 1), (31, 1), (32, 1), (80, 1), (0, 9), (40, 20)]
    width = 30
    cache = torch.full((200, 2, 2, kv_heads, page, dim), 1e30)
    table, used = torch.zeros(len(requests), width, dtype=torch.int32), 1
    qkv, expected = [], []
    for row, (before, new) in enumerate(requests):
        num = -(-(before + new) // page)
        table[row, :num] = torch.arange(used, used + num)
        used += num
        q, k, v = torch.randn(new, heads, dim), *torch.randn(2, before + new, kv_heads, dim)
        positions = torch.arange(before + new)
        pages, offsets = table[row].long()[positions // page], positions % page
        cache[pages, layer, 0, :, offsets], cache[pages, layer, 1, :, offsets] = k, v
        qkv.append(torch.cat([q, torch.full((new, 2 * kv_heads, dim), 1e30)], 1).flatten(1))
        expected.append(attention_reference(q, k, v, positions[before:], dim**-0.5).flatten(1))
    import numpy as np

    starts, counts = (np.array(values, np.int32) for values in zip(*requests, strict=True))
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    rows, one = np.arange(len(requests), dtype=np.int32), counts == 1
    tiles, merges = (torch.from_numpy(x) for x in decode_work(rows[one], starts[one], firsts[one]))
    longer = torch.from_numpy(prefill_work(rows[~one], starts[~one], counts[~one], firsts[~one], 32 // (heads // kv_heads)))
    assert longer[:, 1].sum() == counts[~one].sum()
    all_qkv, out = torch.cat(qkv), torch.full((int(counts.sum()), heads * dim), float("nan"))
    partial = torch.full((tiles.shape[0], heads, dim + 2), float("nan"))
    common = (all_qkv, cache, layer, table)
    attention.attend(*common, tiles, out, heads, attention.Mode.APART, 16, merges, partial)
    attention.attend(*common, longer, out, heads, attention.Mode.IN_TURN, 32)
    assert torch.allclose(out, torch.cat(expected), atol=1e-4)
    again = torch.full_like(out, float("nan"))
    short = tiles[(tiles[:, 2] < 32)]
    attention.attend(*common, short, again, heads, attention.Mode.SINGLE, 16)
    done = short[:, 0].long()
    assert torch.allclose(again[done], out[done], atol=1e-6)
    assert again.isnan().any(1).sum() == out.shape[0] - done.numel()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tidemill.kernels.cuda import attention, elementwise, gemm

def build(kernel, types, **constants):
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    signature |= {name: "constexpr" for name in constants}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__)

B, F, I, L = "*bf16", "*fp32", "*i32", "*i64"
build(elementwise._add_rms_norm, dict(x_ptr=B, residual_ptr=B, weight_ptr=F, out_ptr=B, eps="fp32"), HAS_X=True, BLOCK=4096)
build(elementwise._swiglu, dict(gate_up_ptr=B, out_ptr=B), BLOCK=1024)
types = dict(qkv_ptr=B, cache_ptr=B, positions_ptr=L, slots_ptr=L, cos_ptr=F, sin_ptr=F, q_norm_ptr=F, k_norm_ptr=F,
             layer_offset="i64", page_stride="i64", eps="fp32")
build(elementwise._enter_heads, types, NUM_HEADS=32, NUM_KV_HEADS=8, DIM=128, PAGE=16, QK_NORM=True, HEADS=16)
build(gemm._gemm, dict(x_ptr=B, w_ptr=B, out_ptr=B), ROWS=16, OUTS=64, INS=128, GROUP=8, EVEN=True)
build(gemm._gemm_bulk, dict(x_desc="tensordesc<bf16[128, 64]>", w_desc="tensordesc<bf16[128, 64]>",
      out_desc="tensordesc<bf16[128, 128]>", out_ptr=B), ROWS=128, OUTS=128, INS=64, GROUP=8, BULK_OUT=True)
shape = dict(NUM_HEADS=32, NUM_KV_HEADS=8, DIM=128)
types = dict(qkv_ptr=B, cache_ptr=B, table_ptr=I, out_ptr=B, partial_ptr=F, tiles_ptr=I,
             layer_offset="i64", page_stride="i64", scale="fp32")
for mode, rows in ((0, 16), (1, 16), (2, 128)):
    build(attention._attend, types, **shape, PAGE=16, ROWS=rows, SPLIT=512, BLOCK=64, MODE=mode)
build(attention._merge, dict(partial_ptr=F, out_ptr=B, merges_ptr=I), NUM_HEADS=32, DIM=128)
"""


def test_every_kernel_compiles_for_hopper(tmp_path):
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {"_add_rms_norm", "_swiglu", "_enter_heads", "_gemm", "_gemm_bulk", "_attend", "_merge"}
    assert set(done.stdout.split()) == kernels
