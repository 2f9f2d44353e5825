import itertools

import numpy as np
import pytest
import torch

from tests.helpers import same_bits
from tidemill.kernels import native, native_attention
from tidemill.kernels.attention import (
    TorchAttention,
    attention_reference,
    block_bounds,
    decode_tile,
    plan_attention,
)
from tidemill.kernels.kv_cache import (
    Angles,
    HeadWeights,
    PagedKV,
    copy_pages,
    dequantize,
    new_cache,
    quantize,
    views,
    write_kv,
)
from tidemill.kernels.native_attention import NativeAttention
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.types.cache_layout import Place, one_group
from tidemill.types.kv_format import FORMATS
from tidemill.types.model_config import AttentionSpec

NUM_PAGES, NUM_LAYERS, LAYER, MAX_CONTEXT = 160, 2, 1, 640
BACKENDS = [
    "torch",
    pytest.param("compiled", marks=pytest.mark.skipif(native.lib is None, reason=native.why)),
]


def spec_of(heads, kv_heads, dim, **more):
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rotation=None,
        **{"scale": dim**-0.5} | more,
    )


class Scene:
    """Requests (tokens before, new tokens) whose earlier tokens are in a paged cache, and the
    reference's results.

    Memory nobody wrote is poisoned, so that reading it shows: with NaN for the compiled kernel,
    which must not even multiply it by zero, and with huge finite values for torch's, which may.
    """

    def __init__(
        self,
        requests,
        heads,
        kv_heads,
        dim,
        page_size,
        backend,
        dtype="float32",
        rotated=None,
        **spec,
    ):
        torch.manual_seed(0)
        self.requests = requests
        num_pages = NUM_PAGES * 16 // page_size + 1
        self.width = heads + 2 * kv_heads
        pool = new_cache(num_pages, NUM_LAYERS, kv_heads, page_size, dim, dtype)
        cache, scales = views(pool, NUM_LAYERS, kv_heads, page_size, dim, dtype)
        (cache if scales is None else scales).fill_(float("nan") if backend == "compiled" else 6e4)
        order = torch.randperm(num_pages - 1) + 1
        table = torch.zeros(
            len(requests), block_bounds(MAX_CONTEXT)[-1][1] // page_size, dtype=torch.int32
        )
        angles = Angles(*rope_tables(*rope_frequencies(rotated or dim, 10000.0, None), MAX_CONTEXT))
        spec = spec_of(heads, kv_heads, dim, **spec)
        self.kv = PagedKV(
            cache,
            [table],
            (spec,) * NUM_LAYERS,
            [angles] * NUM_LAYERS,
            one_group(NUM_LAYERS, page_size).places,
            [],
            scales,
        )
        self.learned = HeadWeights(sinks=torch.randn(heads) if spec.has_sinks else None)
        self.qkv, self.expected, used = [], [], 0
        for row, (before, new) in enumerate(requests):
            total = before + new
            num = -(-total // page_size)
            table[row, :num] = order[used : used + num]
            used += num
            every = torch.randn(total, self.width, dim)
            positions = torch.arange(total)
            turned = apply_rope(
                every[:, : heads + kv_heads], angles.cos[:total], angles.sin[:total]
            )
            k, v = turned[:, heads:], every[:, heads + kv_heads :]
            write_kv(self.kv, LAYER, self.slots(row, positions[:before]), k[:before], v[:before])
            self.qkv.append(every[before:])
            k, v = (self.stored(x) for x in (k, v))
            q, at = turned[before:, :heads], positions[before:]
            self.expected.append(
                attention_reference(q, k, v, at, spec, self.learned.sinks).flatten(1)
            )
        self.backend = (NativeAttention if backend == "compiled" else TorchAttention)(self.kv)

    def stored(self, x):
        kind = self.kv.format
        return (
            dequantize(*quantize(x, kind), kind)
            if kind.has_scales
            else x.to(self.kv.cache.dtype).float()
        )

    def slots(self, row, positions):
        size = self.kv.page_size
        return self.kv.tables[0][row, positions // size].to(torch.int64) * size + positions % size

    def run(self, rows=None):
        rows = list(range(len(self.requests))) if rows is None else rows
        starts, counts = (
            np.array(values) for values in zip(*(self.requests[row] for row in rows), strict=True)
        )
        positions = [
            torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)
        ]
        slots = torch.cat([self.slots(row, at) for row, at in zip(rows, positions, strict=True)])
        step = self.backend.plan(np.array(rows), starts, counts, torch.cat(positions), slots[None])
        return step.attend(
            LAYER, torch.cat([self.qkv[row] for row in rows]).flatten(1), self.learned
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16, 32, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (8, 1, 16), (6, 2, 128), (32, 1, 8)]
)
def test_mixed_step_equals_reference(backend, page_size, heads, kv_heads, dim):
    requests = [(0, 1), (130, 1), (63, 1), (64, 1), (0, 40), (100, 33), (0, 2), (511, 3), (7, 100)]
    scene = Scene(requests, heads, kv_heads, dim, page_size, backend)
    assert torch.allclose(scene.run(), torch.cat(scene.expected), atol=2e-5)


KINDS = {
    "window": {"window": 50},
    "window of a block": {"window": 32},
    "window of one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
    "sinks": {"has_sinks": True},
    "partly rotated": {"rotated": 8},
    "ALiBi": {"has_alibi": True},
    "all at once": {
        "window": 70,
        "softcap": 3.0,
        "scale": 0.4,
        "has_sinks": True,
        "has_alibi": True,
        "rotated": 24,
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_computes_what_its_spec_says(backend, kind):
    """Alone and among others, a request has the same bits."""
    requests = [(0, 1), (130, 1), (63, 1), (64, 1), (0, 40), (100, 33), (511, 3), (7, 100)]
    scene = Scene(requests, 6, 2, 32, 16, backend, **KINDS[kind])
    plain = Scene(requests, 6, 2, 32, 16, backend)
    out, expected = scene.run(), torch.cat(scene.expected)
    assert torch.allclose(out, expected, atol=3e-5)
    assert not torch.allclose(expected, torch.cat(plain.expected), atol=1e-3)
    first = 0
    for row, (_, new) in enumerate(requests):
        assert torch.equal(scene.run([row]), out[first : first + new])
        first += new


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (5, 1, 128), (32, 1, 8)]
)
def test_keys_and_values_in_fewer_bits(backend, dtype, heads, kv_heads, dim):
    """The compiled kernel takes queries and probabilities in 15 bits where the cache has 8 or 4."""
    scene = Scene(
        [(130, 1), (0, 40), (100, 33), (511, 3)], heads, kv_heads, dim, 16, backend, dtype
    )
    exact = backend == "torch" or not FORMATS[dtype].has_scales
    assert torch.allclose(scene.run(), torch.cat(scene.expected), atol=2e-5 if exact else 3e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_batch_invariance(backend, dtype):
    requests = [(300, 1), (0, 1), (17, 1), (90, 64), (0, 5), (31, 1), (32, 1)]
    scene = Scene(requests, 6, 2, 32, 16, backend, dtype)
    together = scene.run().split([new for _, new in requests])
    for row in range(len(requests)):
        assert torch.equal(scene.run([row]), together[row]), row
    some = scene.run([3, 0])
    assert torch.equal(some, torch.cat([together[3], together[0]]))


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (8, 1, 16), (5, 1, 128)]
)
def test_the_size_of_a_tile_changes_no_bit(monkeypatch, dtype, heads, kv_heads, dim):
    """From one token, whose keys are read in place, to the largest, whose register tiles have rows
    to spare."""
    scene = Scene(
        [(300, 1), (0, 70), (90, 64), (0, 5)], heads, kv_heads, dim, 16, "compiled", dtype
    )
    results = []
    for num_rows in (heads // kv_heads, 7 * heads // kv_heads, 32, 192):
        monkeypatch.setattr(native_attention, "_MIN_TILE_ROWS", num_rows)
        monkeypatch.setattr(native_attention, "_MAX_TILE_ROWS", num_rows)
        results.append(scene.run())
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(
        results[0], torch.cat(scene.expected), atol=3e-4 if FORMATS[dtype].has_scales else 2e-5
    )


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
@pytest.mark.parametrize("dim", [64, 24])
def test_both_backends_write_the_same_bits(dtype, dim):
    """Of values, which are not rotated: also of rows that are zero, tiny or not finite."""
    scenes = [Scene([(5, 40)], 4, 2, dim, 16, backend, dtype) for backend in ("compiled", "torch")]
    written = []
    for scene in scenes:
        values = scene.qkv[0][:, -2:]
        values[0], values[1], values[2, 0, 3], values[3, 1, 5], values[4] = (
            0,
            1e-35,
            float("inf"),
            float("nan"),
            1e-3,
        )
        scene.run()
        slots = scene.slots(0, torch.arange(45))
        stored = [view for view in (scene.kv.cache, scene.kv.scales) if view is not None]
        written.append([view[slots // 16, LAYER, 1, :, slots % 16] for view in stored])
    for ours, theirs in zip(*written, strict=True):
        assert same_bits(ours, theirs)


def test_larger_tiles_for_decoding_give_the_same(monkeypatch):
    """The fallback for machines whose small matmuls round differently."""
    from tidemill.kernels import attention

    scene = Scene([(300, 1), (0, 1), (90, 64)], 6, 2, 32, 16, "torch")
    small = scene.run()
    monkeypatch.setattr(attention, "decode_tile", lambda *_: attention.PREFILL_TILE)
    large = scene.run()
    assert torch.allclose(large, torch.cat(scene.expected), atol=2e-5)
    assert torch.equal(large, small) or decode_tile(3, 32, torch.get_num_threads()) != 1


def test_blocks_depend_on_position_alone():
    assert block_bounds(1) == [(0, 64)]
    assert block_bounds(65) == [(0, 64), (64, 128)]
    long = block_bounds(4000)
    assert long[:6] == [(0, 64), (64, 128), (128, 256), (256, 512), (512, 1024), (1024, 1536)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(long))
    assert block_bounds(3000) == long[: len(block_bounds(3000))]


def test_work_follows_live_tokens():
    """One long request does not make the short ones pay for its length."""
    starts, counts = np.array([4000] + [10] * 20), np.ones(21, np.int64)
    kv = PagedKV(
        new_cache(100, 1, 2, 16, 64),
        [torch.zeros(21, 512, dtype=torch.int32)],
        (spec_of(6, 2, 64),),
        [None],
        (Place(0, 0),),
    )
    plan = plan_attention(starts, counts, kv.tables[0].numpy(), kv, kv.specs[0])
    keys = sum(block.num_tiles * block.num_keys for group in plan.groups for block in group.blocks)
    assert keys <= 4001 + 512 + 20 * 64


def test_what_the_compiled_kernel_cannot_do_goes_to_torch():
    def kv(heads, kv_heads, dim):
        return PagedKV(
            new_cache(2, 1, kv_heads, 4, dim),
            [],
            (spec_of(heads, kv_heads, dim),),
            [None],
            (Place(0, 0),),
        )

    assert NativeAttention.can_run(kv(9, 3, 64)) == (native.lib is not None)
    assert not NativeAttention.can_run(kv(4, 2, 12))
    assert not NativeAttention.can_run(kv(64, 1, 64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_are_copied_after_all_are_read(dtype):
    cache = new_cache(5, 2, 1, 4, 8, dtype)
    cache.copy_(torch.randn(cache.shape))
    before = cache.clone()
    copy_pages(cache, torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert torch.equal(cache[2], before[1])
    assert torch.equal(cache[3], before[2])


def test_four_bits_have_an_offset():
    """Of values that are far from zero and near each other, what is lost depends on their range
    alone; equal ones are kept."""
    x = 30 + torch.rand(5, 64, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(x, FORMATS["int4"])
    assert scales.shape == (5, 2)
    # of steps of 1 / 15, and an offset in bfloat16
    assert (dequantize(codes, scales, FORMATS["int4"]) - x).abs().max() < 0.08
    same = torch.full((1, 64), 2.5)
    assert torch.equal(dequantize(*quantize(same, FORMATS["int4"]), FORMATS["int4"]), same)
