"""Where a request's time went, from events alone: the spans add up to the whole."""

import time

import pytest

from tests import helpers
from tests.helpers import load_model, make_core
from tidemill.engine.parts.drafting import Drafting
from tidemill.sched.request import BACKGROUND
from tidemill.server.http.stopwatch import Stopwatch
from tidemill.server.observe.explain import Explainer, ExplainerOfReplicas
from tidemill.types import events
from tidemill.types.events import EngineRestarted
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Abort, Resumed, Submit


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder)


def run(core, explainer, requests):
    for name, prompt, length in requests:
        core.submit(
            Submit(f"/{name}/0", prompt, SamplingParams(max_tokens=length, ignore_eos=True, seed=1))
        )
    while core.has_work:
        output, failed = core.step()
        assert not failed
        explainer.take(output.events)
    explainer.take(core.take_events())


def check(story):
    told = story.body()
    assert sum(span["percent"] for span in told["spans"]) == pytest.approx(100, abs=0.01)
    assert sum(span["ms"] for span in told["spans"]) == pytest.approx(told["total_ms"], rel=1e-3)
    return {span["span"]: span for span in told["spans"]}


def test_spans_add_up_and_say_why(model):
    explainer = Explainer()
    core = make_core(model, max_requests=2, token_budget=32)
    run(core, explainer, [(f"r{i}", [i + 1] * 40, 6) for i in range(4)])
    for i in range(4):
        (story,) = explainer.find(f"r{i}", None)
        spans = check(story)
        assert story.ended == "length"
        assert story.num_output == 6
        assert "5 steps for 5 tokens" in spans["decode"]["because"]
        assert spans["prefill"]["because"].startswith(("2 steps for 40", "3 steps for 40"))
    (last,) = explainer.find("r3", None)
    assert "all 2 slots are taken" in check(last)["queued"]["because"]
    assert check(last)["decode"]["because"].endswith(" tokens a step")


def test_time_between_steps_and_in_steps_is_divided(model):
    explainer, core = Explainer(), make_core(model, max_requests=4, token_budget=32)
    for i in range(3):
        core.submit(
            Submit(f"/r{i}/0", [i + 1] * 30, SamplingParams(max_tokens=5, ignore_eos=True, seed=1))
        )
    while core.has_work:
        core.host_times.mark("messages")
        output, _ = core.step()
        time.sleep(0.002)
        core.host_times.mark("outputs")
        explainer.take(output.events)
    for i in range(3):
        spans = check(explainer.find(f"r{i}", None)[0])
        for name in ("prefill", "decode", "between steps"):
            parts = {part["part"]: part["ms"] for part in spans[name]["parts"]}
            assert sum(parts.values()) == pytest.approx(spans[name]["ms"], abs=0.01)
        assert parts.keys() >= {"plan", "messages", "outputs", "loop"}
        assert parts["outputs"] >= 2 * 4  # the last step's come after it
        assert {part["part"] for part in spans["decode"]["parts"]} >= {"compute", "commit"}
    assert "outputs" in spans["between steps"]["because"]


def test_other_requests_steps_and_garbage_are_told():
    """One that is admitted, and gets no token in a step of others."""
    explainer = Explainer()

    def planned(at, step, **tokens):
        counts = tuple((f"/{name}/0", num) for name, num in tokens.items())
        explainer.take([events.StepPlanned(at, step, 1, 1, 1, 0, 1, 0, 1, counts)])

    for name in ("a", "b"):
        explainer.take(
            [
                events.Submitted(1.0, f"/{name}/0", 1),
                events.Admitted(1.0, f"/{name}/0", 0, 0, 1, 0.0, ""),
            ]
        )
    planned(1.0, 0, a=1)
    explainer.take([events.StepDone(3.0, 0, 2.0, 1), events.LoopTimed(4.0, gc_s=0.25, idle_s=0.5)])
    planned(4.125, 1, b=1)
    explainer.take([events.Finished(5.0, "/b/0", "length", 1, 1, 0, 0.0, 0.0, 0.0)])
    (story,) = explainer.find("b", None)
    parts = {part["part"]: part["ms"] for part in check(story)["between steps"]["parts"]}
    assert parts == {
        "other requests": 2000,
        "garbage collection": 250,
        "idle": 500,
        "loop": 250,
        "plan": 125,
    }


def test_tenants_whose_turn_it_is_and_priorities_are_told(model):
    explainer, core = Explainer(), make_core(model, max_requests=1, token_budget=64)
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
    for name, tenant, priority in (
        ("a0", "a", 0),
        ("a1", "a", 0),
        ("a2", "a", 0),
        ("b0", "b", 0),
        ("b1", "b", -1),
    ):
        core.submit(Submit(f"{tenant}/{name}/0", [1] * 8, params, tenant=tenant, priority=priority))
    core.submit(Submit("b/later/0", [1] * 8, params, tenant="b", priority=BACKGROUND))
    while core.has_work:
        explainer.take(core.step()[0].events)
    told = {
        name: check(explainer.find(name, None)[0])["queued"]["because"]
        for name in ("a0", "a1", "a2", "b0", "later")
    }
    taken = "all 1 slots are taken"
    assert told["a1"].startswith(
        "behind 1 in the queue, 1 of other tenants went first, whose turn it was, 1 of a"
    )
    assert told["a2"].startswith("behind 2 in the queue, 2 of other tenants went first")
    assert all(taken in told[name] for name in ("a1", "a2", "b0"))
    assert told["later"].startswith("5 that are not in the background went first")


def test_what_is_prepared_before_the_queue_is_told():
    explainer = Explainer()
    explainer.take(
        [events.Preparing(1.0, "/x/0", "its grammar is compiled"), events.Submitted(3.0, "/x/0", 4)]
    )
    explainer.take([events.Admitted(4.0, "/x/0", 0, 0, 4, 1.0, "prefix hit 0 of 4")])
    explainer.take([events.Aborted(5.0, "/x/0", "client left", 0)])
    (story,) = explainer.find("x", None)
    queued = check(story)["queued"]
    assert (queued["ms"], queued["because"]) == (3000, "its grammar is compiled")


def test_each_queued_request_is_told_what_it_waits_for(model):
    """Also those that are admitted in the step in which they become the first of the queue."""
    explainer, core = Explainer(), make_core(model, max_requests=8, token_budget=512)
    for i in range(16):
        core.submit(
            Submit(
                f"/r{i}", [1] * 4, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
            )
        )
    explainer.take(core.step()[0].events)
    taken = "all 8 slots are taken"
    queued = [story for story in explainer.under_way() if story.state == "queued"]
    behind = [f"behind {i} in the queue: {taken}" for i in range(8, 16)]
    assert [story._because("queued", None) for story in queued] == behind
    while core.has_work:
        explainer.take(core.step()[0].events)
    told = [story._because("queued", story.spans["queued"]) for story in explainer._ended.values()]
    assert told[:8] == ["until the next step"] * 8
    assert told[8:] == behind
    run(core, explainer, [("later", [1, 2, 3], 2)])
    (later,) = explainer.find("later", None)
    assert later._because("queued", later.spans["queued"]) == "until the next step"


def test_drafts_are_told(model):
    explainer = Explainer()
    plain = make_core(model, speculate="off")
    answer = helpers.run(
        plain, {"x": ([5] * 20, SamplingParams(max_tokens=20, ignore_eos=True, seed=1))}
    )["x"].tokens
    core = helpers.guess_with(make_core(model), helpers.Guesser({(5,) * 20: answer}, 1.0))
    run(core, explainer, [("r", [5] * 20, 20)])
    (story,) = explainer.find("r", None)
    told = story.body()
    assert told["accepted_tokens"] == told["draft_tokens"] > 12
    steps = 19 - told["accepted_tokens"]
    assert check(story)["decode"]["because"].startswith(
        f"{steps} steps for 19 tokens, alone; {told['draft_tokens']} of"
    )


def test_steps_that_followed_wrong_drafts_are_told(model):
    explainer = Explainer()
    plain = make_core(model, speculate="off")
    answer = helpers.run(
        plain, {"x": ([5] * 20, SamplingParams(max_tokens=40, ignore_eos=True, seed=1))}
    )["x"].tokens
    core = helpers.guess_with(make_core(model), helpers.Guesser({(5,) * 20: answer}, 0.7))
    core.runner.steps_ahead, core.part(Drafting).sure = 1, 1e-30
    run(core, explainer, [("r", [5] * 20, 40)])
    (story,) = explainer.find("r", None)
    assert story.num_lost > 1
    because = check(story)["decode"]["because"]
    assert " steps for 39 tokens, alone" in because
    assert because.endswith(f"and {story.num_lost} steps followed wrong ones")


def test_preemption_cache_and_abort(model):
    explainer = Explainer()
    core = make_core(model, kv_memory_bytes=200_000, max_context=128, token_budget=64)
    run(core, explainer, [(f"r{i}", [i + 1] * 50, 60) for i in range(4)])
    stories = [explainer.find(f"r{i}", None)[0] for i in range(4)]
    spans = [check(story) for story in stories]
    assert any(
        "preempted" in one and "no free page" in one["preempted"]["because"] for one in spans
    )
    run(core, explainer, [("again", [4] * 50, 3)])
    assert explainer.find("again", None)[0].body()["admission"].startswith("prefix hit")
    core.submit(Submit("/gone/0", [9] * 30, SamplingParams(max_tokens=50, ignore_eos=True)))
    explainer.take(core.step()[0].events)
    core.abort(Abort("/gone/0", "client left"))
    explainer.take(core.take_events())
    (story,) = explainer.find("gone", None)
    check(story)
    assert story.ended == "client left"


def test_parts_tenants_and_bounds(model):
    explainer = Explainer()
    core = make_core(model)
    core.submit(Submit("a/job/0", [1, 2], SamplingParams(max_tokens=3, n=2, seed=1), tenant="a"))
    core.submit(Submit("a/job/1", [1, 3], SamplingParams(max_tokens=3), tenant="a"))
    while core.has_work:
        explainer.take(core.step()[0].events)
    assert len(explainer.find("job", "a")) == 3
    assert not explainer.find("job", "b")
    assert not explainer.find("jo", None)
    run(core, explainer, [(f"many{i}", [1], 1) for i in range(1100)])
    assert not explainer.find("job", "a")
    assert len(explainer._ended) == 1000
    assert not explainer._live
    assert not explainer._steps


def test_a_lost_engine_is_part_of_the_story(model):
    explainer, core = Explainer(), make_core(model)
    core.submit(Submit("/x/0", [1] * 10, SamplingParams(max_tokens=30, ignore_eos=True, seed=1)))
    outputs = []
    for _ in range(4):
        output, _ = core.step()
        explainer.take(output.events)
        outputs += [token for delta in output.deltas for token in delta.token_ids]
    explainer.take([EngineRestarted(time.monotonic(), "killed", 1)])
    second = make_core(model)
    time.sleep(0.05)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    second.submit(Submit("/x/0", [1] * 10, params, resumed=[Resumed(0, outputs)]))
    while second.has_work:
        explainer.take(second.step()[0].events)
    (story,) = explainer.find("x", None)
    spans = check(story)
    assert spans["preempted"]["ms"] > 50
    assert "restarted" in spans["preempted"]["because"]
    assert story.num_output == 30


def test_what_is_told_of_many_at_once_is_what_is_told_of_each(model):
    """Requests that decode together share an account until somebody looks. Here somebody looks
    after every event."""
    core = make_core(model, kv_memory_bytes=200_000, max_context=128, token_budget=64)
    for i in range(6):
        params = SamplingParams(max_tokens=10 + 9 * i, ignore_eos=True, seed=1, n=1 + i % 2)
        core.submit(Submit(f"/r{i}/0", [i + 1] * 40, params))
    emitted = []
    while core.has_work:
        emitted += core.step()[0].events
    emitted += core.take_events()
    together, each = Explainer(), Explainer()
    together.take(emitted)
    for event in emitted:
        each.take([event])
        each.under_way()
    stories = [story for i in range(6) for story in together.find(f"r{i}", None)]
    assert len(stories) == 9
    for one, other in zip(
        stories, [story for i in range(6) for story in each.find(f"r{i}", None)], strict=True
    ):
        spans = check(one)
        assert spans.keys() == check(other).keys()
        for name, span in check(other).items():
            assert span["because"] == spans[name]["because"]
            assert span["ms"] == pytest.approx(spans[name]["ms"], abs=0.01)
    assert any("preempted" in check(story) for story in stories)


def test_a_request_that_is_given_up_in_the_queue_has_waited_there():
    """The engine hears of it later, or never."""
    explainer, of_call = Explainer(), Stopwatch()
    explainer.begin("/x/0", 1, of_call)
    of_call.enter("engine")
    now = time.monotonic()
    explainer.take(
        [events.Submitted(now, "/x/0", 4), events.Deferred(now, "/x/0", "not enough free pages")]
    )
    time.sleep(0.02)
    explainer.leave("/x/0")
    explainer.take([events.Aborted(time.monotonic() + 5, "/x/0", "timeout", 0)])
    of_call.end()
    (story,) = explainer.find("x", None)
    spans = check(story)
    assert spans["queued"]["ms"] >= 20
    assert spans["queued"]["because"] == "not enough free pages"
    assert story.body()["total_ms"] == pytest.approx(
        1000 * (of_call.ended_s - of_call.begun_s), abs=0.01
    )


def test_a_request_that_goes_on_in_another_engine_has_a_part_in_each():
    """Each tells the whole that the client waited."""
    explainer, of_call = ExplainerOfReplicas(2), Stopwatch()
    explainer.begin("/x/0", 1, of_call)
    now = time.monotonic()
    of_call.enter("engine")
    admitted = {"row": 0, "num_cached": 0, "num_tokens": 4, "queued_s": 0.0, "reason": ""}
    explainer.take([events.Submitted(now, "/x/0", 4), events.Admitted(now, "/x/0", **admitted)])
    time.sleep(0.01)  # an event is taken after it was emitted
    explainer.take([events.Finished(now + 0.01, "/x/0", "handed over", 4, 1, 0, 0.0, 0.01, 0.0)])
    time.sleep(0.02)
    explainer.take(
        [
            events.Submitted(now + 0.02, "/x/0", 4, replica=1),
            events.Resumed(now + 0.02, "/x/0", 4, 1, replica=1),
        ]
    )
    explainer.take([events.Admitted(now + 0.03, "/x/0", **admitted, replica=1)])
    time.sleep(0.05)
    explainer.take(
        [events.Finished(now + 0.04, "/x/0", "length", 4, 2, 0, 0.01, 0.0, 0.01, replica=1)]
    )
    assert of_call.state == "server loop"
    explainer.leave("/x/0")
    of_call.end()
    prefill, decode = explainer.find("x", None)
    for story in (prefill, decode):
        assert story.body()["total_ms"] == pytest.approx(
            1000 * (of_call.ended_s - of_call.begun_s), abs=0.01
        )
    assert check(decode)["other parts"]["ms"] >= 19
    assert "to the engine" not in check(decode)
    assert [one.body()["engine_ms"] for one in (prefill, decode)] == pytest.approx(
        [10, 20], abs=0.01
    )


def test_each_sample_and_prompt_tells_the_whole():
    explainer, of_call = Explainer(), Stopwatch()
    explainer.begin("/x/0", 2, of_call)
    now = time.monotonic()
    of_call.enter("engine")
    for i in range(2):
        explainer.take([events.Submitted(now, f"/x/0:{i}", 4)])
    time.sleep(0.001)
    explainer.take([events.Aborted(now + 0.001, "/x/0:0", "length", 1)])
    assert of_call.state == "engine"  # one is still computed
    time.sleep(0.02)
    explainer.take([events.Aborted(now + 0.01, "/x/0:1", "length", 1)])
    explainer.leave("/x/0")
    of_call.end()
    first, second = explainer.find("x", None)
    assert check(first)["other parts"]["ms"] >= 19
    assert "other parts" not in check(second)
    assert first.body()["total_ms"] == pytest.approx(second.body()["total_ms"], abs=0.01)
