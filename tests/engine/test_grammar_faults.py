"""A grammar library that raises fails the request whose grammar it was, and no other."""

import json

import pytest

from tests.helpers import Answer, greedy, load_model, make_core, run
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.errors import InvalidRequest
from tidemill.frontend.structured import Matcher
from tidemill.types.sampling import Grammar, SamplingParams
from tidemill.types.wire import Resumed, Submit

GRAMMAR = Grammar(
    "json_schema",
    json.dumps({"type": "array", "items": {"enum": ["ebb", "flow"]}, "minItems": 4, "maxItems": 4}),
)


class Panic(BaseException):
    """As Rust's panics come out of pyo3: not an Exception."""


class Faulty(Matcher):
    """A real matcher whose n-th call of a method raises."""

    def __init__(self, inner, method, countdown, error):
        self._inner, self._method, self._countdown, self._error = inner, method, countdown, error

    def _call(self, method):
        if method == self._method:
            self._countdown -= 1
            if self._countdown < 0:
                raise self._error

    def mask(self):
        self._call("mask")
        return self._inner.mask()

    def take(self, token_ids):
        self._call("take")
        self._inner.take(token_ids)

    @property
    def is_over(self):
        self._call("is_over")
        return self._inner.is_over

    @property
    def error(self):
        return self._inner.error

    def forced(self):
        self._call("forced")
        return self._inner.forced()

    def copy(self):
        self._call("copy")
        return Faulty(self._inner.copy(), self._method, self._countdown, self._error)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder)


@pytest.fixture(params=[0, 1])
def core(model, tiny_folder, request):
    core = make_core(model)
    core.part(StructuredOutput).tokenizer_path = tiny_folder
    core.runner.steps_ahead = request.param
    return core


def asks():
    """A free request, one with a grammar, and one with penalties, which reads its own output."""
    return {
        "free": ([1, 2, 3], greedy(20, ignore_eos=True, logprobs=2)),
        "structured": ([1, 2, 3], SamplingParams(max_tokens=60, seed=3, grammar=GRAMMAR)),
        "penalties": (
            [4, 5],
            SamplingParams(max_tokens=15, seed=4, repetition_penalty=1.3, ignore_eos=True),
        ),
    }


def faulty(core, *fault):
    return Faulty(core.part(StructuredOutput).compile(GRAMMAR), *fault)


ERRORS = {"error": RuntimeError("boom"), "panic": Panic("explicit panic"), "bare": ValueError("")}


@pytest.mark.parametrize(
    ("method", "countdown", "error"),
    [
        ("mask", 0, "error"),
        ("mask", 2, "panic"),
        ("mask", 0, "bare"),
        ("take", 3, "panic"),
        ("is_over", 2, "error"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_the_request_fails_alone_with_a_typed_error(core, method, countdown, error, n):
    error = ERRORS[error]
    expected = run(core, asks())
    core.submit(
        Submit("bad", [1, 2, 3], SamplingParams(max_tokens=60, seed=9, grammar=GRAMMAR, n=n))
    )
    for seq in core.live["bad"].samples:
        core.part(StructuredOutput).start(seq, faulty(core, method, countdown, error))
    for name, (prompt, params) in asks().items():
        core.submit(Submit(name, prompt, params))
    answers, failed = {name: Answer() for name in expected}, []
    while core.has_work:
        output, refused = core.step()
        failed += refused
        for delta in output.deltas:
            if delta.request_id != "bad":
                answer = answers[delta.request_id]
                answer.tokens += delta.token_ids
                answer.logprobs += delta.logprobs or []
                answer.finish_reason = delta.finish_reason
        core.scheduler.table.check_integrity()
    assert [(one.request_id, one.error) for one in failed] == [("bad", "InvalidRequest")]
    assert type(error).__name__ in failed[0].message
    assert str(error) in failed[0].message
    assert answers == expected
    assert not core.live
    assert not core.part(StructuredOutput)


@pytest.mark.parametrize("error", [RuntimeError("boom"), Panic("explicit panic")])
@pytest.mark.parametrize("method", ["copy", "take"])
def test_a_fault_when_it_is_submitted_is_a_refusal(core, method, error):
    request = Submit("bad", *asks()["structured"], resumed=[Resumed(0, [5])])
    core.part(StructuredOutput).compile(GRAMMAR)
    with pytest.raises(InvalidRequest, match=r"grammar library failed.*(boom|panic)"):
        core.submit(request, faulty(core, method, 0, error))
    assert not core.has_work
    assert not core.live


def test_a_panic_while_compiling_is_a_refusal(core, monkeypatch):
    core.part(StructuredOutput).compile(GRAMMAR)

    def panic(kind, text):
        raise Panic("explicit panic")

    monkeypatch.setattr(core.part(StructuredOutput)._grammars, "_make", panic)
    with pytest.raises(InvalidRequest, match="Panic: explicit panic"):
        core.part(StructuredOutput).compile(Grammar("regex", "a+"))


def test_ctrl_c_in_a_mask_is_still_ctrl_c(core):
    core.submit(Submit("x", *asks()["structured"]))
    for seq in core.live["x"].samples:
        core.part(StructuredOutput).start(seq, faulty(core, "mask", 0, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.scheduler.table.check_integrity()
    assert run(core, {"next": ([1, 2], greedy(3))})["next"].tokens


def test_masks_travel_in_the_plan(core):
    plans, launch = [], core.runner.launch
    core.runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    run(core, asks())
    masked = [plan for plan in plans if plan.masks]
    assert masked
    for plan in masked:
        assert {row for row, _ in plan.masks} <= {item.row for item in plan.items if item.samples}
        assert len(next(iter(plan.masks.values()))) == 4 * -(-core.model_config.vocab_size // 32)
    assert not plans[-1].masks or len(plans[-1].items) == 1
