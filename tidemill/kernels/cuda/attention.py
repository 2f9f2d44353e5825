"""Attention over the paged cache: which kernel takes which of a step's lists."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda.attention_lists import (
    BLOCK,
    SPLIT,
    Lists,
    at_once,
    prompt_rows,
    shared_rows,
    single_rows,
)
from tidemill.kernels.cuda.launch import how, launch
from tidemill.kernels.cuda.paged_attention import _attend_prompts, _attend_shared, _attend_single
from tidemill.kernels.cuda.records import PROMPTS, SHARED
from tidemill.types.model_config import AttentionSpec

_LOG2_E = 1.4426950408889634


def attend(
    qkv_TC: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    lists: Lists,
    out_TC: torch.Tensor,
    spec: AttentionSpec,
    positions_T: torch.Tensor,
    sinks_N: torch.Tensor | None = None,
    bias_NW: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> None:
    """`cache`: [P, layers, 2, G, S, D] with pages of a block; `layer`: which of a page. Queries are
    read from `qkv_TC`, results go to `out_TC`. `bias_NW`: added to scores, see `masks.by_distance`.
    `scales`: [P, layers, 2, G, S], if there are any."""
    _, num_layers, _, num_kv_heads, page_size, dim = cache.shape
    dim *= 2 if cache.dtype == torch.uint8 else 1  # int4
    assert page_size == BLOCK
    num_heads, group = spec.num_heads, spec.num_heads // num_kv_heads
    where = (layer * 2 * num_kv_heads, num_layers * 2 * num_kv_heads, table.stride(0))
    has_bias = bias_NW is not None
    is_scaled = spec.softcap > 0 or has_bias  # before the softmax
    scale = spec.scale if is_scaled else spec.scale * _LOG2_E
    how_much = (
        scale,
        _LOG2_E if is_scaled else scale,
        spec.softcap,
        spec.window,
        0 if bias_NW is None else bias_NW.shape[1],
    )
    common = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "DIM": dim,
        "SPLIT": SPLIT,
        "BLOCK": BLOCK,
    }
    common |= how(qkv_TC.shape[0])
    common |= {"WINDOW": spec.window > 0, "SOFTCAP": spec.softcap > 0, "BIAS": has_bias}
    has_sinks = {"SINKS": sinks_N is not None}
    unused = qkv_TC
    sinks, bias, ends = (unused if one is None else one for one in (sinks_N, bias_NW, lists.ends))
    if scales is not None:
        from tidemill.kernels.cuda.scaled_attention import attend_scaled

        attend_scaled(
            qkv_TC, cache, scales, layer, table, out_TC, positions_T, lists, sinks, bias, how_much, sinks_N is not None, common
        )  # fmt: skip
        return
    desc = (
        TensorDescriptor.from_tensor(cache.view(-1, dim), [BLOCK, dim])
        if lists.num_shared or lists.num_prompts
        else None
    )
    if lists.num_shared:
        launch(
            _attend_shared, (num_kv_heads, lists.num_shared),
            qkv_TC, desc, table, lists.partial, lists.words, positions_T, bias, *where, *how_much, WORD=SHARED,
            ROWS=shared_rows(group), num_warps=4, num_stages=2, **common,
        )  # fmt: skip
    if lists.num_single and at_once(lists, num_kv_heads, group, dim):
        from tidemill.kernels.cuda import hopper_single

        hopper_single.attend_single(
            qkv_TC, cache, table, out_TC, lists.singles, lists.partial, lists.done, (*where, lists.head_width, scale),
            lists.num_single, num_heads, SPLIT,
        )  # fmt: skip
    elif lists.num_single:
        launch(
            _attend_single, (num_kv_heads, lists.num_single),
            qkv_TC, cache, table, out_TC, lists.partial, lists.done, lists.singles, sinks, bias,
            lists.singles if lists.paths is None else lists.paths, *where, lists.head_width, *how_much,
            0 if lists.paths is None else lists.paths.stride(0), TREES=lists.paths is not None,
            ROWS=single_rows(group), **_single_how(qkv_TC.shape[0], group), **has_sinks, **common,
        )  # fmt: skip
    if lists.prompts is not None:
        lists.prompts.attend(qkv_TC, cache, layer, out_TC, num_heads)
    elif lists.num_prompts and lists.by_roles:
        from tidemill.kernels.cuda import hopper_attention

        hopper_attention.attend_prompts(
            qkv_TC,
            cache,
            table,
            out_TC,
            lists.words,
            (*where, scale),
            lists.num_prompts,
            PROMPTS,
            num_heads,
            SPLIT,
        )
    elif lists.num_prompts:
        launch(
            _attend_prompts, (num_kv_heads, lists.num_prompts),
            qkv_TC, desc, cache, table, out_TC, lists.words, sinks, bias, ends, *where, *how_much, WORD=PROMPTS,
            ROWS=prompt_rows(group, by_roles=False), BOTH_WAYS=spec.is_bidirectional, num_warps=4, num_stages=2, **has_sinks,
            **common,
        )  # fmt: skip


def _single_how(num_tokens: int, group: int) -> dict[str, int]:
    """A few requests are done soonest by four warps for each of their splits, and so are many whose
    tiles are mostly empty; else two read memory fastest."""
    if num_tokens <= 16 or group <= 2:
        return {"num_warps": 4, "num_stages": 5, "TOGETHER": 8 if num_tokens <= 16 else 4}
    return {"num_warps": 2, "num_stages": 3, "TOGETHER": 4}
