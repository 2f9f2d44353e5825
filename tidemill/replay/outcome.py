"""The outcome of a request that was computed again, and the certificate of all of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

from tidemill.record.format import Output, digest_of, encode, encode_end, ids_of
from tidemill.record.reader import RecordedRequest
from tidemill.types.wire import Delta

_MOST_SHOWN = 20  # differences


@dataclass(slots=True)
class Sample:
    """The output of one sample as it is computed again, as far as the recorded one goes."""

    recorded: array[int]
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    begin: bytes = b""  # log-probabilities of the prompt
    values: list[bytes] = field(default_factory=list)  # of each token, if they were asked for
    end: bytes = b""  # an embedding or a score
    is_filled: bool = False  # some tokens are the recorded ones

    def take(self, delta: Delta) -> None:
        self.begin += b"".join(map(bytes, delta.prompt_pieces or ()))
        self.values += [encode(entry) for entry in delta.logprobs or ()]
        self.end += encode_end(delta)
        self.ids += delta.token_ids
        self.finish_reason = delta.finish_reason or self.finish_reason

    def resume(self, num: int) -> list[int]:
        """It goes on after so many tokens, which a client had. Returns them; those that are missing
        are taken as recorded."""
        self.is_filled |= len(self.ids) < num
        self.ids = [*self.ids[:num], *self.recorded[len(self.ids) : num]]
        del self.values[num:]
        self.finish_reason = None
        return list(self.ids)

    def digest(self) -> bytes:
        """The digest as it is recorded of the tokens that are recorded; empty if it cannot be
        known."""
        values = b"".join(self.values[: len(self.recorded)])
        return b"" if self.is_filled else digest_of(self.begin + values + self.end)

    @property
    def is_complete(self) -> bool:
        """It has all tokens of the recorded one."""
        return self.finish_reason is not None or len(self.ids) >= len(self.recorded)


@dataclass(slots=True)
class Running:
    """A request that is computed again."""

    request: RecordedRequest
    samples: list[Sample]
    ends_early: bool  # its client went away, or it failed
    refused: str = ""  # by the engine, or it failed there
    is_elsewhere: bool = False  # it goes on in another engine
    is_leaving: bool = False  # it ends when it has the recorded tokens

    @property
    def is_complete(self) -> bool:
        return all(sample.is_complete for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a sample."""

    request: int  # its number in the recording
    request_id: str
    sample: int
    what: str  # token, length, finish reason, log-probabilities, refusal
    position: int = 0
    recorded: int | str | None = None
    replayed: int | str | None = None
    # Log-probabilities of the two tokens there in this build, before sampling.
    recorded_logprob: float | None = None
    replayed_logprob: float | None = None

    @property
    def margin(self) -> float | None:
        if self.recorded_logprob is None or self.replayed_logprob is None:
            return None
        return self.replayed_logprob - self.recorded_logprob

    def line(self) -> str:
        where = f"request {self.request} ({self.request_id}), sample {self.sample}"
        if self.what != "token":
            return f"{where}: {self.what}: {self.recorded} recorded, {self.replayed} now"
        margin = (
            ""
            if self.margin is None
            else f"; log-probabilities {self.recorded_logprob:.6f} and {self.replayed_logprob:.6f}"
        )
        margin += "" if self.margin is None else f", a margin of {self.margin:+.6f}"
        return (
            f"{where}: token {self.position} is {self.replayed}, recorded {self.recorded}{margin}"
        )


def difference(
    request: RecordedRequest, index: int, sample: Sample, tokens_only: bool
) -> Difference | None:
    """Compares a sample with the recorded one."""
    assert request.ended is not None
    output = request.ended.outputs[index]
    where = request.number, request.request_id, index
    same = sum(
        1
        for _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(sample.recorded, sample.ids, strict=False)
        )
    )
    if same < len(sample.recorded):
        now = sample.ids[same] if same < len(sample.ids) else None
        return Difference(*where, "token", same, sample.recorded[same], now)
    if is_whole(request, output):
        if len(sample.ids) != len(sample.recorded):
            return Difference(*where, "length", same, len(sample.recorded), len(sample.ids))
        if sample.finish_reason != output.finish_reason:
            return Difference(
                *where, "finish reason", same, output.finish_reason, sample.finish_reason
            )
    if tokens_only or not output.digest:
        return None
    digest = sample.digest()
    if digest != output.digest and not sample.is_filled:
        return Difference(
            *where, "log-probabilities or embeddings", same, output.digest.hex(), digest.hex()
        )
    return None


def is_whole(request: RecordedRequest, output: Output) -> bool:
    """The engine ended it, not its client, nor a stop string."""
    assert request.ended is not None
    return not request.ended.error and not output.by_text and output.finish_reason is not None


@dataclass(slots=True)
class StepTimes:
    """Steps of one kind, then and now."""

    num: int = 0
    then_s: float = 0.0
    now_s: float = 0.0


@dataclass(slots=True)
class Certificate:
    recording: str
    mode: str
    build_then: str
    build_now: str
    machine_then: dict[str, Any]
    machine_now: dict[str, Any]
    options: dict[str, str] = field(default_factory=dict)  # other ones than recorded
    notes: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_compared: int = 0
    num_tokens: int = 0
    num_equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    # requests that were not compared, by reason
    left_out: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0  # like then
    num_equal_steps: int = 0  # of which the batch was the same
    steps: dict[str, StepTimes] = field(default_factory=dict)
    took_s: float = 0.0

    @property
    def is_equal(self) -> bool:
        return self.num_compared > 0 and self.num_equal == self.num_compared

    def leave_out(self, why: str, num: int = 1) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + num

    def add(self, running: Running, tokens_only: bool = False) -> list[Difference]:
        """Compares a request that was computed again. Returns what differs."""
        request, samples = running.request, running.samples
        self.num_compared += 1
        self.num_tokens += sum(len(sample.recorded) for sample in samples)
        if running.refused:
            return [
                Difference(
                    request.number, request.request_id, 0, "refusal", 0, "none", running.refused
                )
            ]
        found = [
            difference(request, index, sample, tokens_only) for index, sample in enumerate(samples)
        ]
        differences = [each for each in found if each is not None]
        self.num_equal += not differences
        return differences

    def body(self) -> dict[str, Any]:
        return asdict(self) | {"is_equal": self.is_equal}

    def lines(self) -> Iterable[str]:
        verdict = (
            "all equal"
            if self.is_equal
            else "DIFFERENT"
            if self.num_compared
            else "nothing was compared"
        )
        yield f"{self.mode}: {self.num_equal:,} of {self.num_compared:,} requests equal, {self.num_tokens:,} tokens: {verdict}"
        yield f"recorded by {self.build_then} ({_shown(self.machine_then)})"
        yield f"computed by {self.build_now} ({_shown(self.machine_now)})"
        for name, value in self.options.items():
            yield f"with {name} = {value}"
        for why, num in self.left_out.items():
            yield f"not compared: {num:,} {'request' if num == 1 else 'requests'}: {why}"
        if self.num_steps:
            yield f"{self.num_equal_steps:,} of {self.num_steps:,} steps had the recorded batch"
        for kind, times in self.steps.items():
            per_step = (
                1000 * times.then_s / max(times.num, 1),
                1000 * times.now_s / max(times.num, 1),
            )
            ratio = times.now_s / times.then_s if times.then_s else 0.0
            yield f"{kind}: {times.num:,} steps of {per_step[0]:.2f} ms then, {per_step[1]:.2f} ms now ({ratio:.2f} times)"
        yield from self.notes
        tokens = [found for found in self.differences if found.what == "token"]
        others = [found for found in self.differences if found.what != "token"]
        for what, num in Counter(found.what for found in self.differences).items():
            yield f"different {what}: {num:,} {'sample' if num == 1 else 'samples'}"
        shown = [*tokens, *others][:_MOST_SHOWN]
        yield from (found.line() for found in shown)
        if len(self.differences) > len(shown):
            yield f"and {len(self.differences) - len(shown):,} more, which --json has"


def _shown(machine: dict[str, Any]) -> str:
    return f"{machine.get('cpu', '')}, {machine.get('cores', 0)} cores"


def samples_of(request: RecordedRequest) -> list[Sample]:
    if request.ended is None:
        return [Sample(array("I")) for _ in range(request.begun.request.params.n)]
    return [Sample(ids_of(output.ids)) for output in request.ended.outputs]
