"""The shape of a model, whatever file it came from: what each layer computes, and how many bytes
that takes."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from tidemill.errors import ConfigError, InvalidRequest
from tidemill.types.kv_format import FORMATS
from tidemill.types.weight_types import HELD, PLAIN_TYPES, is_packed

_MAX_LAYERS = 2**14


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """The scaling of positions beyond the original context. Field names follow the published
    configurations."""

    kind: str  # linear, llama3, yarn, longrope
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    # yarn: the bounds between which frequencies are blended are whole numbers
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope's: contexts up to the original one
    long_factors: tuple[float, ...] = ()  # and longer ones


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A rotary position embedding of the first `num_dims` dimensions of a head."""

    num_dims: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One of the things that a layer stores of each token: so many heads of so many values."""

    name: str
    num_heads: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The computation of a layer besides its feed-forward, and what it keeps of a sequence for
    later tokens. It keeps parts of every token, or a state of constant size, or nothing where it
    reads what another layer keeps. Fields and properties here are what the rest of the engine asks
    of a layer, whatever its kind."""

    tag: str  # of its kind, in messages and in the tables of kernels
    num_heads: int
    head_dim: int
    window: int = 0  # a token sees this many tokens, its own the last; 0: all before it
    rotation: Rotation | None = None  # None: nothing is rotated
    scale: float = 1.0  # of scores
    softcap: float = 0.0  # a score s becomes softcap * tanh(s / softcap); 0: it stays
    reads: int | None = None  # the number of the layer whose cache it reads; None: it has its own
    first_head: int = 0  # of a rank's heads, the number of the first among all
    kv_is_shared: bool = False  # other ranks store the same parts, for other heads

    @property
    def reads_tokens(self) -> bool:
        """Tells if the layer attends over what was stored of earlier tokens."""
        return False

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of each token that the layer reads: its own, or those of the layer whose cache
        it reads."""
        return ()

    @property
    def stored(self) -> tuple[Part, ...]:
        """The parts that the layer itself stores of each token."""
        return self.parts if self.reads is None else ()

    @property
    def head_groups(self) -> int:
        """The number of groups of heads that stay together when ranks share them out."""
        return self.num_heads

    @property
    def piece_bytes(self) -> list[int]:
        """The sizes of what a state consists of, each of which lies in one place; empty: there is
        no state."""
        return []

    @property
    def kinds(self) -> list[str]:
        """The features beyond causal attention over keys and values of one size, by their names in
        `coverage.py`."""
        return []

    @property
    def num_inner(self) -> int:
        """The number of a token's values that come out, before the last projection."""
        return self.num_heads * self.head_dim

    @property
    def num_exchanged(self) -> int:
        """The number of a token's values that ranks exchange to turn rows into heads and back; 0:
        they cannot."""
        return 0

    @property
    def num_activations(self) -> int:
        """The number of a token's values that the layer needs meanwhile."""
        raise NotImplementedError

    def num_parameters(self, hidden_size: int, is_gated: bool = False) -> int:
        raise NotImplementedError

    def token_bytes(self, kv_dtype: str) -> int:
        """The bytes of a token in the layer's cache."""
        kv_format = FORMATS[kv_dtype]
        return sum(part.num_heads * kv_format.head_bytes(part.dim) for part in self.stored)

    def cut(self, heads: range, num_groups: int, ends: Sequence[int]) -> Self:
        """The spec as a rank with these heads has it. `ends`: after the last head of each rank."""
        return self.but(num_heads=len(heads))

    def but(self, **changes: Any) -> Self:
        """The spec with other values of some fields."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(LayerSpec):
    """Attention over a key and a value of each token, of as many heads or fewer."""

    tag: str = "attention"
    num_kv_heads: int
    value_head_dim: int = 0  # of a value; 0: head_dim, which is a key's
    rotation: Rotation | None  # of queries and keys
    has_sinks: bool = False  # a learned score for each head joins the softmax, without a value
    # a query sees all keys that its step has of the sequence, not only those before it
    is_bidirectional: bool = False
    # the distance between query and key, times a slope of the head, is taken off the score
    has_alibi: bool = False
    # a learned number for each head and distance between query and key is added to the score
    has_distance_bias: bool = False
    all_heads: int = 0  # of all ranks; 0: num_heads
    values_in_keys: bool = False  # a value is the last part of its key, and not stored again

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "value_dim"):
            _check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"The model's configuration has {self.num_heads} query heads over {self.num_kv_heads} KV heads.",
                fix="The first must be a multiple of the second.",
            )
        assert not (self.is_bidirectional and self.window), "no kernel has both"

    @property
    def reads_tokens(self) -> bool:
        return True

    @property
    def value_dim(self) -> int:
        return self.value_head_dim or self.head_dim

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.values_in_keys:
            return (Part("keys", self.num_kv_heads, self.head_dim),)
        return Part("keys", self.num_kv_heads, self.head_dim), Part(
            "values", self.num_kv_heads, self.value_dim
        )

    @property
    def num_inner(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def head_groups(self) -> int:
        return self.num_kv_heads

    def cut(self, heads: range, num_groups: int, ends: Sequence[int]) -> Self:
        is_shared = self.num_kv_heads < len(ends)
        own = self.but(
            num_heads=len(heads),
            num_kv_heads=num_groups,
            first_head=heads.start,
            kv_is_shared=is_shared,
        )
        return own.but(all_heads=self.num_heads)

    @property
    def num_projected(self) -> int:
        """Columns of the projection that a token starts with: queries, and what is stored."""
        return self.num_heads * self.head_dim + sum(
            part.num_heads * part.dim for part in self.stored
        )

    @property
    def num_exchanged(self) -> int:
        return self.num_projected + self.num_inner

    @property
    def num_activations(self) -> int:
        return 3 * self.num_projected

    def num_parameters(self, hidden_size: int, is_gated: bool = False) -> int:
        return hidden_size * (self.num_projected + (2 if is_gated else 1) * self.num_inner)

    @property
    def kinds(self) -> list[str]:
        has = {
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.has_sinks,
            "bidirectional": self.is_bidirectional,
            "distance bias": self.has_distance_bias,
            "ALiBi": self.has_alibi,
            "keys and values of different sizes": self.value_dim != self.head_dim
            and not self.values_in_keys,
            "a cache of another layer": self.reads is not None,
            "values in keys": self.values_in_keys,
        }
        return [kind for kind, value in has.items() if value]


STATE_KINDS = ("mamba", "mamba2", "delta")


@dataclass(frozen=True, kw_only=True)
class StateSpec(LayerSpec):
    """The computation of a layer with a state of constant size: a short causal convolution, then a
    recurrence over a float32 matrix [state_size, head_dim] for each head. Columns of that matrix do
    not depend on each other. The channels of a mamba are all alike: its heads are groups of
    head_dim of them."""

    tag: str = "state"
    kind: str  # mamba: selective scan; mamba2: one decay for a head; delta: gated delta rule
    state_size: int  # of a delta rule: the size of a key
    num_groups: int = 1  # heads of one group share their B and C (delta: key and query)
    kernel: int = 4  # tokens that the convolution sees
    rank: int = 0  # of the time steps' projection (mamba)
    # values that are normed together (mamba2: after the gate; delta: a head, before it); 0: none
    norm_size: int = 0

    def __post_init__(self) -> None:
        if self.kind not in STATE_KINDS:
            raise ConfigError(
                f"A layer's state is of kind {self.kind!r}.",
                fix=f"Known kinds: {', '.join(STATE_KINDS)}.",
            )
        for name in ("num_heads", "head_dim", "state_size", "num_groups", "kernel"):
            _check_size(name, getattr(self, name))
        if self.kind == "mamba":
            _check_size("rank", self.rank)
        if self.num_heads % self.num_groups or (self.norm_size and self.num_inner % self.norm_size):
            raise ConfigError(
                f"The model's configuration has {self.num_heads} heads of {self.head_dim} in {self.num_groups} groups, normed by "
                f"{self.norm_size}.",
                fix="Groups must divide the heads, and what is normed together all values.",
            )

    @property
    def head_groups(self) -> int:
        return self.num_groups

    def cut(self, heads: range, num_groups: int, ends: Sequence[int]) -> Self:
        """Without a norm where ranks have parts of what is normed together."""
        is_split = self.norm_size and any(end * self.head_dim % self.norm_size for end in ends)
        return self.but(
            num_heads=len(heads), num_groups=num_groups, norm_size=0 if is_split else self.norm_size
        )

    @property
    def num_channels(self) -> int:
        """The number of channels of the convolution."""
        return self.num_inner + (
            0 if self.kind == "mamba" else 2 * self.num_groups * self.state_size
        )

    @property
    def num_projected(self) -> int:
        """Columns of the projection that a token starts with: the channels, a gate and (one or two
        for a head) time steps."""
        return (
            self.num_channels
            + self.num_inner
            + {"mamba": 0, "mamba2": 1, "delta": 2}[self.kind] * self.num_heads
        )

    @property
    def conv_floats(self) -> int:
        """The number of floats of the convolution's state, [num_channels, kernel - 1]."""
        return self.num_channels * (self.kernel - 1)

    @property
    def head_floats(self) -> int:
        """The number of floats of each head's state."""
        return self.state_size * self.head_dim

    @property
    def piece_bytes(self) -> list[int]:
        """The convolution's state and each head's: what lies in one place each."""
        return [4 * self.conv_floats, *[4 * self.head_floats] * self.num_heads]

    @property
    def num_activations(self) -> int:
        return self.num_projected + self.num_channels + 3 * self.num_inner

    def num_parameters(self, hidden_size: int, is_gated: bool = False) -> int:
        inner = self.num_inner
        linears = hidden_size * (self.num_projected + inner)
        if self.kind == "mamba":
            linears += inner * (2 * self.rank + 2 * self.state_size + self.state_size)
        return linears + self.num_channels * (self.kernel + 1) + 3 * self.num_heads + self.norm_size


SPECS: dict[str, type[LayerSpec]] = {"attention": AttentionSpec, "state": StateSpec}  # by tag
if TYPE_CHECKING:
    TaggedSpec = LayerSpec
else:

    class TaggedSpec(ABC):  # noqa: B024
        """Stands for all kinds of specs in messages: msgspec would read the base class, and has no
        unions of dataclasses."""

    TaggedSpec.register(LayerSpec)


# Softmax over all experts, or over the chosen ones, or by scores (`Routing`).
SCORINGS = ("softmax_then_topk", "topk_then_softmax", "scores")
SCORES = ("sigmoid", "softmax")
_MAX_EXPERTS = 2**12


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choice of experts by scores, where weights are not a plain softmax: experts are chosen by
    their scores plus a bias, among the best groups; their scores without it are the weights."""

    score: str  # of SCORES
    has_bias: bool = False
    num_groups: int = 1  # neighbouring experts, of each as many
    top_groups: int = 1  # the experts of so many groups can be chosen
    best_of_group: int = 2  # a group's score is the sum of so many of its experts'
    scale: float = 1.0  # of the weights

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            known = f"Known: {', '.join(SCORES)}."
            raise ConfigError(f"Experts are scored by {self.score!r}.", fix=known)
        _check_size("n_group", self.num_groups, _MAX_EXPERTS)
        _check_size("topk_group", self.top_groups, self.num_groups)
        if not 1e-6 < self.scale < 1e6:
            what = f"The model's configuration has routed_scaling_factor = {self.scale}."
            raise ConfigError(what, fix="It must be a positive number.")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """The experts of a layer's feed-forward, and how a token chooses among them."""

    num_experts: int
    top_k: int
    expert_size: int
    renormalise: bool  # the chosen experts' weights are divided by their sum
    scoring: str = "softmax_then_topk"
    act: str = "silu"  # a name in kernels/glu.py
    has_bias: bool = False  # of the router and of every expert's matrices
    # Of an expert that every token goes through, by the weight sigmoid(its own row of the router),
    # or 1 with `routing`.
    shared_size: int = 0
    num_held: int = 0  # of a rank that has some of the experts; 0: all
    routing: Routing | None = None  # with the scoring "scores"

    def __post_init__(self) -> None:
        _check_size("num_experts", self.num_experts, _MAX_EXPERTS)
        _check_size("num_experts_per_tok", self.top_k, self.num_experts)
        assert (self.routing is None) == (self.scoring != "scores")
        if self.routing is not None:
            groups, per_group = self.routing.num_groups, self.num_experts // self.routing.num_groups
            if self.num_experts % groups or self.routing.top_groups * per_group < self.top_k:
                raise ConfigError(
                    f"The model's configuration has {self.num_experts} experts in {groups} groups, "
                    f"{self.top_k} a token from {self.routing.top_groups} of them.",
                    fix="Groups must divide the experts and have enough of them.",
                )
        _check_size("expert size", self.expert_size)
        if self.scoring not in SCORINGS:
            raise ConfigError(
                f"Experts are chosen by {self.scoring!r}.", fix=f"Known: {', '.join(SCORINGS)}."
            )

    @property
    def num_logits(self) -> int:
        """Rows of the router: one for each expert, and one for a shared one that is gated."""
        return self.num_experts + self.gates_shared

    @property
    def gates_shared(self) -> bool:
        return bool(self.shared_size) and self.routing is None

    def num_parameters(self, hidden_size: int) -> int:
        num = self.num_held or self.num_experts
        matrices = 3 * hidden_size * (num * self.expert_size + self.shared_size)
        biases = num * (2 * self.expert_size + hidden_size + 1) if self.has_bias else 0
        biases += self.num_experts if self.routing is not None and self.routing.has_bias else 0
        return matrices + self.num_logits * hidden_size + biases

    def activations(self, hidden_size: int) -> int:
        """Values that a token needs meanwhile: for each of its experts the input, gate and up,
        their product, the output."""
        chosen = self.top_k * (2 * hidden_size + 3 * self.expert_size)
        return (
            chosen
            + 2 * self.num_logits
            + (hidden_size + 3 * self.shared_size if self.shared_size else 0)
        )


def _check_size(name: str, value: object, most: int = 2**31) -> None:
    if not isinstance(value, int) or not 0 < value <= most:
        raise ConfigError(
            f"The model's configuration has {name} = {value!r}.",
            fix=f"It must be an integer from 1 to {most}.",
        )


def alike(num_layers: int, spec: LayerSpec) -> tuple[LayerSpec, ...]:
    """The layers of a model whose layers do not differ."""
    _check_size("num_layers", num_layers, _MAX_LAYERS)
    return (spec,) * num_layers


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """The result that an encoder makes of its hidden states: an embedding, or the scores of a
    cross-encoder."""

    how: str  # mean, cls (the first token's) or score
    is_normalized: bool = True  # embeddings have length 1
    # that its embeddings were trained to be cut to (Matryoshka); none: not known
    dimensions: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LabelHead:
    """Scores of labels, from one hidden state: an encoder's first, a decoder's last."""

    num: int
    names: tuple[str, ...] = ()  # LABEL_0, ... where the checkpoint has none
    activation: str = "identity"  # of the scores: identity or sigmoid


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model, whatever file it came from."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # 0: no feed-forward
    layers: tuple[TaggedSpec, ...]  # one for each layer
    max_context: int
    norm_eps: float
    tie_embeddings: bool = False
    attention_bias: bool = False  # of q, k and v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    conv_bias: bool = True  # of state layers
    gated_attention: bool = False  # by a sigmoid of another projection as wide as the queries'
    qk_norm: bool = False  # of each query and key head, before rotation
    clip_qkv: float = 0.0  # queries, keys and values are cut off at this on both sides; 0: nowhere
    act: str = "silu"  # a name in kernels/glu.py
    # of each layer, None where it is dense; empty: all are
    experts: tuple[MoESpec | None, ...] = ()
    is_gated: bool = True  # the feed-forward block: act(gate) * up; otherwise act(up)
    is_parallel: bool = False  # attention and feed-forward read the same residual, side by side
    num_positions: int = 0  # rows of a learned position embedding; 0: there is none
    most_positions: int = 0  # of an encoder: those of them, the last, that tokens have
    embedding_scale: float = 1.0  # multiplies embeddings
    residual_scale: float = 1.0  # multiplies what a layer adds
    logits_scale: float = 1.0  # multiplies logits
    logits_softcap: float = 0.0  # a logit l becomes softcap * tanh(l / softcap); 0: it stays
    num_token_types: int = 0  # learned, of the texts of a pair
    pooler: Pooler | None = None  # an encoder has one
    labels: LabelHead | None = None  # of a cross-encoder or classifier
    # the first so many have weights, which the others share; 0: all have their own
    num_own_layers: int = 0
    embedding_size: int = 0  # of tables that a projection follows; 0: hidden_size
    takes_embeddings: bool = False  # a prompt may have rows of embeddings in the place of tokens
    has_head: bool = True  # False: of a decoder that makes embeddings alone
    embeds_by: str | None = None  # a decoder's embeddings, if its folder says: mean or last
    stored: dict[str, int] = field(default_factory=dict)  # values in the checkpoint by stored type
    kv_bits: int = 0  # that the checkpoint asks for of keys and values; 0: it does not say
    num_ranks: int = 1  # this is the part of one of so many
    notes: tuple[str, ...] = ()  # what a user should know about how this file was read

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers"):
            if getattr(self, name) or name != "intermediate_size" or self.token_layers:
                _check_size(name, getattr(self, name))
        for layer, spec in enumerate(self.layers):
            if spec.reads is not None and not self._has_cache_for(spec, layer):
                raise ConfigError(
                    f"Layer {layer} reads the cache of layer {spec.reads}.",
                    fix="That must be an earlier layer that has a cache, with the same window and the same heads.",
                )
        if self.experts and len(self.experts) != self.num_layers:
            raise ConfigError(
                f"The model has {self.num_layers} layers, and experts for {len(self.experts)}."
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def _has_cache_for(self, spec: LayerSpec, layer: int) -> bool:
        assert spec.reads is not None
        source = self.layers[spec.reads] if 0 <= spec.reads < layer else None
        if source is None or not source.stored:
            return False
        return spec.parts == source.stored and spec.window == source.window

    @property
    def token_layers(self) -> tuple[LayerSpec, ...]:
        """The specs of the layers that attend over what was stored of tokens."""
        return tuple(spec for spec in self.layers if spec.reads_tokens)

    @property
    def has_equal_parts(self) -> bool:
        """Tells if all layers that store tokens store keys and values of one size: then pages have
        the dimensions [layers, 2, heads, tokens, values]."""
        sizes = {(part.num_heads, part.dim) for spec in self.layers for part in spec.parts}
        return len(sizes) <= 1 and all(len(spec.parts) in (0, 2) for spec in self.layers)

    @property
    def has_states(self) -> bool:
        """Tells if layers keep a state of constant size."""
        return any(spec.piece_bytes for spec in self.layers)

    @property
    def kinds(self) -> list[str]:
        """The features of its layers beyond causal attention over keys and values that all have the
        same size."""
        kinds = {kind for spec in self.token_layers for kind in spec.kinds}
        are_alike = len({(spec.num_heads, spec.parts) for spec in self.token_layers}) <= 1
        return sorted(kinds | (set() if are_alike else {"layers of different sizes"}))

    @property
    def num_heads(self) -> int:
        """The number of heads of the first layer that attends; 0 if there is none, as num_kv_heads
        and head_dim."""
        return next((spec.num_heads for spec in self.token_layers), 0)

    @property
    def num_kv_heads(self) -> int:
        return next((spec.parts[0].num_heads for spec in self.token_layers), 0)

    @property
    def head_dim(self) -> int:
        return next((spec.head_dim for spec in self.token_layers), 0)

    @property
    def num_kv_layers(self) -> int:
        """Layers that store tokens. An encoder computes a sequence in one step: its layers use the
        same memory."""
        return sum(1 for spec in self.layers if spec.stored) if self.pooler is None else 1

    @property
    def own_pooling(self) -> str | None:
        """The pooling that the model does with a prompt's hidden states; None: it generates."""
        if self.labels is not None or self.pooler is not None:
            return "score" if self.pooler is None else self.pooler.how
        return None if self.has_head else self.embeds_by or "last"

    @property
    def _use_of_pooling(self) -> tuple[str, str]:
        """The use of a model that generates nothing, and the routes for it."""
        if self.own_pooling != "score":
            return "makes embeddings", "/v1/embeddings, /v1/score or /v1/rerank"
        if self.labels is not None and self.labels.num > 1:
            return "classifies texts", "/classify"
        return "scores pairs of texts", "/v1/score or /v1/rerank"

    def check_pooling(self, pooling: str | None) -> None:
        """Raises unless the model can do it. None: generate."""
        own, (does, routes) = self.own_pooling, self._use_of_pooling
        if pooling is None and own is not None:
            is_one = "is an encoder" if self.pooler is not None else "has no output head"
            raise InvalidRequest(
                f"This model {is_one}: it {does} and generates no text.",
                fix=f"Use {routes}.",
                param="model",
            )
        if pooling == "score" and own != "score":
            raise InvalidRequest(
                "This model is not a cross-encoder: it has no scores.",
                fix="Use embeddings.",
                param="pooling",
            )
        if pooling not in (None, "score") and own == "score":
            fix = f"Use {routes}, or serve an embedding model."
            raise InvalidRequest(
                f"This model {does}: it has scores, no embeddings.", fix=fix, param="model"
            )
        if pooling == "cls" and self.pooler is None:
            fix = "Use mean or last."
            raise InvalidRequest(
                "The first token of a causal model knows nothing of the others.",
                fix=fix,
                param="pooling",
            )

    @property
    def num_parameters(self) -> int:
        """Stored values: a tied embedding counts once."""
        h = self.hidden_size
        mixers = sum(spec.num_parameters(h, self.gated_attention) for spec in self.layers)
        dense = (3 if self.is_gated else 2) * h * self.intermediate_size
        feed_forward = sum(
            dense if moe is None else moe.num_parameters(h)
            for moe in map(self.moe, range(self.num_layers))
        )
        layers = mixers + 2 * h * self.num_layers + feed_forward
        size = self.embedding_size or h
        embeddings = (
            self.vocab_size * (1 if self.tie_embeddings else 2)
            + self.num_positions
            + self.num_token_types
        ) * size
        projection = h * self.embedding_size
        own = layers * (self.num_own_layers or self.num_layers) // max(self.num_layers, 1)
        return own + -(-embeddings // self.num_ranks) + projection + h

    @property
    def num_active_parameters(self) -> int:
        """Those that one token is multiplied by: of the experts, only the chosen ones."""
        idle = (
            3 * self.hidden_size * moe.expert_size * (moe.num_experts - moe.top_k)
            for moe in self.experts
            if moe
        )
        return self.num_parameters - sum(idle)

    def moe(self, layer: int) -> MoESpec | None:
        """The experts of a layer; None: it is dense."""
        return self.experts[layer] if self.experts else None

    @property
    def lora_values_per_rank(self) -> int:
        """The values per rank of an adapter of all linear layers: inputs and outputs of each."""
        h, q, kv = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )
        return self.num_layers * (2 * (h + q) + 2 * (h + kv) + 3 * (h + self.intermediate_size))

    @property
    def is_quantized(self) -> bool:
        return any(kind not in PLAIN_TYPES for kind in self.stored)

    def weight_bytes(self, dtype: str, compiled: bool) -> int:
        """Resident bytes. `compiled`: with the compiled kernels, which take 16-bit weights as they
        are."""
        if dtype == "bfloat16":
            return 2 * self.num_parameters
        held = HELD["quantized" if dtype == "quantized" else "dense", "cpu"]
        stored = self.stored or {"F32": self.num_parameters}
        return int(
            sum(num_values * held.bytes_of(kind, compiled) for kind, num_values in stored.items())
        )

    def unpacked_types(self, dtype: str) -> list[str]:
        """Stored types that take more memory than their files do: no kernel multiplies them as they
        are."""
        other = [kind for kind in self.stored if kind not in PLAIN_TYPES and not is_packed(kind)]
        return sorted(other) if dtype == "quantized" else []

    @property
    def state_bytes(self) -> int:
        """The bytes of one sequence's state, whatever its length; each that is kept takes as much
        again."""
        return sum(sum(spec.piece_bytes) for spec in self.layers)

    def has_long_factors(self, context: int) -> bool:
        """Tells if longrope's factors for long contexts are taken: keys depend on it."""
        scalings = [spec.rotation.scaling for spec in self.layers if spec.rotation is not None]
        return any(
            s is not None and s.kind == "longrope" and context > s.original_context
            for s in scalings
        )

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """The bytes that a token takes in the caches of all layers. An encoder's use the same
        memory."""
        sizes = [spec.token_bytes(kv_dtype) for spec in self.layers]
        return sum(sizes) if self.pooler is None else max(sizes)

    @property
    def input_row_bytes(self) -> int:
        """The content of a row of embeddings that a request brings: float32; 0: there can be none."""
        return 4 * self.hidden_size if self.takes_embeddings else 0

    def num_input_rows(self, token_budget: int) -> int:
        """The rows of embeddings that a runner holds for prompts: those of two steps."""
        return 2 * token_budget if self.takes_embeddings else 0

    def activation_bytes(self, num_tokens: int, num_samples: int) -> int:
        """Peak of one step: the widest layer's intermediates, and the logits with one working copy."""
        feed_forward = max(
            [
                3 * self.intermediate_size,
                *(moe.activations(self.hidden_size) for moe in self.experts if moe),
            ]
        )
        mixers = {spec.tag: 0 for spec in self.layers}
        for spec in self.layers:
            mixers[spec.tag] = max(mixers[spec.tag], spec.num_activations)
        width = 4 * self.hidden_size + feed_forward + sum(mixers.values())
        return 4 * (num_tokens * width + 2 * num_samples * self.vocab_size)
