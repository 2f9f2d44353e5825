"""The messages that cross a process boundary: msgspec structs as MessagePack. Never pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from tidemill.config import EngineConfig, EngineOptions
from tidemill.errors import ContextTooLong, InvalidRequest, input_too_long
from tidemill.machine import Machine
from tidemill.types.events import Event
from tidemill.types.inputs import Segment
from tidemill.types.model_config import SPECS, ModelConfig, TaggedSpec
from tidemill.types.sampling import SamplingParams


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The model's log-probability of a token, and of the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


_PIECE_CELLS = 2**10  # some 5 ms of formatting


def logprob_pieces(entries: Sequence[TokenLogprobs]) -> list[msgspec.Raw]:
    """Encoded, a bounded number of log-probabilities in each."""
    step = max(_PIECE_CELLS // (len(entries[0].top) + 1), 1) if entries else 1
    return [msgspec.Raw(_encode(entries[at : at + step])) for at in range(0, len(entries), step)]


_encode = msgspec.msgpack.Encoder().encode
decode_logprobs = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """The parts of a request's time, in seconds of the engine's clock."""

    queue_s: float
    prefill_s: float
    decode_s: float


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """The number of a prompt's tokens that were found in the cache, and the number that are
    computed or found by now."""

    num_prompt: int
    num_cached: int
    num_done: int


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one sample of a request. The last one carries the finish reason and the
    timings."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    # the log-probabilities of a prompt, to be decoded piece by piece
    prompt_pieces: list[msgspec.Raw] | None = None
    num_cached: int = 0
    timings: Timings | None = None
    # of the prompt, of length 1; those of its tokens one after the other
    embedding: list[float] | None = None
    score: float | None = None  # of an output of beam search, which comes as a whole
    progress: PromptProgress | None = None  # without tokens, for a reader that asked for it
    num_held: int = 0  # tokens of the prompt's longest prefix that is held for the request

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """All of them at once: of a long prompt it takes long."""
        if self.prompt_pieces is None:
            return None
        return [entry for piece in self.prompt_pieces for entry in decode_logprobs(piece)]


class AdapterInfo(msgspec.Struct, frozen=True):
    """A LoRA adapter that was read. Its number is unique for as long as the server runs; its name
    may be used again."""

    adapter_id: int
    name: str
    path: str
    digest: str  # of its content
    rank: int


# ---- to the engine


class Start(msgspec.Struct, frozen=True, tag=True):
    options: EngineOptions


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Before Start: send `Inspected`."""

    model: str
    draft_model: str | None = None


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """A sample of a request that an earlier engine process had begun, and its output so far."""

    index: int
    output_ids: list[int]


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """A prefix of a request is to be held in the KV cache, so that it is evicted later than others
    or, if pinned, not at all."""

    name: str  # of the hold; one of this name that there is ends
    num_tokens: int  # of the prompt; 0: all that the request has when it ends
    ttl_s: float
    is_pinned: bool = False
    reason: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int] = []
    priority: int = 0
    salt: str = ""
    tenant: str = ""  # tenants share the engine fairly
    resumed: list[Resumed] | None = None  # only these samples, from where they were
    adapter: int = 0  # its number; 0: none
    prefix_leases: list[Hold] = []
    # each sample ends here with its next token, to go on in another engine
    hands_over: bool = False
    segments: list[Segment] = []  # of the prompt, in their order
    contents: dict[bytes, bytes] = {}  # of segments that have rows, by their keys: float32

    def __post_init__(self) -> None:
        """A request has a seed from its beginning, so that wherever it is computed again it draws
        the same."""
        if self.params.seed is None:
            msgspec.structs.force_setattr(self, "params", self.params.seeded())

    def check(self, vocab_size: int, context: int) -> None:
        """Raises what is wrong with it for a model of this size."""
        num, max_tokens = len(self.prompt_ids), self.params.max_tokens
        if not num:
            raise InvalidRequest(
                "The prompt is empty.", fix="Give at least one token.", param="prompt"
            )
        self._check_length(num, max_tokens, context)
        if min(self.prompt_ids) < 0 or max(self.prompt_ids) >= vocab_size:
            wrong = next(token for token in self.prompt_ids if not 0 <= token < vocab_size)
            raise InvalidRequest(
                f"The prompt holds token {wrong}, which is out of vocabulary: tokens are 0 to {vocab_size - 1}.",
                param="prompt",
            )
        if self.params.pooling is None:
            self.params.check_vocabulary(vocab_size)

    def _check_length(self, num: int, max_tokens: int | None, context: int) -> None:
        if self.params.pooling is not None:  # nothing is generated
            if num > context:
                raise input_too_long(num, context)
            return
        if num >= context:
            raise ContextTooLong(
                f"The prompt ({num} tokens) is longer than the model's context length. This model's maximum context length is "
                f"{context} tokens, one of them for the output.",
                fix=f"Please reduce the length of the input prompt to {context - 1} tokens, or serve with more --max-context.",
                param="prompt",
            )
        if max_tokens is not None and num + max_tokens > context:
            raise ContextTooLong(
                f"max_tokens or max_completion_tokens is too large: {max_tokens}. This model's maximum context length is "
                f"{context} tokens, and the prompt has {num}.",
                fix=f"Lower max_tokens to {context - num} or leave it out.",
                param="max_tokens",
            )


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    reason: str
    index: int | None = None  # one sample; None: all of them


class Finish(msgspec.Struct, frozen=True, tag=True):
    """A sample's text reached a stop string."""

    request_id: str
    index: int


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read a LoRA adapter, and send `AdapterReply`."""

    adapter_id: int
    name: str
    path: str
    digest: str = ""  # what its content must be, if it was loaded before


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    adapter_id: int


class Renew(msgspec.Struct, frozen=True, tag=True):
    """A hold ends so many seconds from now; 0: at once. Unknown names are ignored: it may have
    ended by itself."""

    name: str
    ttl_s: float
    reason: str


class Expect(msgspec.Struct, frozen=True, tag=True):
    """Another engine computes this prompt, and the request goes on here. Once there was such a
    message, pages of other prompts are not fetched before they are needed."""

    prompt_ids: list[int]
    salt: str = ""
    adapter: int = 0
    segments: list[Segment] = []


class ShowPages(msgspec.Struct, frozen=True, tag=True):
    """Send `Pages` once, for the live view."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


ToEngine: TypeAlias = (
    Start
    | Inspect
    | Submit
    | Abort
    | Finish
    | LoadAdapter
    | UnloadAdapter
    | Renew
    | Expect
    | ShowPages
    | Shutdown
)


# ---- from the engine


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Weights are being read."""

    name: str
    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    model: ModelConfig
    config: EngineConfig
    step_s: float = 0.0  # a step of one token takes
    adapters: list[AdapterInfo] = []  # of the options


class Inspected(msgspec.Struct, frozen=True, tag=True):
    """A model's shape, and the machine that it would run on."""

    model: ModelConfig
    machine: Machine
    draft_model: ModelConfig | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """An error for one request, or (request_id None) for the whole start."""

    request_id: str | None
    error: str  # class name in tidemill.errors
    message: str
    fix: str = ""
    param: str | None = None


class AdapterReply(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a LoadAdapter."""

    adapter_id: int
    info: AdapterInfo | None
    error: Refused | None = None


class Gone(msgspec.Struct, frozen=True, tag=True):
    """An Abort was carried out: nothing more comes of what was submitted under this id before it."""

    request_id: str


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    deltas: list[Delta]
    events: list[Event]


class Pages(msgspec.Struct, frozen=True, tag=True):
    """The owners of pages, between two steps."""

    owners: list[tuple[str, int]]  # request and how many pages it holds, shared ones included
    kinds: bytes  # of each page two bytes, the lower first: explained in `kv.manager`
    took_s: float  # to collect, while no step was made
    tiers: list[tuple[str, int, int]] = []  # name, pages in it, and how many it can hold


FromEngine: TypeAlias = (
    Loading | Inspected | Ready | Refused | Gone | AdapterReply | StepOutput | Pages
)


def _layer_spec(kind: type, value: Any) -> Any:
    """The spec of a layer from its fields and the tag of its kind: msgspec has no unions of
    dataclasses."""
    if kind is not TaggedSpec:
        raise NotImplementedError(kind)
    return msgspec.convert(value, SPECS[value["tag"]])


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_layer_spec).decode
