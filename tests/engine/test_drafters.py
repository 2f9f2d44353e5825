"""Every drafter, over what a request may ask and what may happen to it: tokens and logprobs are
those without drafts."""

import asyncio
import random

import pytest
import torch

from tests.engine.test_client import collect
from tests.engine.test_structured import check_random_schemas
from tests.helpers import (
    LONG_S,
    Answer,
    Guesser,
    draft_core,
    greedy,
    guess_with,
    load_model,
    make_core,
    make_llama,
    run,
    take,
)
from tests.waiting import until_async
from tidemill import LLM, SamplingParams
from tidemill.config import SPECULATE, EngineOptions
from tidemill.config.drafts import HEADS
from tidemill.engine.client import EngineClient
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.runner.spec.heads import Target, new_head
from tidemill.runner.spec.stored import save_draft
from tidemill.types import events
from tidemill.types.events import EngineRestarted
from tidemill.types.wire import Submit

# "random" guesses any token, "often" is right for most; heads are not trained.
NAMES = ("random", "often", "ngram", "suffix", "auto", "draft-model", "itself", *HEADS)
ADJUSTED = SamplingParams(
    temperature=1.0, presence_penalty=0.4, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=24, seed=-7, logprobs=2,
    min_tokens=9, stop_token_ids=tuple(range(0, 250, 3)), logit_bias={5: 2.0}, bad_word_ids=((7, 9), (11,)),
)  # fmt: skip
PROMPT = [(i * i) % 97 + 3 for i in range(40)] * 2
REQUESTS = {
    "greedy": (PROMPT, greedy(30, logprobs=1)),
    "seeded": (
        PROMPT[:33],
        SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=24, seed=1234, logprobs=3),
    ),
    "adjusted": (PROMPT[5:60], ADJUSTED),
    "samples": (PROMPT[:30], SamplingParams(n=4, seed=3, temperature=0.4, max_tokens=16)),
    "asked": (PROMPT[3:50], greedy(12, prompt_logprobs=2)),
}
OPTIONS = {
    "": {},
    "chunks": {"token_budget": 9, "max_requests": 3},
    "pages of one": {"page_size": 1},
    "small memory": {"kv_memory_bytes": 2**17},
}


# What `make test` has time for, by drafter.
_ALWAYS = {
    "random": ("",),
    "often": ("chunks",),
    "suffix": ("", "small memory"),
    "draft-model": ("small memory",),
}


class Random(Guesser):
    """Any tokens, as many as it likes."""

    def propose(self, asks):
        return [
            [random.Random(len(ask.tokens) + i).randrange(250) for i in range(ask.most)]
            for ask in asks
        ]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = []
    for seed, more in ((5, {}), (6, {"num_hidden_layers": 1})):
        path = tmp_path_factory.mktemp(f"model{seed}")
        make_llama(path, seed=seed, **{"vocab_size": 250, "initializer_range": 0.15} | more)
        made.append(load_model(path))
    return made


def save_heads(model, folder):
    """Of every kind, in a folder each."""
    target, size = Target(model, torch.arange(200)), model.config.hidden_size
    about = {
        "least_probability": 0.0,
        "draft_cost": 0.1,
        "step_costs": [1.0, 1.05, 1.1, 1.15, 1.2, 1.25],
    }
    exits = {f"exit/exit-{layer}": new_head("exit", size, {"layer": layer}) for layer in (1, 2)}
    kinds = {
        "medusa": new_head("medusa", size),
        "eagle": new_head("eagle", size),
        "exit": new_head("exit", size, {"layer": 2}),
    }
    for name, head in {**kinds, **exits}.items():
        save_draft(folder / name, head, target, about)
    return folder


@pytest.fixture(scope="module")
def heads(models, tmp_path_factory):
    return save_heads(models[0], tmp_path_factory.mktemp("heads"))


def with_heads(name, folder):
    return {
        "speculate": name,
        "draft_heads": str(folder / name.partition("-")[0]),
        "adaptive_drafts": False,
    }


@pytest.fixture(scope="module")
def expected(models):
    return {
        name: run(make_core(models[0], speculate="off", **options), REQUESTS)
        for name, options in OPTIONS.items()
    }


def core_with(name, models, heads, answers, **options):
    """Every draft is verified."""
    if name in HEADS:
        return make_core(models[0], **with_heads(name, heads), max_drafts=5, **options)
    if name in ("draft-model", "itself"):
        return draft_core(models[0], models[name == "draft-model"], **options)
    if name in SPECULATE:
        return make_core(models[0], speculate=name, adaptive_drafts=False, max_drafts=5, **options)
    known = {
        tuple(REQUESTS[key][0]): answer.tokens for key, answer in answers.items() if ":" not in key
    }
    return guess_with(
        make_core(models[0], **options), Random() if name == "random" else Guesser(known, 0.7)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, key, marks=() if key in _ALWAYS.get(name, ("",)) else pytest.mark.slow)
        for name in NAMES
        for key in OPTIONS
    ],
)
def test_tokens_and_logprobs(models, heads, expected, name, options):
    """And again: some learn from outputs."""
    core = core_with(name, models, heads, expected[options], **OPTIONS[options])
    for _ in range(2):
        assert run(core, REQUESTS) == expected[options]


@pytest.mark.parametrize("name", NAMES)
def test_preempted_at_any_time(models, heads, expected, name):
    core, draw = core_with(name, models, heads, expected[""], token_budget=64), random.Random(1)
    answers = {key: Answer() for key in expected[""]}
    for key, (prompt, params) in REQUESTS.items():
        core.submit(Submit(key, prompt, params))
    num_preempted = 0
    while core.has_work:
        take(core, answers)
        if core.scheduler.running and draw.random() < 0.4:
            core.scheduler.table.preempt(draw.choice(core.scheduler.running), "test")
            num_preempted += 1
        core.scheduler.table.check_integrity()
    assert num_preempted >= 4
    assert answers == expected[""]


def test_the_same_asked_again_is_nearly_all_drafts(models):
    core = make_core(models[0], speculate="suffix", adaptive_drafts=False)
    # nothing that repeats within itself
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=100)
    first = run(core, {"x": (PROMPT[:40], params)})["x"]
    core.submit(Submit("x", PROMPT[:40], params))
    again, num_right, num_steps = [], 0, 0
    while core.has_work:
        output, _ = core.step()
        num_steps += 1
        for delta in output.deltas:
            again += delta.token_ids
        num_right += sum(e.of[0][2] for e in output.events if isinstance(e, events.DraftsVerified))
    assert again == first.tokens
    assert num_right > 80
    assert num_steps < 20


@pytest.mark.parametrize("speculate", ["auto", "ngram", "draft-model", "eagle-tree", "exit"])
def test_stop_strings(tiny_folder, speculate, tmp_path):
    """The text ends at the same place, though tokens after it may have been drawn in the same step."""
    draft = {"draft_model": str(tiny_folder)} if speculate == "draft-model" else {}
    if speculate in HEADS:
        draft = with_heads(speculate, save_heads(load_model(tiny_folder), tmp_path))
    texts = []
    for given in ({"speculate": "off"}, {"speculate": speculate, "adaptive_drafts": False} | draft):
        llm = LLM(str(tiny_folder), progress=False, kv_memory_bytes=2**24, **given)
        whole = (
            llm.generate(
                "hello " * 8, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            )[0]
            .outputs[0]
            .text
        )
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=whole[21:23])
        one = llm.generate("hello " * 8, params)[0].outputs[0]
        texts.append((whole, one.text, one.token_ids, one.finish_reason, one.stop_reason))
    assert texts[0] == texts[1]
    assert texts[0][3] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["off", "auto", "ngram", "draft-model", "eagle-tree", "exit"])
def test_an_engine_killed_meanwhile_goes_on_with_the_same_tokens(tiny_folder, speculate, tmp_path):
    how = {
        "speculate": speculate,
        "draft_model": str(tiny_folder) if speculate == "draft-model" else None,
    }
    if speculate in HEADS:
        how |= with_heads(speculate, save_heads(load_model(tiny_folder), tmp_path))
    expected = run(
        make_core(load_model(tiny_folder), speculate="off"),
        {"x": ([1, 2, 3], SamplingParams(max_tokens=300, ignore_eos=True, n=3, seed=5))},
    )

    async def whole():
        seen = []
        client = EngineClient(on_events=seen.extend)
        try:
            await client.start(
                EngineOptions(model=str(tiny_folder), threads=1, **how | {"adaptive_drafts": False})
            )
            going = asyncio.create_task(collect(client, "x", n=3, seed=5, length=300))
            await until_async(
                lambda: any(client.pending["x"].outputs if "x" in client.pending else ())
            )
            client.link.kill()
            assert await asyncio.wait_for(going, LONG_S) == [
                answer.tokens for answer in expected.values()
            ]
            assert any(isinstance(event, EngineRestarted) for event in seen)
        finally:
            await client.close()

    asyncio.run(whole())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("name", ["auto", "draft-model", "eagle"])
def test_random_schemas_give_the_same_bytes(tiny_folder, backend, name, tmp_path):
    model, tokenizer = load_model(tiny_folder), Tokenizer.load(tiny_folder)
    more = {"structured_backend": backend, "max_requests": 32}
    plain = make_core(model, speculate="off", **more)
    how = (
        with_heads(name, save_heads(model, tmp_path))
        if name in HEADS
        else {"adaptive_drafts": False}
    )
    core = (
        draft_core(model, model, **more)
        if name == "draft-model"
        else make_core(model, **how, **more)
    )
    for each in (plain, core):
        each.structured.tokenizer_path = tiny_folder
    for first in range(0, 1000, 100):
        assert check_random_schemas(core, tokenizer, 100, first) == check_random_schemas(
            plain, tokenizer, 100, first
        )
