"""How models are cut over ranks: everything is somewhere, heads stay whole, ranks hold about the
same."""

from dataclasses import replace

import pytest

from tidemill.distributed.cuts import feed_forward_cut, heads_of, rank_config, shares, unit_of
from tidemill.distributed.shard import Shard
from tidemill.errors import ConfigError
from tidemill.layers.mamba import state_cut
from tidemill.types.model_config import AttentionSpec, ModelConfig, MoESpec, StateSpec, alike


def spec(num_heads: int, num_kv_heads: int, head_dim: int = 64) -> AttentionSpec:
    return AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=1.0, rotation=None
    )


def config(layer, num_layers: int = 2, **more) -> ModelConfig:
    given = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_context": 128,
        "norm_eps": 1e-5,
    } | more
    return ModelConfig(architecture="x", layers=alike(num_layers, layer), **given)


def ranks(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


@pytest.mark.parametrize(
    ("heads", "groups", "size"),
    [(9, 3, 2), (9, 3, 4), (8, 1, 4), (32, 8, 4), (6, 2, 3), (7, 7, 4), (5, 1, 5)],
)
def test_heads(heads, groups, size):
    own = [heads_of(spec(heads, groups), shard) for shard in ranks(size)]
    assert [head for one in own for head in one.heads.runs[0]] == list(range(heads))
    for one in own:
        assert {head // (heads // groups) for head in one.heads.runs[0]} == set(one.groups.runs[0])
        assert one.heads.num % one.groups.num == 0
    firsts = [group for one in own if one.is_first for group in one.groups.runs[0]]
    assert firsts == list(range(groups))


def test_more_ranks_than_heads():
    with pytest.raises(ConfigError, match="4 heads in 2 groups cannot be shared out among 8 ranks"):
        heads_of(spec(4, 2), Shard(0, 8))


@pytest.mark.parametrize(("size", "quantized"), [(2, False), (2, True), (4, True), (3, False)])
def test_ranks_with_fewer_heads_have_more_columns(size, quantized):
    """SmolLM2-135M's sizes: 9 heads, 3 KV heads."""
    model = config(spec(9, 3), tie_embeddings=True, stored={"Q4_1": 10**8} if quantized else {})
    cuts = [feed_forward_cut(model, 0, shard) for shard in ranks(size)]
    assert [column for cut in cuts for column in cut.runs[0]] == list(range(1536))
    assert not quantized or all(cut.num % 32 == 0 for cut in cuts)
    held = [rank_config(model, shard).num_parameters for shard in ranks(size)]
    assert max(held) <= 1.05 * model.num_parameters / size


def test_shares_even_out_what_ranks_have_besides():
    assert shares(100, 1, 10, [0, 0, 0, 0]) == [0, 25, 50, 75, 100]
    assert shares(100, 1, 10, [200, 0]) == [0, 40, 100]
    assert unit_of(11008, 2, True) == 128
    assert unit_of(1536, 4, True) == 32
    assert unit_of(100, 2, False) == 2


def test_states():
    delta = StateSpec(
        kind="delta", num_heads=4, head_dim=16, state_size=8, num_groups=2, norm_size=16
    )
    cut = state_cut(delta, Shard(1, 2))
    # values, then the group's keys and queries
    assert cut.channels.runs == (range(32, 64), range(72, 80), range(88, 96))
    assert rank_config(config(delta), Shard(1, 2)).layers[0].num_channels == cut.channels.num
    with pytest.raises(ConfigError, match="evenly"):
        rank_config(config(replace(delta, num_heads=6, num_groups=3)), Shard(0, 2))


def test_experts_and_encoders():
    moe = MoESpec(num_experts=3, top_k=1, expert_size=64, renormalise=True)
    model = config(spec(4, 4), experts=(moe, moe))
    assert [rank_config(model, shard, True).experts[0].num_held for shard in ranks(2)] == [1, 2]
    with pytest.raises(ConfigError, match="more ranks than experts"):
        rank_config(model, Shard(0, 4), True)
