import itertools

import numpy as np
import pytest
import torch

from tidemill.kernels.attention import attention_reference, block_bounds, decode_tile, paged_attention, plan_attention
from tidemill.kernels.kv_cache import copy_pages, new_cache, slot_index, write_kv

NUM_PAGES = 80


def paged(requests, heads, kv_heads, dim, page_size, seed=0, poison=1e30):
    """Requests are (tokens before, new tokens). Returns the paged result and, per request, the reference's.
    Memory nobody wrote is poisoned with huge finite values, so that reading it shows."""
    torch.manual_seed(seed)
    num_pages = NUM_PAGES * 16 // page_size + 1
    cache = torch.full((2, kv_heads, num_pages, page_size, dim), poison)
    order = torch.randperm(num_pages - 1) + 1
    width = block_bounds(max(a + b for a, b in requests))[-1][1] // page_size
    tables = np.zeros((len(requests), width), np.int32)
    queries, expected, used = [], [], 0
    for row, (before, new) in enumerate(requests):
        total = before + new
        pages = -(-total // page_size)
        tables[row, :pages] = order[used : used + pages].numpy()
        used += pages
        k, v = torch.randn(2, total, kv_heads, dim)
        positions = torch.arange(total)
        slots = torch.from_numpy(tables[row].astype(np.int64))[positions // page_size] * page_size + positions % page_size
        index = slot_index(slots, kv_heads, num_pages * page_size)
        write_kv(cache[0], index, k)
        write_kv(cache[1], index, v)
        q = torch.randn(new, heads, dim)
        queries.append(q)
        expected.append(attention_reference(q, k, v, positions[before:], dim**-0.5))
    starts, counts = (np.array(values) for values in zip(*requests, strict=True))
    plan = plan_attention(starts, counts, tables, page_size, num_pages, heads, kv_heads, dim)
    result = paged_attention(torch.cat(queries), cache[0], cache[1], plan, dim**-0.5)
    return result, torch.cat(expected)


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (8, 1, 16)])
def test_mixed_step_equals_reference(page_size, heads, kv_heads, dim):
    requests = [(0, 1), (130, 1), (63, 1), (64, 1), (0, 40), (100, 33), (0, 2), (511, 3), (7, 100)]
    result, expected = paged(requests, heads, kv_heads, dim, page_size)
    assert torch.allclose(result, expected, atol=2e-5)


def test_all_alone_equals_in_company_bit_for_bit():
    requests = [(300, 1), (0, 1), (17, 1), (90, 64), (0, 5)]
    together, _ = paged(requests, 6, 2, 32, 16)
    torch.manual_seed(0)
    # The same data, one request at a time: rebuild the whole set and plan only one of them.
    at = 0
    for row, (_, new) in enumerate(requests):
        lone = _only(requests, row)
        assert torch.equal(lone, together[at : at + new]), row
        at += new


def _only(requests, row):
    """The same caches and queries as `paged` makes, attention of one request alone."""
    torch.manual_seed(0)
    page_size, kv_heads, heads, dim = 16, 2, 6, 32
    num_pages = NUM_PAGES + 1
    cache = torch.full((2, kv_heads, num_pages, page_size, dim), 1e30)
    order = torch.randperm(num_pages - 1) + 1
    used, tables, queries = 0, [], []
    for before, new in requests:
        total = before + new
        pages = -(-total // page_size)
        table = np.zeros((1, 64), np.int32)
        table[0, :pages] = order[used : used + pages].numpy()
        used += pages
        k, v = torch.randn(2, total, kv_heads, dim)
        positions = torch.arange(total)
        slots = torch.from_numpy(table[0].astype(np.int64))[positions // page_size] * page_size + positions % page_size
        index = slot_index(slots, kv_heads, num_pages * page_size)
        write_kv(cache[0], index, k)
        write_kv(cache[1], index, v)
        queries.append(torch.randn(new, heads, dim))
        tables.append(table)
    start, count = (np.array([value]) for value in requests[row])
    plan = plan_attention(start, count, tables[row], page_size, num_pages, heads, kv_heads, dim)
    return paged_attention(queries[row], cache[0], cache[1], plan, dim**-0.5)


def test_larger_tiles_for_decoding_give_the_same(monkeypatch):
    """The fallback for machines whose small products round differently."""
    from tidemill.kernels import attention

    requests = [(300, 1), (0, 1), (90, 64)]
    small, expected = paged(requests, 6, 2, 32, 16)
    monkeypatch.setattr(attention, "decode_tile", lambda *_: attention.PREFILL_TILE)
    large, _ = paged(requests, 6, 2, 32, 16)
    assert torch.allclose(large, expected, atol=2e-5)
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
    plan = plan_attention(starts, counts, np.zeros((21, 512), np.int32), 16, 100, 6, 2, 64)
    keys = sum(block.num_tiles * block.num_keys for group in plan.groups for block in group.blocks)
    assert keys <= 4001 + 512 + 20 * 64


def test_pages_are_copied_after_all_are_read():
    cache = new_cache(2, 1, 5, 4, 8)
    cache.copy_(torch.randn_like(cache))
    before = cache.clone()
    copy_pages(cache, [1, 2], [2, 3])
    assert torch.equal(cache[:, :, :, 2], before[:, :, :, 1])
    assert torch.equal(cache[:, :, :, 3], before[:, :, :, 2])
