"""Rejection acceptance in the engine: sampled output has the distribution of the model, whoever
guesses."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.helpers import (
    Guesser,
    greedy,
    guess_with,
    load_model,
    make_core,
    make_llama,
    run,
    structured_core,
)
from tests.runner.test_sampler import check
from tidemill.config import EngineOptions, resolve
from tidemill.engine.parts.drafting import Drafting
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.kernels import machine as here
from tidemill.kernels.noise import gumbel_argmax
from tidemill.runner.spec import Ask, Drawn
from tidemill.types import events
from tidemill.types.sampling import Grammar, SamplingParams
from tidemill.types.wire import Submit

PROMPT = [(i * i) % 11 + 1 for i in range(12)]
ALLOWED = (2, 5, 9)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=4, allowed_token_ids=ALLOWED)


@dataclass
class SamplingDrafter:
    """It draws drafts with the target's noise, and says what it drew them from."""

    logits_after: Callable[[list[int]], torch.Tensor]  # [V]
    name: str = "sampling"
    is_free: bool = False
    num_given: int = 0

    def propose(self, asks: Sequence[Ask]) -> list[Drawn]:
        made = []
        for ask in asks:
            tokens, seed, probs = list(ask.tokens), torch.tensor([ask.params.seed]), []
            for position in range(len(tokens), len(tokens) + ask.most):
                logits = self.logits_after(tokens)
                tokens.append(int(gumbel_argmax(logits[None], seed, torch.tensor([position]))))
                probs.append(logits.softmax(-1).numpy())
            made.append(Drawn(tokens[len(ask.tokens) :], np.stack(probs)))
            self.num_given += ask.most
        return made

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        pass


class Always(Guesser):
    """It guesses the same token again and again."""

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [[ALLOWED[1]] * ask.most for ask in asks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rejection")
    make_llama(
        path,
        seed=5,
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        initializer_range=0.15,
    )
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder).eval()


def bigrams() -> SamplingDrafter:
    """By a random table of what follows a token."""
    table_VV = torch.full((16, 16), -torch.inf)
    table_VV[:, list(ALLOWED)] = torch.randn(16, 3, generator=torch.Generator().manual_seed(3))
    return SamplingDrafter(lambda ids: table_VV[ids[-1]])


@torch.inference_mode()
def adjusted(reference, prompts: list[list[int]]) -> torch.Tensor:
    """Logits of the next token as SAMPLED adjusts them."""
    logits = reference(torch.tensor(prompts)).logits[:, -1]
    is_allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
    is_allowed[list(ALLOWED)] = True
    return (logits / SAMPLED.temperature).masked_fill(~is_allowed, -torch.inf)


def distribution(reference) -> dict[tuple[int, ...], float]:
    """Of all outputs, by Transformers."""
    probs = {(): 1.0}
    for _ in range(SAMPLED.max_tokens):
        nexts = (
            adjusted(reference, [PROMPT + list(output) for output in probs])
            .double()
            .softmax(-1)
            .tolist()
        )
        probs = {
            (*output, token): prob * row[token]
            for (output, prob), row in zip(probs.items(), nexts, strict=True)
            for token in ALLOWED
        }
    return probs


def outputs(core, num: int) -> Counter:
    requests = {str(i): (PROMPT, replace(SAMPLED, seed=i)) for i in range(num)}
    return Counter(tuple(answer.tokens) for answer in run(core, requests).values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["guesses", "drawn", "no speculation"])
def test_whole_outputs_have_the_distribution_of_the_model(reference, model, kind):
    """Four tokens each: one without a draft, two with one, and one after them, in any mixture of
    right and wrong."""
    if kind == "no speculation":
        core = make_core(model, speculate="off")
    else:
        core = guess_with(
            make_core(model, acceptance="rejection"), bigrams() if kind == "drawn" else Always()
        )
    probs = distribution(reference)
    counts = outputs(core, 4000)
    numbers = {output: i for i, output in enumerate(probs)}
    tokens = torch.tensor([numbers[output] for output in counts.elements()])
    check(tokens, torch.tensor(list(probs.values()), dtype=torch.float64))


@pytest.mark.parametrize("num_others", [0, 5])
def test_the_same_drafts_give_the_same_tokens(model, num_others):
    """Whoever is in the batch, for sampled requests; greedy ones have the tokens of no speculation."""
    options = {"acceptance": "rejection"}
    long = SamplingParams(
        temperature=0.9, top_k=9, seed=5, max_tokens=20, logprobs=2, repetition_penalty=1.2
    )
    requests = {"sampled": (PROMPT, long), "greedy": (PROMPT, greedy(20, logprobs=2))}
    plain = run(make_core(model, speculate="off"), requests)
    core = guess_with(make_core(model, **options), drafter := bigrams())
    expected = {name: run(core, {name: one})[name] for name, one in requests.items()}
    assert drafter.num_given
    assert expected["greedy"] == plain["greedy"]
    assert expected["sampled"].tokens != plain["sampled"].tokens
    requests |= {f"o{i}": (PROMPT[i:], replace(long, seed=i)) for i in range(num_others)}
    found = run(guess_with(make_core(model, **options), bigrams()), requests)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("is_given", "is_always_right"), [(True, True), (False, False)])
def test_a_drafter_that_is_the_model_itself_is_always_right(
    reference, model, is_given, is_always_right
):
    """If it says what it drew from; else its drafts are guesses."""
    core = guess_with(
        make_core(model, acceptance="rejection"),
        SamplingDrafter(lambda ids: adjusted(reference, [ids])[0]),
    )
    if not is_given:
        core.part(Drafting).probs = lambda plan: {}
    core.submit(Submit("x", PROMPT, replace(SAMPLED, max_tokens=25)))
    verified = []
    while core.has_work:
        made = core.step()[0].events
        verified += [
            each for event in made if isinstance(event, events.DraftsVerified) for each in event.of
        ]
    assert len(verified) >= 4
    assert all(num_right == num for _, num, num_right in verified) is is_always_right


def test_grammars_hold(tiny_folder):
    """Masks follow drafts that are wrong, right, and beyond the end."""
    model, tokenizer = load_model(tiny_folder), Tokenizer.load(tiny_folder)
    grammar = Grammar("regex", "the (tide|mill) turns (left|right)")
    params = SamplingParams(temperature=1.0, max_tokens=60, grammar=grammar)
    answers = [f"the {one} turns {two}" for one in ("tide", "mill") for two in ("left", "right")]
    guess = Guesser({tuple(PROMPT): tokenizer.encode(answers[0])}, 0.9)
    core = guess_with(
        structured_core(model, tiny_folder, "llguidance", acceptance="rejection"), guess
    )
    requests = {str(i): (PROMPT, replace(params, seed=i)) for i in range(12)}
    found = run(core, requests, tokenizer.eos_token_ids)
    texts = [
        tokenizer.decode([id for id in one.tokens if id not in tokenizer.eos_token_ids])
        for one in found.values()
    ]
    assert set(texts) <= set(answers)
    assert len(set(texts)) > 1


def test_a_grammar_that_fails_fails_alone(tiny_folder, monkeypatch):
    """Its drafts are in the plan by then."""
    model, tokenizer = load_model(tiny_folder), Tokenizer.load(tiny_folder)
    params = SamplingParams(
        temperature=0.0, max_tokens=8, grammar=Grammar("regex", "the mill turns")
    )
    core = structured_core(model, tiny_folder, "llguidance", acceptance="rejection")
    guess_with(core, Guesser({tuple(PROMPT): tokenizer.encode("the mill turns")}, 1.0))
    core.submit(Submit("x", PROMPT, params))
    core.submit(Submit("other", PROMPT[1:], greedy(8)))
    masks = core.part(StructuredOutput).masks

    def fail_beside_drafts(plan):
        made, broken = masks(plan)
        return made, broken | {
            item.seq: InvalidRequest("no")
            for item in plan.items
            if item.num_drafts and item.seq == 0
        }

    monkeypatch.setattr(core.part(StructuredOutput), "masks", fail_beside_drafts)
    failed, tokens = [], []
    while core.has_work:
        output, refused = core.step()
        failed += [each.request_id for each in refused]
        tokens += [
            token
            for delta in output.deltas
            if delta.request_id == "other"
            for token in delta.token_ids
        ]
    assert failed == ["x"]
    assert len(tokens) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"acceptance": "typical"},
            "acceptance 'typical' is not known. Choose one of exact, rejection.",
        ),
        (
            {"acceptance": "rejection", "device": "cpu", "speculate": "off"},
            "no tokens are guessed. Use --acceptance exact",
        ),
        (
            {"acceptance": "rejection", "device": "cuda"},
            "for the CPU only. Use --acceptance exact.",
        ),
    ],
)
def test_mistakes(model, options, message):
    machine = replaced(here.detect(), gpu="NVIDIA H200", gpu_bytes=2**36, gpu_free_bytes=2**36)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        resolve(EngineOptions(**options), model.config, machine)
    assert caught.value.param == "acceptance"
