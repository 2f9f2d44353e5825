"""Outputs for the frontend: a Delta for the tokens that a step yielded, with the logprobs and
embeddings that were requested."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from tidemill.runner.base import StepResult
from tidemill.sched.plan import StepItem, StepPlan
from tidemill.sched.progress import Progress
from tidemill.sched.request import Request
from tidemill.types.model_config import ModelConfig
from tidemill.types.wire import Delta, Submit, Timings, TokenLogprobs, logprob_pieces


class LiveRequest(msgspec.Struct):
    """A submitted request: its samples that have not ended, and what is known about its prompt so
    far."""

    request_id: str
    is_normalized: bool = True  # an embedding has length 1
    samples: dict[int, int] = {}  # seq to index
    requests: dict[int, Request] = {}  # index to request
    prompt_logprobs: list[TokenLogprobs] = []
    pooled: np.ndarray | None = None

    @staticmethod
    def of(request: Submit, model_config: ModelConfig) -> LiveRequest:
        pooler, is_normalized = model_config.pooler, request.params.is_normalized
        if is_normalized is None:
            is_normalized = pooler is None or pooler.is_normalized
        return LiveRequest(request.request_id, is_normalized)

    def add(self, index: int, request: Request) -> None:
        self.samples[request.seq] = index
        self.requests[index] = request

    def collect(self, item: StepItem, result: StepResult) -> None:
        """Collects the results of a step for a part of the prompt. Repeated results are replaced:
        the request was preempted on the way."""
        entries = result.prompt_logprobs.get(item.row)
        if entries:
            first = next(iter(self.requests.values())).params.prompt_logprobs_start
            self.prompt_logprobs[max(item.start + 1 - first, 0) :] = entries
        part = result.pooled.get(item.row)
        if part is not None:
            pooling = next(iter(self.requests.values())).params.pooling
            if self.pooled is None or item.start == 0 or pooling not in ("mean", "none"):
                self.pooled = part
            elif pooling == "mean":
                self.pooled = self.pooled + part
            else:
                self.pooled = np.concatenate(
                    [self.pooled[: part.size // item.count * item.start], part]
                )

    def delta(self, done: Progress, logprobs: list[TokenLogprobs] | None, now: float) -> Delta:
        request, token_ids = done.request, done.token_ids
        index, num = self.samples[request.seq], request.num_cached
        is_first = len(request.tokens) - request.num_prompt == len(token_ids)
        if not is_first and logprobs is None and done.finish_reason is None:  # nearly all
            if not request.num_held:
                return Delta(self.request_id, index, token_ids, None, None, None, num)
            return Delta(
                self.request_id, index, token_ids, num_cached=num, num_held=request.num_held
            )
        wants_prompt = is_first and request.params.prompt_logprobs is not None and index == 0
        return Delta(
            self.request_id,
            index,
            done.token_ids,
            done.finish_reason,
            logprobs=logprobs[: len(done.token_ids)] if logprobs else None,
            prompt_pieces=logprob_pieces(self.prompt_logprobs) if wants_prompt else None,
            num_cached=request.num_cached,
            num_held=request.num_held,
            timings=Timings(*request.spans(now)) if done.finish_reason else None,
            embedding=self._embedding(request) if is_first else None,
        )

    def _embedding(self, request: Request) -> list[float] | None:
        """Or those of each token, one after the other; or the scores of a cross-encoder."""
        pooling = request.params.pooling
        if self.pooled is None or pooling == "score":
            return None if self.pooled is None else self.pooled.tolist()
        if pooling == "none":
            states = self.pooled.reshape(request.num_prompt, -1)
            sizes = (
                np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-12)
                if self.is_normalized
                else 1.0
            )
            return (states / sizes).ravel().tolist()
        if self.is_normalized:
            return _unit(self.pooled)
        return (self.pooled / (request.num_prompt if pooling == "mean" else 1)).tolist()


def make_deltas(
    plan: StepPlan,
    result: StepResult,
    progress: list[Progress],
    live_of: Mapping[int, LiveRequest],
    now: float,
) -> list[Delta]:
    """`live_of`: by seq. Requests that ended since the step was planned are not there."""
    if result.prompt_logprobs or result.pooled:
        for item in plan.items:
            if item.seq in live_of:
                live_of[item.seq].collect(item, result)
    row_of = {item.seq: item.row for item in plan.items} if result.logprobs else {}
    return [
        live_of[done.request.seq].delta(
            done, result.logprobs.get(row_of[done.request.seq]) if row_of else None, now
        )
        for done in progress
    ]


def _unit(vector: np.ndarray) -> list[float]:
    """The vector scaled to length 1."""
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).tolist()
