"""Beam search: the sequences of one request that are computed side by side, and which of them go
on.

After each step the beams of a request are ranked with all their likeliest next tokens, as
Transformers ranks them. Each of the best continues a beam: the first that continues it keeps its
sequence, any other is a fork of it, and beams that none continues are dropped. A beam is held by
the scheduler from its token until that choice, so that beams may be computed in different steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tidemill.engine.moments import Engine, EngineComponents, Part, Step, Submission
from tidemill.engine.outputs import LiveRequest
from tidemill.errors import InvalidRequest
from tidemill.sched.request import Request
from tidemill.types import events
from tidemill.types.sampling import MAX_LOGPROBS, Beams, SamplingParams
from tidemill.types.wire import Delta, Resumed, Submit, Timings, TokenLogprobs


@dataclass(slots=True)
class Beam:
    total: float = 0.0  # of log-probabilities, less penalties
    tokens: list[TokenLogprobs] = field(default_factory=list)  # its output


@dataclass(frozen=True, slots=True)
class Output:
    score: float
    tokens: list[TokenLogprobs]
    finish_reason: str


class BeamSearch:
    """The beams of one request. Knows their tokens, and nothing of the engine."""

    def __init__(
        self,
        settings: Beams,
        ends: frozenset[int],
        max_tokens: int,
        min_tokens: int = 0,
        num_top: int = 0,
    ) -> None:
        """`num_top`: likeliest tokens that are kept beside each token of the output."""
        self._how, self._ends = settings, ends
        self._max_tokens, self._min_tokens, self._num_top = max_tokens, min_tokens, num_top
        self.beams = [Beam()]  # best first
        self.outputs: list[Output] = []  # complete ones, best first, at most as many as beams

    @property
    def num_output(self) -> int:
        return len(self.beams[0].tokens)

    def advance(
        self, tops: Sequence[TokenLogprobs], penalties: Mapping[int, float] | None = None
    ) -> list[int]:
        """`tops`: of each beam, the likeliest next tokens. `penalties`: by token, what is taken off
        its log-probability. Returns which of the beams before each of the next continues; empty:
        the search is over."""
        length, width = self.num_output + 1, self._how.width
        ranked = self._ranked(tops, length, penalties or {})
        for total, beam, token, logprob in ranked[:width]:
            if token in self._ends or length == self._max_tokens:
                reason = "stop" if token in self._ends else "length"
                tokens = [*self.beams[beam].tokens, self._entry(tops[beam], token, logprob)]
                self.outputs.append(Output(self._score(total, length), tokens, reason))
        self.outputs = sorted(self.outputs, key=lambda output: -output.score)[:width]
        going = (
            [candidate for candidate in ranked if candidate[2] not in self._ends][:width]
            if length < self._max_tokens
            else []
        )
        if not going or not self._may_improve(going[0][0], length):
            return []
        self.beams = [
            Beam(total, [*self.beams[beam].tokens, self._entry(tops[beam], token, logprob)])
            for total, beam, token, logprob in going
        ]
        return [beam for _, beam, _, _ in going]

    def _ranked(
        self, tops: Sequence[TokenLogprobs], length: int, penalties: Mapping[int, float]
    ) -> list[tuple[float, int, int, float]]:
        """Total, beam, token and its log-probability, best first."""
        barred = self._ends if length <= self._min_tokens else frozenset()
        candidates = [
            (beam.total + (logprob - penalties.get(token, 0.0)), number, token, logprob)
            for number, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
            for token, logprob in top.top
            if token not in barred
        ]
        return sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))

    def _entry(self, top: TokenLogprobs, token: int, logprob: float) -> TokenLogprobs:
        return TokenLogprobs(token, logprob, top.top[: self._num_top])

    def _score(self, total: float, length: int) -> float:
        return total / length**self._how.length_penalty

    def _may_improve(self, best: float, length: int) -> bool:
        """A beam may still become better than the worst of the outputs. `best`: total of the best
        beam."""
        settings = self._how
        if len(self.outputs) < settings.width:
            return True
        if settings.early_stopping is True or settings.width == 1:
            return False
        reached = (
            self._max_tokens
            if settings.early_stopping == "never" and settings.length_penalty > 0
            else length
        )
        return self._score(best, reached) > self.outputs[-1].score


class BeamGroups:
    """Diverse beam search: a search of its own for each group of beams. In each step groups choose
    in turn, and a token that beams of earlier groups have just chosen costs a penalty for each of
    them."""

    def __init__(
        self,
        settings: Beams,
        ends: frozenset[int],
        max_tokens: int,
        min_tokens: int = 0,
        num_top: int = 0,
    ) -> None:
        self._how = settings
        own = msgspec.structs.replace(settings, width=settings.width // settings.groups)
        self._groups = [
            BeamSearch(own, ends, max_tokens, min_tokens, num_top) for _ in range(settings.groups)
        ]
        self._going = self._groups  # those that are not over
        self._has_begun = False

    @property
    def beams(self) -> list[Beam]:
        """The beams of all groups; before the first token, they have one in common."""
        return (
            [beam for group in self._going for beam in group.beams] if self._has_begun else [Beam()]
        )

    @property
    def outputs(self) -> list[Output]:
        found = [output for group in self._groups for output in group.outputs]
        return sorted(found, key=lambda output: -output.score)[: self._how.width]

    @property
    def num_output(self) -> int:
        return len(self.beams[0].tokens)

    def advance(self, tops: Sequence[TokenLogprobs]) -> list[int]:
        """Advances all groups; the same as `BeamSearch.advance`, over the beams of all groups."""
        parents, going, first = list[int](), list[BeamSearch](), 0
        chosen = Counter[int]()
        for group in self._going:
            num = len(group.beams)
            penalties = {
                token: self._how.diversity_penalty * times for token, times in chosen.items()
            }
            if own := group.advance(tops[first : first + num], penalties):
                parents += [first + parent for parent in own]
                going.append(group)
                chosen.update(beam.tokens[-1].token_id for beam in group.beams)
            first += num if self._has_begun else 0
        self._going, self._has_begun = going, True
        return parents


@dataclass(slots=True)
class _Search:
    """A beam search in the engine."""

    live: LiveRequest
    choice: BeamSearch | BeamGroups
    requests: list[Request]  # by beam
    indices: list[int]  # of the outputs that are asked for
    has_logprobs: bool
    # by seq: of beams that wait for the others
    tops: dict[int, TokenLogprobs] = field(default_factory=dict)


class BeamSearches(Part):
    """All beam searches of an engine."""

    def __init__(self) -> None:
        self._of: dict[int, _Search] = {}  # by seq

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> BeamSearches:
        return cls()

    def submit(self, submission: Submission) -> None:
        """Beams begin as one sequence, also if they had begun before."""
        request, vocab_size = submission.request, self.engine.model_config.vocab_size
        if request.params.beams is None:
            return
        self._check(request.params.beams.width, len(ends_of(request, vocab_size)))
        submission.params = params_of_a_beam(request, vocab_size)
        submission.resumed = request.resumed and [Resumed(0, [])]

    def _check(self, width: int, num_ends: int) -> None:
        """Raises what the engine cannot do."""
        num_rows = self.engine.config.max_requests
        most = min(MAX_LOGPROBS, self.engine.model_config.vocab_size)
        if width > num_rows:
            raise InvalidRequest(
                f"A beam search of width {width} needs as many slots; the engine has {num_rows}.",
                fix="Use fewer beams, or a larger --max-requests.",
                param="beam_width",
            )
        if width + num_ends > most:
            raise InvalidRequest(
                f"{width} beams and {num_ends} tokens that end an output; together there may be {most}.",
                fix="Use fewer beams or fewer stop_token_ids, or set ignore_eos.",
                param="beam_width",
            )

    def queued(self, submission: Submission, live: LiveRequest) -> None:
        request, params, beams = (
            submission.request,
            submission.request.params,
            submission.request.params.beams,
        )
        if beams is None:
            return
        (first,) = live.requests.values()
        kind = BeamSearch if beams.groups == 1 else BeamGroups
        ends = ends_of(request, self.engine.model_config.vocab_size)
        choice = kind(beams, ends, first.max_tokens, params.min_tokens, params.logprobs or 0)
        indices = (
            list(range(params.n))
            if request.resumed is None
            else [each.index for each in request.resumed]
        )
        self._of[first.seq] = _Search(live, choice, [first], indices, params.logprobs is not None)

    def progress(self, step: Step) -> None:
        """Advances the searches whose beams are all computed. Their outputs are told when they are
        over."""
        if not self._of:
            return
        others, ready = [], list[_Search]()
        for item in step.progress:
            search = self._of.get(item.request.seq)
            if search is None:
                others.append(item)
                continue
            step.num_withheld += len(item.token_ids)
            search.tops[item.request.seq] = step.result.logprobs[item.request.row][-1]
            if len(search.tops) == len(search.requests):
                ready.append(search)
        step.progress, now = others, self.engine.clock.now()
        for search in ready:
            step.deltas += self._advance(search, now)

    def cut_short(self, request_id: str, index: int | None, is_broken: bool) -> None:
        """The one that is left stands for all."""
        live = self.engine.live.get(request_id)
        for request in list(live.requests.values())[1:] if live is not None and self._of else ():
            if request.seq in self._of:
                if is_broken:
                    self.engine.scheduler.table.clear(request)
                self._drop(request)

    def end(self, live: LiveRequest, request: Request) -> None:
        self._of.pop(request.seq, None)

    # ---- inside

    def _advance(self, search: _Search, now: float) -> list[Delta]:
        before = search.requests
        tops = [search.tops[request.seq] for request in before]
        parents = search.choice.advance(tops)
        if not parents:
            return self._end(search, now)
        search.tops.clear()
        self._reorder(search, parents)
        num_output = search.choice.num_output
        if parents != list(range(len(before))):
            num_finished = len(search.choice.outputs)
            self.engine.emit(
                events.BeamsReordered(
                    now, search.live.request_id, num_output, tuple(parents), num_finished
                )
            )
        if num_output > 1:
            return []
        # it has begun
        return [
            Delta(search.live.request_id, search.indices[0], [], num_cached=before[0].num_cached)
        ]

    def _reorder(self, search: _Search, parents: list[int]) -> None:
        """Gives the beams of the next token their rows. A dropped beam leaves its row before a fork
        takes one. Forks come before the tokens of their sources."""
        before, continued = search.requests, set[int]()
        for number, request in enumerate(before):
            if number not in parents:
                self._drop(request)
        search.requests = []
        for parent in parents:
            request = before[parent]
            if parent in continued:
                request = self.engine.scheduler.table.fork(request, request.request_id)
                self._of[request.seq] = search
                self.engine.adopt(search.live, request)
            continued.add(parent)
            search.requests.append(request)
        for request, beam in zip(search.requests, search.choice.beams, strict=True):
            self.engine.scheduler.table.choose(request, beam.tokens[-1].token_id)

    def _end(self, search: _Search, now: float) -> list[Delta]:
        first, *rest = search.requests
        deltas = [
            Delta(
                search.live.request_id,
                index,
                [token.token_id for token in output.tokens],
                output.finish_reason,
                logprobs=output.tokens if search.has_logprobs else None,
                num_cached=first.num_cached,
                timings=Timings(*first.spans(now)),
                score=output.score,
            )
            for index, output in enumerate(search.choice.outputs)
            if index in search.indices
        ]
        for request in rest:
            self._drop(request)
        self.engine.scheduler.table.finish(first, search.choice.outputs[0].finish_reason)
        self.engine.end(first.seq)
        return deltas

    def _drop(self, request: Request) -> None:
        self.engine.scheduler.table.drop(request)
        self.engine.end(request.seq)


def ends_of(request: Submit, vocab_size: int) -> frozenset[int]:
    """Tokens that end an output."""
    ends = () if request.params.ignore_eos else request.eos_token_ids
    return frozenset(
        (*(token for token in ends if 0 <= token < vocab_size), *request.params.stop_token_ids)
    )


def params_of_a_beam(request: Submit, vocab_size: int) -> SamplingParams:
    """Each step reports as many candidates as the next beams can come from: all of them may
    continue one beam, and a token that ends an output continues none. In a group there are fewer
    beams, by as many as other groups have tokens to penalize."""
    params = request.params
    assert params.beams is not None
    num_candidates = params.beams.width + len(ends_of(request, vocab_size))
    return SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=params.max_tokens,
        logprobs=num_candidates,
        ignore_eos=True,
        beams=params.beams,
    )
