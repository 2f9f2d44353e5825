"""EngineCore: refusals, aborts, failures. Nothing one request does reaches another."""

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers import Answer, greedy, load_model, make_core, make_llama, run, take
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.errors import CheckpointError, ConfigError, ContextTooLong, InvalidRequest, QueueFull
from tidemill.sched.request import BACKGROUND
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Abort, Submit


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder)


@pytest.fixture
def core(model):
    return make_core(model)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], greedy(1), InvalidRequest, "empty"),
        (
            [320],
            greedy(1),
            InvalidRequest,
            "token 320, which is out of vocabulary: tokens are 0 to 319",
        ),
        ([-1], greedy(1), InvalidRequest, "token -1"),
        (
            [1] * 512,
            greedy(1),
            ContextTooLong,
            "length is 512 tokens, one of them for the output. Please reduce the length of the input prompt to 511",
        ),
        ([1] * 500, greedy(13), ContextTooLong, "Lower max_tokens to 12"),
        ([1], greedy(1, stop_token_ids=(400,)), InvalidRequest, "stop_token_ids names token 400"),
        ([1], greedy(1, logit_bias={320: 1.0}), InvalidRequest, "logit_bias names token 320"),
    ],
)
def test_refused_and_the_next_request_works(core, prompt, params, error, words):
    with pytest.raises(error) as caught:
        core.submit(Submit("bad", prompt, params))
    assert words in str(caught.value)
    assert len(run(core, {"good": ([1, 2], greedy(3))})["good"].tokens) == 3


def test_the_longest_prompt_that_fits(core):
    answer = run(core, {"a": ([5] * 511, SamplingParams(temperature=0, max_tokens=None))})["a"]
    assert len(answer.tokens) == 1
    assert answer.finish_reason == "length"


def test_an_id_in_use_is_refused(core):
    core.submit(Submit("a", [1], greedy(5)))
    with pytest.raises(InvalidRequest, match="already running"):
        core.submit(Submit("a", [1], greedy(5)))


def test_abort_of_one_sample_leaves_the_others(core):
    core.submit(Submit("a", [1, 2, 3], SamplingParams(n=3, max_tokens=6, seed=1)))
    answers = {"a": Answer(), "a:1": Answer(), "a:2": Answer()}
    for _ in range(3):
        take(core, answers)
    core.abort(Abort("a", "test", 1))
    core.abort(Abort("nobody", "test"))
    while core.has_work:
        take(core, answers)
    assert len(answers["a"].tokens) == len(answers["a:2"].tokens) == 6
    assert len(answers["a:1"].tokens) < 6
    core.scheduler.table.check_integrity()
    assert not core.live
    assert not core.live_of


def test_stop_tokens_and_eos(core):
    free = run(core, {"a": ([7, 8], greedy(8))})["a"].tokens
    stop = free[3]
    first = free.index(stop)
    answer = run(core, {"a": ([7, 8], greedy(8, stop_token_ids=(stop,)))})["a"]
    assert answer.tokens == free[: first + 1]
    assert answer.finish_reason == "stop"
    assert run(core, {"a": ([7, 8], greedy(8))}, eos=(stop,))["a"].tokens == free[: first + 1]
    assert run(core, {"a": ([7, 8], greedy(8, ignore_eos=True))}, eos=(stop,))["a"].tokens == free
    held = run(core, {"a": ([7, 8], greedy(8, min_tokens=8))}, eos=(stop,))["a"].tokens
    assert len(held) == 8
    assert stop not in held


def test_a_step_that_raises_fails_its_requests_and_no_others(core, capsys):
    core.submit(Submit("victim", [1, 2, 3], greedy(5)))
    real = core.runner.launch

    def broken(plan):
        raise RuntimeError("kernel failed")

    core.runner.launch = broken
    _output, failed = core.step()
    assert [refused.request_id for refused in failed] == ["victim"]
    assert "kernel failed" in capsys.readouterr().err
    core.runner.launch = real
    assert len(run(core, {"next": ([1, 2, 3], greedy(5))})["next"].tokens) == 5
    core.scheduler.table.check_integrity()


class Ahead:
    """The core's runner, one step ahead as on a GPU. Reading the result of a step with this prompt
    token fails."""

    steps_ahead, fallback, mover = 1, "", None

    def __init__(self, runner, poison):
        self._runner, self._poison, self._rows = runner, poison, set()

    def launch(self, plan):
        for new in plan.new_rows:
            (self._rows.add if new.token_ids[0] == self._poison else self._rows.discard)(new.row)
        return plan, self._runner.launch(plan)

    def collect(self, launched):
        plan, result = launched
        if any(item.row in self._rows for item in plan.items):
            raise RuntimeError("poison")
        return result


def test_a_result_that_cannot_be_read_fails_the_request_it_belongs_to(core, capsys):
    core.runner = Ahead(core.runner, poison=5)
    core.submit(Submit("good", [1, 2, 3], greedy(50)))
    core.step()
    core.submit(Submit("poison", [5, 2, 3], greedy(1)))
    failed = []
    while "poison" in core.live:
        failed += core.step()[1]
    assert "poison" in {refused.request_id for refused in failed}
    core.submit(Submit("next", [1, 2, 4], greedy(3)))
    while core.has_work:
        assert not core.step()[1]
    core.scheduler.table.check_integrity()
    capsys.readouterr()


def test_a_runner_that_only_fails_ends_the_engine(core, monkeypatch, capsys):
    """What fails every step (a GPU after an illegal access) is replaced with its process."""
    real, calls = core.runner.launch, iter("fff" + "." + "fff")

    def launch(plan):
        if next(calls) == "f":
            raise RuntimeError("broken")
        return real(plan)

    monkeypatch.setattr(core.runner, "launch", launch)
    seen = []
    for i in range(7):
        core.submit(Submit(f"r{i}", [1, 2, 3], greedy(1)))
        try:
            core.step()
            seen.append(i)
        except RuntimeError:
            pass
        while core.has_work:
            core.step()
    assert seen == [0, 1, 3, 4, 5]
    capsys.readouterr()


def test_pages_to_be_cleared_are_cleared_though_a_step_fails(core, monkeypatch, capsys):
    request = Submit("one", [1, 2, 3], greedy(9))
    core.submit(request)
    core.step()
    (live,) = core.scheduler.running
    pages = list(core.scheduler.kv.tables(live.seq)[0])
    core.scheduler.table.discard(live, "logits are not numbers")
    core.end(live.seq)
    core.submit(Submit("two", [4, 5, 6], greedy(2)))
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "launch", lambda plan: 1 / 0)
        assert core.step()[1]
    core.submit(Submit("three", [7, 8, 9], greedy(2)))
    assert set(pages) <= set(core.scheduler.plan().page_zeroes)
    capsys.readouterr()


def test_rows_that_were_left_are_told_though_a_step_fails(core, monkeypatch, capsys):
    """Else the runner keeps what a KV policy has beside the pages of a request that is gone."""
    core.submit(Submit("one", [1, 2, 3], greedy(9, kv_policy={"kind": "h2o", "budget": 8})))
    core.step()
    (live,) = core.scheduler.running
    row = live.row
    assert row in core.runner._policies.rows
    core.abort(Abort("one", reason="the client has gone"))
    core.submit(Submit("two", [4, 5, 6], greedy(2)))
    with monkeypatch.context() as patch:
        patch.setattr(core.runner, "launch", lambda plan: 1 / 0)
        assert core.step()[1]
    core.submit(Submit("three", [7, 8, 9], greedy(2)))
    assert row in core.scheduler.plan().left_rows
    capsys.readouterr()


def test_ctrl_c_in_a_step_does_not_poison_the_prefix_cache(core):
    """The interrupted step had announced pages that it never computed."""
    prompt = list(range(2, 60))
    expected = run(core, {"a": (prompt, greedy(5))})["a"].tokens
    core.scheduler.kv.clear_prefixes()
    core.submit(Submit("b", prompt, greedy(5)))
    real = core.runner.launch

    def interrupted(plan):
        raise KeyboardInterrupt

    core.runner.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        core.step()
    core.runner.launch = real
    core.runner.cache.normal_()
    assert run(core, {"c": (prompt, greedy(5))})["c"].tokens == expected


def test_who_shares_pages_with_a_failed_step_starts_over(model):
    """Under `static` a request may be admitted on pages that a step has announced, without a token
    of its own in that step."""
    prompt = list(range(2, 52))
    expected = run(make_core(model), {"b": (prompt, greedy(5))})["b"].tokens
    core = make_core(model, policy="static", token_budget=48, max_requests=4)
    answers = {"a": Answer(), "b": Answer()}
    for name in answers:
        core.submit(Submit(name, prompt, greedy(5)))
    real = core.runner.launch

    def broken(plan):
        assert len(plan.items) == 1
        assert len(plan.new_rows) == 2
        core.runner.launch = real
        core.runner.cache.normal_()
        raise RuntimeError("kernel failed")

    core.runner.launch = broken
    _, failed = core.step()
    assert [refused.request_id for refused in failed] == ["a"]
    while core.has_work:
        take(core, answers)
    assert answers["b"].tokens == expected
    core.scheduler.table.check_integrity()


def test_an_end_token_outside_the_vocabulary_harms_no_request(core):
    answers = run(
        core, {"a": ([1, 2], greedy(3, min_tokens=2)), "b": ([1, 2], greedy(3))}, eos=(99999,)
    )
    assert all(len(answer.tokens) == 3 for answer in answers.values())


def test_more_logprobs_than_words(core):
    assert len(run(core, {"a": ([1], greedy(1, logprobs=20))})["a"].logprobs[0].top) == 20


def test_the_queue_is_bounded(model):
    core = make_core(model, max_waiting=3)
    for i in range(3):
        core.submit(Submit(f"r{i}", [1], greedy(2)))
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        core.submit(Submit("r3", [1], greedy(2)))
    with pytest.raises(QueueFull):
        core.submit(Submit("r4", [1], SamplingParams(n=4)))
    while core.has_work:
        core.step()
    core.submit(Submit("r3", [1], greedy(2)))


def test_one_tenant_leaves_room_in_the_queue_for_others(model):
    core = make_core(model, max_waiting=64)
    choices = SamplingParams(max_tokens=2, seed=1, n=8)
    for i in range(4):
        core.submit(Submit(f"flood{i}", [1, 2], choices, tenant="a"))
    with pytest.raises(
        QueueFull, match=r"32 requests of this API key are waiting; at most 32 may"
    ) as caught:
        core.submit(Submit("flood4", [1, 2], choices, tenant="a"))
    assert caught.value.status == 429
    core.submit(Submit("b0", [1, 2], choices, tenant="b"))
    core.submit(Submit("b1", [1, 2], choices, tenant="b"))
    with pytest.raises(QueueFull, match="16 requests of this API key are waiting; at most 16 may"):
        core.submit(Submit("b2", [1, 2], choices, tenant="b"))
    # its first may be large
    core.submit(Submit("whole", [1, 2], SamplingParams(max_tokens=1, seed=1, n=16), tenant="c"))
    with pytest.raises(QueueFull, match="64 requests are waiting; at most 64 may"):
        core.submit(Submit("d", [1, 2], greedy(1), tenant="d"))
    # has a queue of its own
    core.submit(Submit("batch", [1, 2], greedy(1), priority=BACKGROUND, tenant="a"))
    while core.has_work:
        core.step()
    core.submit(Submit("a", [1, 2], choices, tenant="a"))


def test_without_keys_the_whole_queue_may_be_filled(model):
    core = make_core(model, max_waiting=64)
    for i in range(8):
        core.submit(Submit(f"r{i}", [1, 2], SamplingParams(max_tokens=2, seed=1, n=8)))
    with pytest.raises(QueueFull, match="64 requests are waiting; at most 64 may"):
        core.submit(Submit("more", [1, 2], greedy(1)))


@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
def test_embeddings_have_length_one_and_are_the_same_in_chunks_and_after_preemption(model, pooling):
    prompts = {
        f"e{i}": ([7 + i] * (60 + i), SamplingParams(max_tokens=1, temperature=0, pooling=pooling))
        for i in range(4)
    }
    whole = {name: answer.last.embedding for name, answer in run(make_core(model), prompts).items()}
    for name, vector in whole.items():  # of none, each token's
        assert sum(value * value for value in vector) == pytest.approx(
            1.0 if pooling != "none" else len(prompts[name][0])
        )
    core = make_core(model, token_budget=32, max_requests=4)
    answers = {name: Answer() for name in prompts}
    for name, (prompt, params) in prompts.items():
        core.submit(Submit(name, prompt, params))
    take(core, answers)
    core.scheduler.table.preempt(core.scheduler.running[0], "test")
    while core.has_work:
        take(core, answers)
    for name, vector in whole.items():
        assert answers[name].last.embedding == pytest.approx(vector, abs=1e-12)


def test_the_step_loop_has_no_torch():
    from tidemill.engine import core, outputs
    from tidemill.engine.parts import structured

    assert not any(hasattr(module, "torch") for module in (core, outputs, structured))


def test_timings_sum_to_the_whole(core):
    last = run(core, {"a": ([1] * 50, greedy(5))})["a"].last
    assert last.timings.queue_s >= 0
    assert last.timings.prefill_s > 0
    assert last.timings.decode_s > 0


def test_every_decision_is_an_event(core):
    core.submit(Submit("a", [1] * 40, greedy(2)))
    names = []
    while core.has_work:
        output, _ = core.step()
        names += [type(event).__name__ for event in output.events]
    assert names[:3] == ["Submitted", "Admitted", "StepPlanned"]
    assert {"StepDone", "FirstToken", "Finished", "RequestsLeft"} <= set(names)


def test_random_weights_from_a_configuration_alone(tmp_path):
    """For benchmarks: no checkpoint is needed, only its shape."""
    made = tmp_path / "made"
    make_llama(made)
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "config.json").write_text((made / "config.json").read_text())
    core = load_core(
        EngineOptions(model=str(folder), load_format="dummy", device="cpu", kv_memory_bytes=2**24)
    )
    answers = run(core, {"a": ([1, 2, 3], greedy(5)), "b": ([4, 5], greedy(3))})
    assert [len(answer.tokens) for answer in answers.values()] == [5, 3]
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_core(EngineOptions(model=str(folder), device="cpu"))
    with pytest.raises(ConfigError, match="load_format"):
        load_core(EngineOptions(model=str(folder), load_format="magic", device="cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_checkpoint_of_values_that_are_not_numbers_is_what_the_error_names(tmp_path, name, value):
    """Not the prompt: no request has an answer."""
    make_llama(tmp_path, vocab_size=320, max_position_embeddings=512)
    broken = load_file(tmp_path / "model.safetensors")
    broken[name][3] = value
    save_file(broken, tmp_path / "model.safetensors", {"format": "pt"})
    core = make_core(load_model(tmp_path))
    for i in range(3):
        core.submit(Submit(f"bad{i}", [20 + i] * 10, greedy(6)))
    told = []
    while core.has_work:
        told += core.step()[1]
    assert [one.error for one in told] == ["ModelFailed"] * 3
    for one in told:
        assert (
            "the checkpoint may hold values that are not numbers, or overflow in this dtype"
            in one.message
        )
        assert one.fix.startswith("Fetch the checkpoint again, or start with --dtype float32.")


@pytest.mark.parametrize(
    "params", [greedy(6), greedy(6, logprobs=2), SamplingParams(max_tokens=6, seed=3, n=2)]
)
def test_a_request_whose_logits_are_not_numbers_fails_alone(tmp_path, params):
    """One token's embedding is broken. A request that uses it gets an error; no other request's
    tokens change, then or later."""
    make_llama(tmp_path, vocab_size=320, max_position_embeddings=512, tie_word_embeddings=False)
    broken = load_file(tmp_path / "model.safetensors")
    broken["model.embed_tokens.weight"][7] = float("nan")
    save_file(broken, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path)
    good = {f"good{i}": ([20 + i] * 40, greedy(6)) for i in range(3)}
    alone = {name: run(make_core(model), {name: ask})[name].tokens for name, ask in good.items()}
    core = make_core(model)
    for name, (prompt, asked) in good.items():
        core.submit(Submit(name, prompt, asked))
    core.submit(Submit("bad", [7] * 40, params))
    answers, told = {name: Answer() for name in good}, []
    while core.has_work:
        output, failed = core.step()
        told += [(refused.request_id, refused.error) for refused in failed]
        for delta in output.deltas:
            answers[delta.request_id].tokens.extend(delta.token_ids)
    assert told == [("bad", "ModelFailed")]
    assert {name: answer.tokens for name, answer in answers.items()} == alone
    core.scheduler.table.check_integrity()
    # in pages that were the broken one's, too
    assert run(core, dict(good))["good1"].tokens == alone["good1"]
    assert not any(page.isnan().any() for page in core.runner.cache)
