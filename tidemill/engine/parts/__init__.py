"""The parts of an engine: one file each. A new one is a file and a line in `PARTS`."""

from __future__ import annotations

from tidemill.engine.moments import Engine, EngineComponents, Part
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.engine.parts.beams import BeamSearches
from tidemill.engine.parts.deferred import DeferredFinishes
from tidemill.engine.parts.drafting import Drafting
from tidemill.engine.parts.inputs import RequestInputs
from tidemill.engine.parts.kv_policies import KVPolicies
from tidemill.engine.parts.ranks import RankProcesses
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.engine.parts.tiers import PageMoves
from tidemill.engine.parts.usage import UsageCounts

PARTS: tuple[type[Part], ...] = (  # in the order in which each moment reaches them
    RequestInputs,
    KVPolicies,
    AdapterStore,
    PageMoves,  # before the finishes that wait for moves; it closes while the ranks are there
    DeferredFinishes,
    RankProcesses,
    StructuredOutput,
    BeamSearches,
    UsageCounts,
    Drafting,  # drafts follow the tokens that all others have left
)


def make_parts(engine: Engine, components: EngineComponents) -> list[Part]:
    """The parts that this engine needs, in their order. Those that are there already and that this
    room does not know come last."""
    ready = {type(part): part for part in components.parts}
    made = [ready.pop(kind) if kind in ready else kind.of(engine, components) for kind in PARTS]
    return [part for part in (*made, *ready.values()) if part is not None]
