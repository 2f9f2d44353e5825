"""Parts take part in the moments of the engine's loop, in their order."""

import gc
import weakref

from tests.helpers import greedy, load_model, make_core, run
from tidemill.engine.moments import Moments, Part
from tidemill.engine.parts import PARTS
from tidemill.engine.parts.announcer import Announcer
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.types.events import Admitted
from tidemill.types.wire import Abort, Delta, Finish, Submit


class Witness(Part):
    """Writes down which moments reached it."""

    def __init__(self, name, seen):
        self.name, self.seen, self.delayed_by = name, seen, ""

    def delay(self, submission):
        return self.delayed_by

    def before_plan(self):
        if self.delayed_by == "tell":
            return [Delta("x", 0, [1])]
        return ()


def _watched(moment):
    def watch(self, *arguments):
        self.seen.append((self.name, moment))

    return watch


WATCHED = (
    "submit", "queued", "propose", "fill_plan", "before_launch", "results", "progress", "done", "deltas", "end", "cut_short",
    "step_failed", "close",
)  # fmt: skip
for moment in WATCHED:
    setattr(Witness, moment, _watched(moment))


def watched_core(folder):
    core, seen = make_core(load_model(folder)), []
    core.use(Witness("a", seen), *core.parts, Witness("b", seen))
    return core, seen


def test_moments_come_in_their_order_and_reach_parts_in_theirs(tiny_folder):
    core, seen = watched_core(tiny_folder)
    run(core, {"x": ([1, 2, 3], greedy(1))})
    order = [
        "submit", "queued", "propose", "fill_plan", "before_launch", "results", "progress", "done", "end", "deltas",
    ]  # fmt: skip
    assert seen == [(name, moment) for moment in order for name in "ab"]
    seen.clear()
    core.close()
    assert seen == [("a", "close"), ("b", "close")]


def test_a_part_may_delay_a_request_and_tell_without_a_step(tiny_folder):
    core, seen = watched_core(tiny_folder)
    core.parts[0].delayed_by = "not yet"
    core.submit(Submit("x", [1, 2, 3], greedy(2)))
    assert core.has("x")
    assert core.has_work
    core.step()
    assert not core.live
    assert ("a", "queued") not in seen
    seen.clear()
    core.parts[0].delayed_by = "tell"  # before the plan is made
    output, _ = core.step()
    assert [delta.token_ids for delta in output.deltas] == [[1]]
    assert ("a", "propose") not in seen
    core.parts[0].delayed_by = ""
    core.step()
    assert ("b", "queued") in seen
    core.abort(Abort("x", "test"))
    assert seen[-4:] == [("a", "cut_short"), ("b", "cut_short"), ("a", "end"), ("b", "end")]
    assert not core.has_work


def test_parts_see_that_a_step_failed_and_a_sample_was_finished(tiny_folder, capsys):
    core, seen = watched_core(tiny_folder)
    core.submit(Submit("x", [1, 2, 3], greedy(9)))
    core.step()
    core.finish(Finish("x", 0))
    assert seen[-1] == ("b", "end")
    core.submit(Submit("y", [1, 2, 3], greedy(9)))
    core.runner.launch = lambda plan: 1 / 0
    assert [refused.request_id for refused in core.step()[1]] == ["y"]
    assert seen[-1] == ("b", "step_failed")
    capsys.readouterr()


def test_admitted_requests_are_told_of_before_anything_can_end_the_process(tiny_folder):
    core, seen = watched_core(tiny_folder)
    core.use(Announcer(lambda told: seen.append(("announcer", told))), *core.parts)
    run(core, {"x": ([1, 2, 3], greedy(2))})
    name, told = seen[seen.index(("a", "fill_plan")) - 1]
    assert name == "announcer"
    assert any(isinstance(event, Admitted) for event in told)


def test_a_moment_that_no_part_implements_is_bound_to_none(tiny_folder):
    assert all(bound == () for bound in vars(Moments([Part()])).values())
    core = make_core(load_model(tiny_folder))
    assert {type(part) for part in core.parts} <= set(PARTS)
    assert type(core.part(StructuredOutput)) is StructuredOutput
    assert core.parts_but(StructuredOutput) == [
        part for part in core.parts if type(part) is not StructuredOutput
    ]


def test_memory_is_freed_with_the_core(tiny_folder):
    core = make_core(load_model(tiny_folder))
    ref = weakref.ref(core)
    gc.disable()
    try:
        del core
        assert ref() is None
    finally:
        gc.enable()
