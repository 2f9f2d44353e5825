"""The interface of runners: what a step gives back. Loads no torch, so that a simulation can be a
runner, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tidemill.sched.plan import StepItem, StepPlan
from tidemill.sched.tree import depths_of, right_path
from tidemill.types.wire import TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tidemill.kernels.lora import Pair
    from tidemill.runner.page_moves import PageMover


class StepResult(msgspec.Struct):
    """By row: the tokens sampled (a negative one: the sequence failed, its logits are not finite),
    and what was asked about them. More than one where drafts were right."""

    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    pooled: dict[
        int, np.ndarray
    ] = {}  # float64 [H]: the sum over this step's tokens, or the last; [T * H]: each one's
    paths: dict[int, list[int]] = {}  # of drafts that are a tree: which are right
    broken: set[int] = (
        set()
    )  # rows of which a draft, right or wrong, has logits that are not finite

    def token_of(self, row: int, number: int) -> int:
        """The token of a draw of the row that counts; -1: it was drawn after a wrong draft."""
        own, path = self.tokens[row], self.paths.get(row)
        if path is not None and number:
            number = path.index(number - 1) + 1 if number - 1 in path else len(own)
        return own[number] if number < len(own) else -1

    def take_logprobs(self, rows: Sequence[int], entries: Mapping[int, TokenLogprobs]) -> None:
        """`rows`: of every token drawn. `entries`: by its number, what was asked. Those of wrong
        drafts are dropped."""
        for number, entry in sorted(entries.items()):
            row = rows[number]
            own = self.logprobs.setdefault(row, [])
            if row in self.paths and number - rows.index(row) - 1 not in (-1, *self.paths[row]):
                continue
            if len(own) < len(self.tokens[row]):
                own.append(entry)


def draws(
    items: Iterable[StepItem], trees: Mapping[int, list[int]] | None = None
) -> tuple[list[int], list[int]]:
    """Row and position of every token that a step draws. `trees`: see StepPlan."""
    rows, positions = list[int](), list[int]()
    for item in items:
        first = item.start + item.count - item.num_drafts
        rows += [item.row] * item.num_draws
        if trees and item.row in trees:
            positions += [first, *(first + depth for depth in depths_of(trees[item.row]))]
        else:
            positions += range(first, first + item.num_draws)
    return rows, positions


def accept(
    items: Iterable[StepItem],
    drafts: Mapping[int, list[int]],
    drawn: Sequence[int],
    paths: Mapping[int, list[int]] | None = None,
) -> dict[int, list[int]]:
    """By row: the tokens drawn in the places of drafts, for as long as the drafts before them were
    the same, and so what would have been drawn without drafts. `paths`: of those that are trees,
    the right drafts."""
    tokens, at = {}, 0
    for item in items:
        if item.num_draws:
            own, guessed = drawn[at : at + item.num_draws], drafts.get(item.row, ())
            if paths and item.row in paths:
                tokens[item.row] = [own[0], *(own[draft + 1] for draft in paths[item.row])]
            else:
                num_right = next(
                    (i for i in range(item.num_drafts) if own[i] != guessed[i]), item.num_drafts
                )
                tokens[item.row] = list(own[: num_right + 1])
            at += item.num_draws
    return tokens


def right_drafts(
    items: Iterable[StepItem],
    drafts: Mapping[int, list[int]],
    trees: Mapping[int, list[int]],
    drawn: Sequence[int],
) -> dict[int, list[int]]:
    """By row, which drafts of its tree are right."""
    paths, at = {}, 0
    for item in items:
        if item.row in trees and item.num_draws:
            paths[item.row] = right_path(
                drafts[item.row], trees[item.row], drawn[at : at + item.num_draws]
            )
        at += item.num_draws
    return paths


def broken_rows(items: Iterable[StepItem], drawn: Sequence[int]) -> set[int]:
    """The rows with drafts in which some token drawn, counting or not, shows logits that are not
    finite."""
    rows, at = set(), 0
    for item in items:
        if item.num_drafts and min(drawn[at : at + item.num_draws]) < 0:
            rows.add(item.row)
        at += item.num_draws
    return rows


def read_draws(items: Sequence[StepItem], plan: StepPlan, drawn: Sequence[int]) -> StepResult:
    """The tokens that items got, from all tokens drawn for them."""
    paths = right_drafts(items, plan.drafts, plan.trees, drawn) if plan.trees else {}
    tokens = accept(items, plan.drafts, drawn, paths)
    return StepResult(tokens, paths=paths, broken=broken_rows(items, drawn))


def join(parts: Sequence[StepResult]) -> StepResult:
    """The results of a step's micro-batches, together in the first."""
    result, *others = parts
    for part in others:
        result.tokens |= part.tokens
        result.logprobs |= part.logprobs
        result.prompt_logprobs |= part.prompt_logprobs
        result.pooled |= part.pooled
        result.paths |= part.paths
        result.broken |= part.broken
    return result


class Ranks(Protocol):
    """The processes of a runner that is more than one."""

    alarm: int  # a file descriptor, readable once one of them is lost

    def check(self) -> None:
        """Raises WorkerLost if one is."""
        ...

    def close(self) -> None: ...


class AdapterSlots(Protocol):
    """The slots of adapters, for the rows that use them."""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the matrices that an adapter may change."""
        ...

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """An adapter, by names of stored matrices; nothing, to free the slot's memory."""
        ...


class Runner(Protocol):
    """Executes StepPlans in the order they are launched, and gives their results back in that
    order."""

    steps_ahead: int  # steps that may be launched before the results of the first are collected
    fallback: str  # why slower code runs than is there for this machine, or empty
    mover: PageMover | None  # if there are tiers behind the KV cache

    @property
    def loras(self) -> AdapterSlots | None:
        """Adapters, if there may be any."""
        ...

    @property
    def cache(self) -> torch.Tensor:
        """Page by page."""
        ...

    def launch(self, plan: StepPlan) -> Any: ...

    def change_pages(self, plan: StepPlan) -> None:
        """Applies the page changes of a plan that computes nothing."""
        ...

    def collect(self, launched: Any) -> StepResult: ...
