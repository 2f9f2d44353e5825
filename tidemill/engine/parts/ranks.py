"""RankProcesses: the further processes of a runner that is more than one."""

from __future__ import annotations

from tidemill.engine.moments import Engine, EngineComponents, Part
from tidemill.runner.base import Ranks


class RankProcesses(Part):
    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> RankProcesses | None:
        return None if components.ranks is None else cls(components.ranks)

    def check(self) -> None:
        self._ranks.check()

    def alarms(self) -> tuple[int]:
        return (self._ranks.alarm,)

    def close(self) -> None:
        self._ranks.close()
