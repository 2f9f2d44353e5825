"""The messages between rank 0 of a group and its workers, as MessagePack."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from tidemill.config import EngineConfig, EngineOptions
from tidemill.distributed.channel import Address
from tidemill.distributed.world import World
from tidemill.kv.tiers import Moved
from tidemill.runner.base import StepResult
from tidemill.sched.plan import StepPlan
from tidemill.types.wire import TokenLogprobs


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From a worker, first."""

    version: str
    kernels: str  # compiled for which instructions, and from which sources
    address: Address  # where other workers reach it
    rank: int = -1  # that it was started as, if it was


class Join(msgspec.Struct, frozen=True, tag=True):
    """To a worker: which it is, and what to load."""

    rank: int
    world: World
    options: EngineOptions
    config: EngineConfig
    model: bytes  # fingerprint
    addresses: list[Address]  # of all ranks
    shared: str = ""  # a file of shared memory of its stage, or empty: by sockets


class Loading(msgspec.Struct, frozen=True, tag=True):
    done_bytes: int
    total_bytes: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Weights are there, and so are channels to others."""

    read_bytes: int


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """All are loaded: make the runner. Ranks compute trial steps together meanwhile."""

    weights: bytes = b""  # a digest, if pages of this engine are compared with others


class Prepared(msgspec.Struct, frozen=True, tag=True):
    fallback: str = ""
    shapes: dict[str, tuple[int, int]] = {}  # of the matrices that an adapter may change
    no_disk: str = ""  # why its pages on disk cannot be used


class SentPair(msgspec.Struct, frozen=True):
    """A part of an adapter: for one stored matrix, float32."""

    rank: int
    down: bytes
    up: bytes
    scale: float


class PutAdapter(msgspec.Struct, frozen=True, tag=True):
    """Into a slot, from the next step on. Without pairs, the slot becomes free."""

    slot: int
    pairs: dict[str, SentPair]


class Drawn(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a row got in a step, and the position of the first."""

    row: int
    position: int
    token_ids: list[int]


class Step(msgspec.Struct, frozen=True, tag=True):
    plan: StepPlan
    drawn_in: int  # the step that was collected last
    drawn: list[Drawn]  # in that one


class Change(msgspec.Struct, frozen=True, tag=True):
    """A plan that computes nothing."""

    plan: StepPlan


class Result(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """StepResult, from the rank that samples."""

    step: int
    tokens: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    pooled: dict[int, bytes] = {}
    paths: dict[int, list[int]] = {}
    broken: list[int] = []

    @staticmethod
    def of(step: int, result: StepResult) -> Result:
        pooled = {row: values.tobytes() for row, values in result.pooled.items()}
        named = result.tokens, result.logprobs, result.prompt_logprobs, pooled, result.paths
        return Result(step, *named, sorted(result.broken))

    def read(self) -> StepResult:
        pooled = {row: np.frombuffer(values, np.float64) for row, values in self.pooled.items()}
        return StepResult(
            self.tokens, self.logprobs, self.prompt_logprobs, pooled, self.paths, set(self.broken)
        )


class TakeTimes(msgspec.Struct, frozen=True, tag=True):
    """A request for the times of the worker's layers since the last such request. The first one
    begins the measurement."""


class TookTimes(msgspec.Struct, frozen=True, tag=True):
    seconds: dict[int, float]  # by the number of a layer, or as runner/layer_timer.py has it


class PageMoved(msgspec.Struct, frozen=True, tag=True):
    moved: Moved


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker ends."""

    error: str  # class name in tidemill.errors
    message: str
    fix: str = ""
    param: str | None = None


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The group ends in good order."""


FromWorker: TypeAlias = (
    Hello | Loading | Loaded | Prepared | Result | TookTimes | PageMoved | Failed
)
ToWorker: TypeAlias = Join | Prepare | PutAdapter | Step | Change | TakeTimes | Stop | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
