"""Pending: a request under way, as its client knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tidemill.engine.inbox import Inbox
from tidemill.errors import EngineDead
from tidemill.sched.request import BACKGROUND
from tidemill.types.wire import PromptProgress, Resumed, Submit

# the reason for which such a request is aborted
GOES_ON = "its engine was lost: it goes on in another"


class EngineLost(EngineDead):
    """The engine of a request has ended, and the request may go on in another. `is_known`: it was
    reported as submitted. `may_have_killed`: it had no token from the engine, which may have been
    lost to it after all."""

    is_known = may_have_killed = False


@dataclass(slots=True)
class Pending:
    """A request under way: what it takes to submit the rest of it again."""

    request: Submit
    inbox: Inbox
    outputs: list[list[int]]  # delivered, by sample
    over: set[int] = field(default_factory=set)  # samples that have ended, here or in the engine
    num_finished: int = 0  # samples of which the engine sends nothing more
    waits_because: str = ""  # it does not get to the engine before `EngineClient.let_in`
    is_submitted: bool = False  # to the current engine
    is_admitted: bool = False  # by it
    has_token: bool = False  # from it
    num_deaths: int = 0  # of engines that may have died of it
    is_known: bool = False  # an engine has reported it as submitted
    tells_accepted: bool = False  # its reader wants to know
    num_prefilled: int = 0  # tokens of its prompt
    progress: PromptProgress | None = None  # told last

    @property
    def is_over(self) -> bool:
        """Nothing more is computed of it; its reader may still be behind."""
        return len(self.over) == len(self.outputs)

    @property
    def trial_rank(self) -> tuple[bool, int, int]:
        """Suspects are tried in this order: the background last, and those that have seen fewer
        deaths first."""
        priority = self.request.priority
        return priority >= BACKGROUND, self.num_deaths, priority

    @property
    def may_have_killed(self) -> bool:
        """It was computed, or its grammar compiled, without a token so far."""
        return (
            self.is_submitted
            and not self.has_token
            and (self.is_admitted or self.request.params.grammar is not None)
        )

    def again(self) -> Submit:
        if not self.is_known:
            return self.request
        left = [Resumed(i, tokens) for i, tokens in enumerate(self.outputs) if i not in self.over]
        return msgspec.structs.replace(self.request, resumed=left)


def names_of(request: Submit) -> list[str]:
    """The names of the request's samples, in the form that events have."""
    if request.params.n == 1 or request.params.beams:
        return [request.request_id]
    return [f"{request.request_id}:{index}" for index in range(request.params.n)]
