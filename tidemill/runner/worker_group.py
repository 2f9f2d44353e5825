"""WorkerGroup: several processes that compute one model, as one Runner. Rank 0 is in this process;
all get the same plans.

A rank that fails or ends takes the group down: its engine ends and is replaced, and requests go on
there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from tidemill.errors import TidemillError, WorkerLost
from tidemill.layers.lora import Loras
from tidemill.runner.base import AdapterSlots, Runner, StepResult
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.group_loras import GroupLoras
from tidemill.runner.group_moves import GroupMover
from tidemill.runner.layer_timer import EMBEDDING, LayerTimer
from tidemill.runner.page_moves import PageMover
from tidemill.runner.state import RowState
from tidemill.runner.team import Team
from tidemill.runner.worker_messages import Change, Drawn, Step, TakeTimes, TookTimes
from tidemill.sched.plan import StepItem, StepPlan


class RankRunner(Runner, Protocol):
    """A rank's own runner."""

    state: RowState


class Launched(NamedTuple):
    plan: StepPlan
    drawing: list[StepItem]
    own: Any  # what the rank's own runner gave


def launch(runner: RankRunner, plan: StepPlan) -> Launched:
    launched = runner.launch(plan)
    return Launched(
        plan,
        [item for item in plan.items if item.samples and not runner.state.is_pooled(item.row)],
        launched,
    )


def drawn_in(launched: Launched, result: StepResult) -> list[Drawn]:
    """The tokens that the rows of a step got."""
    items = [item for item in launched.drawing if item.row in result.tokens]
    return [
        Drawn(item.row, item.start + item.count - item.num_drafts, result.tokens[item.row])
        for item in items
    ]


@torch.inference_mode()
def append(state: RowState, drawn: list[Drawn]) -> None:
    """Appends the tokens that others sampled, in a stage that does not sample."""
    rows = [one.row for one in drawn for _ in one.token_ids]
    positions = [one.position + i for one in drawn for i in range(len(one.token_ids))]
    tokens = [token for one in drawn for token in one.token_ids]
    if tokens:
        state.append(torch.tensor(rows), torch.tensor(positions), torch.tensor(tokens))


class WorkerGroup:
    def __init__(
        self,
        own: RankRunner,
        team: Team,
        lora_shapes: dict[str, tuple[int, int]] | None = None,
        no_disk: str = "",
    ) -> None:
        """`own`: of rank 0. `lora_shapes`: of the matrices that adapters may change on other ranks.
        `no_disk`: why one of them cannot use its pages on disk, so that none does."""
        self.own, self.team, self.alarm, self.steps_ahead = own, team, team.alarm, own.steps_ahead
        self.fallback, self.cache, self.no_disk = own.fallback, own.cache, no_disk
        self._mover: GroupMover | None = None
        self._loras = None
        if isinstance(own.loras, Loras):
            self._loras = GroupLoras(own.loras, team, own.loras.shapes | (lora_shapes or {}))
        self._samples = team.world.sampler == 0
        self._drawn_in, self._drawn = -1, list[Drawn]()
        self._timer: LayerTimer | None = None

    @property
    def mover(self) -> PageMover | None:
        return self._mover

    @mover.setter
    def mover(self, own: PageMover | None) -> None:
        """`own`: of rank 0's pages; the others have theirs."""
        self.own.mover, team = own, self.team
        self._mover = (
            None if own is None else GroupMover(own, team.world.size, lambda: team.lost is not None)
        )
        if self._mover is not None:
            team.on_moved = self._mover.take
            team.on_lost.append(self._mover.wake)

    def _expect_moves(self, plan: StepPlan) -> None:
        if self._mover is not None:
            self._mover.expect(plan.page_moves)

    @property
    def loras(self) -> AdapterSlots | None:
        return self._loras

    def launch(self, plan: StepPlan) -> Launched:
        self.team.check()
        self._expect_moves(plan)
        self.team.send_all(Step(plan, self._drawn_in, self._drawn))
        try:
            return launch(self.own, plan)
        except BaseException as error:
            self._give_up(error)

    def collect(self, launched: Launched) -> StepResult:
        try:
            own = self.own.collect(launched.own)
            self.team.check()  # what was computed without a rank that is gone is of no use
            result = own if self._samples else self.team.result(launched.plan.step).read()
        except BaseException as error:
            self._give_up(error)
        self._drawn_in, self._drawn = launched.plan.step, drawn_in(launched, result)
        if not self._samples:
            append(self.own.state, self._drawn)
        return result

    def change_pages(self, plan: StepPlan) -> None:
        self.team.check()
        self._expect_moves(plan)
        self.team.send_all(Change(plan))
        try:
            self.own.change_pages(plan)
        except BaseException as error:
            self._give_up(error)

    def take_times(self) -> dict[int, float]:
        """Seconds that layers took on a CPU since the last call, by number or as `layer_timer` has
        it. From the first call on they are measured."""
        assert isinstance(self.own, CpuRunner)
        self.team.send_all(TakeTimes())
        self._timer = self._timer or self.own.time_layers()
        seconds = self._timer.take()
        for took in self.team.wait(TookTimes).values():
            for unit, spent in took.seconds.items():
                if unit != EMBEDDING:  # where others wait for hidden states
                    seconds[unit] = max(spent, seconds.get(unit, 0.0))  # of ranks that share it
        return seconds

    def check(self) -> None:
        """Raises if a worker is lost."""
        self.team.check()

    def close(self) -> None:
        self.team.close()

    def _give_up(self, error: BaseException) -> NoReturn:
        """The ranks are not at the same point any more."""
        what = (
            error.message
            if isinstance(error, TidemillError)
            else f"rank 0 failed: {type(error).__name__}: {error}"
        )
        self.team.fail(WorkerLost(what))
        if not isinstance(error, Exception):
            raise error
        assert self.team.lost is not None
        raise WorkerLost(self.team.lost.message) from error
