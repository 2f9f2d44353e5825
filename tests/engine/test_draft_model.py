"""A draft model: right where it should be, and whatever it draws, the tokens are those without it."""

from dataclasses import replace

import pytest

from tests.helpers import (
    Answer,
    byte_tokenizer,
    draft_core,
    greedy,
    load_model,
    make_core,
    make_llama,
    run,
    take,
)
from tidemill.config import EngineOptions, resolve
from tidemill.engine.load import load_core
from tidemill.engine.parts.drafting import Drafting
from tidemill.errors import CheckpointError, ConfigError
from tidemill.kernels import machine
from tidemill.runner.spec.draft_model import DraftModelDrafter
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Abort, Submit

PARAMS = {
    "greedy": greedy(24, logprobs=2),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=24, seed=1234, logprobs=2),
    "adjusted": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=24, seed=-7, logit_bias={5: 2.0, 249: 1.0},
        bad_word_ids=((7, 9), (11,)), stop_token_ids=(249,), min_tokens=9,
    ),
}  # fmt: skip
PROMPT = [(i * i) % 97 + 3 for i in range(60)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The target, another that is as likely right as chance, and one with a longer vocabulary and a
    shorter context."""
    made = []
    for seed, more in (
        (5, {}),
        (6, {"num_hidden_layers": 1, "vocab_size": 200}),
        (7, {"vocab_size": 300}),
    ):
        path = tmp_path_factory.mktemp(f"model{seed}")
        make_llama(path, seed=seed, **{"vocab_size": 250, "initializer_range": 0.15} | more)
        made.append(load_model(path))
    return made


def verified(core, requests):
    """Answers, and how many drafts were right of how many; the step that ends a request does not
    count."""
    answers, num_right, num_all = {name: Answer() for name in requests}, 0, 0
    for name, (prompt, params) in requests.items():
        core.submit(Submit(name, prompt, params))
    while core.has_work:
        output, failed = core.step()
        assert not failed
        for delta in output.deltas:
            answers[delta.request_id].tokens += delta.token_ids
        ended = {delta.request_id for delta in output.deltas if delta.finish_reason}
        for event in output.events:
            of = (
                [one for one in event.of if one[0] not in ended]
                if isinstance(event, events.DraftsVerified)
                else []
            )
            num_right, num_all = (
                num_right + sum(one[2] for one in of),
                num_all + sum(one[1] for one in of),
            )
    core.scheduler.table.check_integrity()
    return answers, num_right, num_all


def drafter_of(core) -> DraftModelDrafter:
    return core.part(Drafting).drafters[-1]


def is_idle(core) -> bool:
    """Nothing of ended requests is left in the draft model's runner."""
    drafter = drafter_of(core)
    drafter._kv.check_integrity()
    return (
        not drafter._rows
        and len(drafter._free) == core.config.max_requests
        and drafter._kv.num_free_pages == drafter._kv.num_pages
    )


@pytest.mark.parametrize("kind", PARAMS)
def test_the_target_itself_is_always_right(models, kind):
    """Also sampled: both draw with the noise of the same seed and position."""
    core = draft_core(models[0], models[0])
    requests = {"x": (PROMPT, PARAMS[kind]), "y": (PROMPT[:7], PARAMS[kind])}
    answers, num_right, num_all = verified(core, requests)
    expected = run(make_core(models[0], speculate="off"), requests)
    assert {name: answer.tokens for name, answer in answers.items()} == {
        name: one.tokens for name, one in expected.items()
    }
    assert num_right == num_all
    assert num_all > 20
    assert is_idle(core)


@pytest.mark.parametrize(
    ("which", "options"), [(1, {"token_budget": 9, "max_requests": 3}), (2, {})]
)
def test_another_vocabulary_size(models, which, options):
    """Tokens that the draft model does not have, and drafts that are no tokens of the target."""
    requests = {"n": (PROMPT[:30], SamplingParams(n=4, seed=3, max_tokens=12))}
    requests |= {
        f"o{i}": (PROMPT[i : i + 9 + 8 * i], list(PARAMS.values())[i % 3]) for i in range(5)
    }
    core = draft_core(models[0], models[which], **options)
    assert run(core, requests) == run(make_core(models[0], speculate="off", **options), requests)
    assert is_idle(core)


def test_preempted_and_aborted(models):
    expected = run(make_core(models[0], speculate="off"), {"x": (PROMPT, PARAMS["seeded"])})["x"]
    core = draft_core(models[0], models[0], token_budget=64)
    core.submit(Submit("x", PROMPT, PARAMS["seeded"]))
    core.submit(Submit("y", PROMPT[:9], PARAMS["greedy"]))
    answers, num_steps = {"x": Answer(), "y": Answer()}, 0
    while core.has_work:
        take(core, answers)
        num_steps += 1
        if num_steps == 3:
            core.scheduler.table.preempt(core.scheduler.running[0], "test")
        if num_steps == 4:
            core.abort(Abort("y", "test"))
    assert answers["x"] == expected
    assert is_idle(core)


def test_few_pages_and_rows_go_to_those_who_ask(models):
    """The draft model's pool holds two of four requests."""
    core = draft_core(models[0], models[0], max_requests=4)
    core.part(Drafting).drafters[-1] = DraftModelDrafter(
        models[0], replace(core.config.draft, num_pages=12), 250
    )
    requests = {f"o{i}": (PROMPT[i : i + 40], PARAMS["greedy"]) for i in range(4)}
    assert run(core, requests) == run(make_core(models[0], speculate="off"), requests)
    assert is_idle(core)


def test_no_drafts_past_the_draft_models_context(models, tmp_path):
    make_llama(tmp_path, seed=8, vocab_size=250, max_position_embeddings=64)
    draft = load_model(tmp_path)
    requests = {"x": (PROMPT, greedy(30))}
    core = draft_core(models[0], draft)
    assert core.config.draft.max_context == 64
    answers, _, num_all = verified(core, requests)
    assert answers["x"].tokens == run(make_core(models[0], speculate="off"), requests)["x"].tokens
    assert 0 < num_all <= 6


def test_memory_is_counted(models):
    config = draft_core(models[0], models[1]).config
    parts = config.draft.weight_bytes + config.draft.kv_bytes + config.draft.activation_bytes
    assert config.draft.kv_bytes > 0
    assert (
        config.memory_bytes
        == config.weight_bytes + config.kv_bytes + config.activation_bytes + parts
    )
    small = EngineOptions(draft_model="draft", memory_bytes=config.memory_bytes - config.kv_bytes)
    with pytest.raises(ConfigError, match="draft model"):
        resolve(small, models[0].config, machine.detect(), models[1].config)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"speculate": "draft-model"}, "needs --draft-model"),
        (
            {"speculate": "ngram", "draft_model": "tiny"},
            "--draft-model needs --speculate draft-model",
        ),
    ],
)
def test_the_option_and_the_drafter_belong_together(models, options, match):
    with pytest.raises(ConfigError, match=match):
        resolve(EngineOptions(**options), models[0].config, machine.detect(), models[1].config)


def test_another_tokenizer_is_refused_by_name(tiny_folder, thinking_folder, tmp_path):
    """Before weights are read: the folders of the mismatched models have none."""
    with pytest.raises(
        ConfigError,
        match=f"{thinking_folder.name}.* has another tokenizer than {tiny_folder.name}: 2 tokens",
    ):
        load_core(EngineOptions(model=str(tiny_folder), draft_model=str(thinking_folder)))
    make_llama(tmp_path, vocab_size=320)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_core(EngineOptions(model=str(tiny_folder), draft_model=str(tmp_path)))


def test_loaded_from_its_path(tiny_folder, tmp_path):
    make_llama(tmp_path, seed=4, vocab_size=320, num_hidden_layers=1)
    byte_tokenizer(tmp_path)
    options = EngineOptions(
        model=str(tiny_folder),
        draft_model=str(tmp_path),
        kv_memory_bytes=2**24,
        adaptive_drafts=False,
    )
    core = load_core(options)
    assert core.config.speculate == ("forced", "draft-model")
    _, _, num_all = verified(core, {"x": (PROMPT, greedy(12))})
    assert num_all > 0
