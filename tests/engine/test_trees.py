"""Drafts that are trees: tokens and logprobs are those without drafts, and what is right is found
on any branch."""

import random

import pytest

from tests.helpers import (
    Answer,
    Grower,
    greedy,
    guess_with,
    load_model,
    make_core,
    make_llama,
    run,
    take,
    watch,
)
from tests.models import test_families
from tidemill import SamplingParams
from tidemill.sched.tree import Tree, ancestors_of, depths_of, right_path
from tidemill.types import events
from tidemill.types.wire import Submit

PROMPT = [(i * i) % 97 + 3 for i in range(40)]
REQUESTS = {
    "greedy": (PROMPT, greedy(30, logprobs=2)),
    "seeded": (
        PROMPT[:33],
        SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=24, seed=1234, logprobs=3),
    ),
    "biased": (
        PROMPT[5:],
        SamplingParams(temperature=1.0, max_tokens=20, seed=-7, min_tokens=9, logit_bias={5: 2.0}),
    ),
    "samples": (PROMPT[:30], SamplingParams(n=3, seed=3, temperature=0.6, max_tokens=16)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_llama(path, seed=5, vocab_size=250, initializer_range=0.15)
    return path


@pytest.fixture
def model(folder, backend):
    return load_model(folder)


def grow(model, expected, chance=0.8, most=7, **options):
    known = {
        tuple(REQUESTS[name][0]): answer.tokens
        for name, answer in expected.items()
        if ":" not in name
    }
    return guess_with(make_core(model, **options), Grower(known, chance), most=most)


def check(model, **options):
    expected = run(make_core(model, speculate="off", **options), REQUESTS)
    core = grow(model, expected, **options)
    seen = watch(core)
    for _ in range(2):
        assert run(core, REQUESTS) == expected
    assert (
        sum(of[2] for event in seen if isinstance(event, events.DraftsVerified) for of in event.of)
        > 30
    )


def test_tokens_and_logprobs(model):
    check(model)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "token_budget": 20, "max_requests": 4},
        {"kv_dtype": "int8"},
        {"kv_layout": "virtual"},
    ],
)
def test_other_pages(folder, options):
    check(load_model(folder), **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "GPT2", "Mistral", "Granite"])
def test_windows_and_other_positions(family, tmp_path, backend):
    """Contexts go beyond the windows."""
    test_families.save(family, "safetensors", tmp_path)
    check(load_model(tmp_path), page_size=8)


def test_preempted_meanwhile(model):
    expected = run(make_core(model, speculate="off"), REQUESTS)
    core, draw = grow(model, expected), random.Random(1)
    answers = {name: Answer() for name in expected}
    for name, (prompt, params) in REQUESTS.items():
        core.submit(Submit(name, prompt, params))
    num_preempted = 0
    while core.has_work:
        take(core, answers)
        if core.scheduler.running and draw.random() < 0.3:
            core.scheduler.table.preempt(draw.choice(core.scheduler.running), "test")
            num_preempted += 1
        core.scheduler.table.check_integrity()
    assert num_preempted >= 3
    assert answers == expected


def test_the_right_branch_is_found():
    tree = Tree([5, 6, 7, 8, 7], [-1, -1, 0, 1, 1])
    assert depths_of(tree.parents) == [1, 1, 2, 2, 2]
    assert ancestors_of(tree.parents, 4) == [1, 4]
    assert right_path(tree.tokens, tree.parents, [6, 0, 7, 0, 0, 9]) == [1, 4]
    assert right_path(tree.tokens, tree.parents, [4, 0, 0, 0, 0, 0]) == []
    assert (tree[:3].parents, tree[:3].depth) == ([-1, -1, 0], 2)
