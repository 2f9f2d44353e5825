"""The pipeline of requests whose prompts are pooled: embeddings, scores and classes. Nothing is
generated or streamed."""

from __future__ import annotations

import base64
import math
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from tidemill.errors import InvalidRequest
from tidemill.server.generation.pipeline import Endpoint
from tidemill.server.generation.prompts import check_truncation
from tidemill.server.generation.service import Service
from tidemill.server.generation.streams import merge
from tidemill.server.generation.vectors import EmbedDType, Endianness, packed
from tidemill.server.http.access import Caller
from tidemill.server.http.aside import aside, encoded
from tidemill.types.inputs import Segment, second_text
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Delta

_MAX_VALUES = 2**21  # of the vectors of single tokens in one response: about 40 MB as JSON
_BYTES_PER_VALUE, _VALUES_PER_CALL = 8, 2**16  # of vectors of single tokens

Asked: TypeAlias = tuple[list[int], SamplingParams, list[Segment]]
_json = msgspec.json.Encoder().encode
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Input:
    """A prompt to pool. `pair_start`: of a pair of texts, where tokens of type 1 begin."""

    ids: list[int]
    pair_start: int = 0


@dataclass(slots=True)
class Pooling:
    """The vectors or scores that a request asks for. `kind`: as of SamplingParams; with none, each
    token has a vector of its own."""

    inputs: list[Input]
    kind: str
    is_normalized: bool | None = None  # None: as the model has it
    width: int = 0  # of each vector, if not the model's
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(len(input.ids) for input in self.inputs)


class PooledEndpoint(Endpoint):
    """The translation between one API and a request for vectors or scores."""

    pooling: Pooling  # once it was read

    @abstractmethod
    async def read(self) -> Pooling:
        """The pooling that the body asks for."""

    @abstractmethod
    async def take(self, number: int, vector: list[float]) -> None:
        """The vector or the scores of an input, as they are computed: all at the end would hold up
        everybody."""

    @abstractmethod
    def whole(self) -> Any:
        """The response."""

    async def run(self) -> None:
        self.pooling = pooling = await self.read()
        num_values = pooling.num_tokens * (pooling.width or self.service.ready.model.hidden_size)
        if pooling.kind == "none" and num_values > _MAX_VALUES:
            what = f"Vectors of {pooling.num_tokens} tokens have {num_values} values; "
            what += f"at most {_MAX_VALUES} in one response."
            raise InvalidRequest(what, fix="Send fewer or shorter inputs.", param="input")
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            pooling=pooling.kind,
            is_normalized=pooling.is_normalized,
        )

        async def request(pooled_input: Input) -> Asked:
            ids = pooled_input.ids
            return ids, params, second_text(pooled_input.pair_start, len(ids))

        results = run_each(
            self.service, self.caller, pooling.inputs, request, lambda delta: delta.embedding
        )
        async with aclosing(results) as vectors:
            async for number, vector in vectors:
                await self.take(number, vector)

    async def answer(self) -> bytes:
        await self.run()
        size = _BYTES_PER_VALUE * len(self.pooling.inputs) * self.service.ready.model.hidden_size
        return await aside(lambda: _json(self.whole()), size)

    def usage(self) -> dict[str, int]:
        num = self.pooling.num_tokens
        return {"prompt_tokens": num, "total_tokens": num, "completion_tokens": 0}


async def run_each(
    service: Service,
    caller: Caller,
    items: Sequence[T],
    request: Callable[[T], Awaitable[Asked]],
    result: Callable[[Delta], Any],
) -> AsyncGenerator[tuple[int, Any], None]:
    """Runs a request of one step for each item; the results with the items' numbers, as they are
    computed.

    `request`: the prompt of an item, its parameters and its segments. `result`: what a delta
    brings, if it is the result. Some run at once, each place taken by one item after another: all
    at once would take everybody's places in the queue.
    """
    left = iter(enumerate(items))
    num = min(service.num_at_once, len(items))
    streams = [_in_turn(service, caller, left, request, result) for _ in range(num)]
    async with aclosing(merge(streams)) as merged:
        async for _, found in merged:
            yield found


async def _in_turn(
    service: Service,
    caller: Caller,
    left: Iterator[tuple[int, T]],
    request: Callable[[T], Awaitable[Asked]],
    result: Callable[[Delta], Any],
) -> AsyncGenerator[tuple[int, Any], None]:
    for number, item in left:
        prompt, params, segments = await request(item)
        stream = service.stream(caller, prompt, params, number, segments=segments)
        async with aclosing(stream) as outputs:
            async for delta, _ in outputs:
                if (found := result(delta)) is not None:
                    yield number, found


# ---- what can be asked for


def pooling_kind(service: Service, kind: str | None = None) -> str:
    """The pooling that is asked for, or by which the server or the model makes an embedding of a
    text."""
    own, set_to = service.ready.model.own_pooling, service.response_defaults.pooling
    by_default = own or service.ready.model.embeds_by or "mean"
    return kind or (set_to if own != "score" and set_to != "none" else None) or by_default


def embedding_pooling(service: Service) -> str:
    """The same as `pooling_kind`, but raises for a model that has no embeddings."""
    kind = pooling_kind(service)
    service.ready.model.check_pooling("mean" if kind == "score" else kind)
    return kind


def check_dimensions(service: Service, num: int, param: str, pooling: str = "") -> None:
    """Raises unless embeddings can be cut to so many: of a model that tells which it was trained
    for, to these."""
    model = service.ready.model
    trained = model.pooler.dimensions if model.pooler else ()
    if not 1 <= num <= model.hidden_size or pooling == "score":
        what = f"The model's embeddings have {model.hidden_size} dimensions; got {num}."
        raise InvalidRequest(what, param=param)
    if trained and num not in (*trained, model.hidden_size):
        fix = f"Give one of {', '.join(map(str, trained[:32]))}, or leave it out."
        what = f"The model was not trained for embeddings of {num} dimensions."
        raise InvalidRequest(what, fix=fix, param=param)


def num_kept(service: Service, num: int) -> int:
    """Tokens that an input is truncated to. -1: as many as the model takes."""
    check_truncation(service, num)
    return service.max_context if num < 0 else num


# ---- vectors as they are written


def shortened(vector: list[float], num: int | None, is_normalized: bool) -> list[float]:
    """The first dimensions, of length 1 again."""
    if num is None or num == len(vector):
        return vector
    norm = math.sqrt(sum(value * value for value in vector[:num])) or 1.0 if is_normalized else 1.0
    return [value / norm for value in vector[:num]]


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """The form in which a vector is written: as a list of numbers, or as bytes, in base64 or as
    they are."""

    encoding: str | None = None
    dtype: EmbedDType = "float32"
    endianness: Endianness = "native"
    dimensions: int | None = None
    is_normalized: bool = True

    def one(self, vector: list[float]) -> bytes:
        return self._written(shortened(vector, self.dimensions, self.is_normalized))

    async def rows(self, vector: list[float], size: int) -> bytes:
        """Vectors of a text's tokens: a list of them, or the values one after the other."""
        return await aside(partial(self._rows, vector, size), _BYTES_PER_VALUE * len(vector))

    def _rows(self, vector: list[float], size: int) -> bytes:
        rows = (
            shortened(vector[at : at + size], self.dimensions, self.is_normalized)
            for at in range(0, len(vector), size)
        )
        if self.encoding in (None, "float"):
            return bytes(encoded(rows, max(_VALUES_PER_CALL // size, 1)))
        return self._written([value for row in rows for value in row])

    def _written(self, vector: list[float]) -> bytes:
        if self.encoding in (None, "float"):
            return _json(vector)
        data = packed(vector, self.dtype, self.endianness)
        return _json(base64.b64encode(data).decode()) if self.encoding == "base64" else data

    @property
    def value_bytes(self) -> int:
        return len(packed([0.0], self.dtype, self.endianness))
