"""A grammar applies to what follows the reasoning. The model's weights are random; a bias makes the
reasoning end somewhere."""

import json
import re

import numpy as np
import pytest

from tests.helpers import byte_tokenizer, load_model, run, structured_core
from tidemill.engine.parts.structured import AfterReasoning, StructuredOutput
from tidemill.frontend.structured import BACKENDS, Grammars
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.sampling import Grammar, Reasoning, SamplingParams
from tidemill.types.wire import Resumed, Submit

OPEN, CLOSED = Reasoning("<think>", "</think>", True), Reasoning("<think>", "</think>", False)
TIDE = Grammar(
    "json_schema",
    json.dumps({"type": "array", "items": {"enum": ["ebb", "flow"]}, "minItems": 2, "maxItems": 2}),
)
ANSWERS = {
    json.dumps([a, b], separators=(", ", ": ")) for a in ("ebb", "flow") for b in ("ebb", "flow")
}


@pytest.fixture(scope="module")
def tokenizer(thinking_folder):
    return Tokenizer.load(thinking_folder)


@pytest.fixture(scope="module")
def model(thinking_folder):
    return load_model(thinking_folder)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def ask(tokenizer, reasoning=OPEN, seed=3, bias=4.0, **more):
    (end,) = tokenizer.encode("</think>", add_special=False)
    given = {
        "max_tokens": 200,
        "seed": seed,
        "grammar": TIDE,
        "reasoning": reasoning,
        "logit_bias": {end: bias},
        "ignore_eos": True,
    }
    return [1, 2, 3], SamplingParams(**given | more)


def bias_of(tokenizer, biases):
    return {tokenizer.encode(text, add_special=False)[0]: bias for text, bias in biases.items()}


def parts(tokenizer, tokens):
    thought, ending, answer = tokenizer.decode(tokens, skip_special=False).partition("</think>")
    assert ending
    return thought, answer.removesuffix("</s>")


def test_samples_chunks_cache_and_preemption_change_nothing(
    model, thinking_folder, tokenizer, backend
):
    def answers(asks, **options):
        return run(
            structured_core(model, thinking_folder, backend, **options),
            asks,
            eos=tokenizer.eos_token_ids,
        )

    mine = ask(tokenizer, n=3)
    alone = answers({"x": mine})
    thoughts = set()
    for answer in alone.values():
        thought, written = parts(tokenizer, answer.tokens)
        thoughts.add(thought)
        assert re.sub(", *", ", ", written) in ANSWERS
        assert answer.finish_reason == "stop"
    assert len(thoughts) > 1
    assert max(map(len, thoughts)) > 3
    crowd = {
        f"o{i}": ([7 + i] * 60, SamplingParams(max_tokens=60, seed=i, ignore_eos=True))
        for i in range(6)
    }
    crowded = answers(
        crowd | {"x": mine}, kv_memory_bytes=200 * 2**10, max_context=220, token_budget=64
    )
    assert {name: crowded[name].tokens for name in alone} == {
        name: answer.tokens for name, answer in alone.items()
    }


@pytest.mark.parametrize(
    ("reasoning", "biases"),
    [(OPEN, {"</think>": 4.0}), (CLOSED, {"<think>": 20.0, "</think>": 50.0})],
)
def test_another_engine_goes_on_anywhere(
    model, thinking_folder, tokenizer, backend, reasoning, biases
):
    """Here and there in the reasoning, everywhere at its end and in the answer."""
    core = structured_core(model, thinking_folder, backend)
    how = ask(tokenizer, reasoning, logit_bias=bias_of(tokenizer, biases))
    whole = run(core, {"x": how}, eos=tokenizer.eos_token_ids)["x"].tokens
    assert parts(tokenizer, whole)[1]
    (mark,) = tokenizer.encode("</think>", add_special=False)
    end = whole.index(mark)
    for num in sorted({*range(1, end, 6), *range(max(end - 1, 1), len(whole))}):
        core.submit(
            Submit("y", *how, list(tokenizer.eos_token_ids), resumed=[Resumed(0, whole[:num])])
        )
        rest = []
        while core.has_work:
            output, failed = core.step()
            assert not failed
            rest += [token for delta in output.deltas for token in delta.token_ids]
        assert whole[:num] + rest == whole


def test_reasoning_that_fills_max_tokens(model, thinking_folder, tokenizer, backend):
    core = structured_core(model, thinking_folder, backend)
    answer = run(
        core, {"x": ask(tokenizer, bias=-100.0, max_tokens=40)}, eos=tokenizer.eos_token_ids
    )["x"]
    assert (len(answer.tokens), answer.finish_reason) == (40, "length")
    assert "ebb" not in tokenizer.decode(answer.tokens)
    assert not core.part(StructuredOutput)


def test_reasoning_is_not_ended_by_the_end_of_the_text(model, thinking_folder, tokenizer, backend):
    """The model wants to stop within its reasoning: the answer would be empty."""
    (end,), (mark,) = tokenizer.eos_token_ids, tokenizer.encode("</think>", add_special=False)
    how = ask(tokenizer, logit_bias={end: 100.0, mark: 90.0}, ignore_eos=False)
    core = structured_core(model, thinking_folder, backend)
    text = tokenizer.decode(run(core, {"x": how}, eos=tokenizer.eos_token_ids)["x"].tokens)
    assert re.sub(", *", ", ", text.partition("</think>")[2]) in ANSWERS


def test_the_output_may_open_the_reasoning_or_not(model, thinking_folder, tokenizer, backend):
    """A template that leaves it to the model: the first token is <think>, or what the grammar
    allows."""
    core = structured_core(model, thinking_folder, backend)
    for biases, thought in (
        ({"[": 100.0}, ""),
        ({"<think>": 20.0, "</think>": 50.0}, "<think></think>"),
    ):
        how = ask(tokenizer, CLOSED, logit_bias=bias_of(tokenizer, biases))
        text = tokenizer.decode(run(core, {"x": how}, eos=tokenizer.eos_token_ids)["x"].tokens)
        assert text.startswith(thought)
        assert re.sub(", *", ", ", text.removeprefix(thought)) in ANSWERS


def follow(matcher, tokenizer, text):
    for token in tokenizer.encode(text, add_special=False):
        mask = matcher.mask()
        assert mask[token // 32] >> (token % 32) & 1, text
        matcher.take([token])


def allowed(matcher, tokenizer):
    mask = matcher.mask()
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {tokenizer.token_text(int(token)) for token in np.flatnonzero(bits)}


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    """Without tokens for the marks: they come byte by byte."""
    path = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(path)
    return path


def test_marks_of_several_tokens(byte_folder, backend):
    tokenizer = Tokenizer.load(byte_folder)
    grammars = Grammars.of(backend, tokenizer, 320)

    def matcher(choices, reasoning=CLOSED):
        return AfterReasoning(
            grammars.matcher(Grammar("choice", json.dumps(choices))), reasoning, tokenizer, 320
        )

    made = matcher(["yes", "<no>"])
    assert allowed(made, tokenizer) == {"y", "<"}
    follow(made, tokenizer, "<")
    assert allowed(made, tokenizer) == {"n", "t"}
    follow(made, tokenizer, "no>")
    assert made.is_over
    assert not made.error

    made = matcher(["yes", "<no>"])
    follow(made, tokenizer, "<th")
    assert allowed(made, tokenizer) == {"i"}
    follow(made, tokenizer, "ink>hm</thi</think")
    (end,) = tokenizer.eos_token_ids
    assert np.unpackbits(made.mask().view(np.uint8), bitorder="little")[:320].tolist() == [
        token != end for token in range(320)
    ]
    assert not made.is_over
    follow(made, tokenizer, ">")
    assert allowed(made, tokenizer) == {"y", "<"}
    follow(made, tokenizer, "<no>")
    assert made.is_over


def test_a_token_that_ends_the_reasoning_and_begins_the_answer(tmp_path, backend):
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    byte_tokenizer(tmp_path)
    made = Backend.from_file(str(tmp_path / "tokenizer.json"))
    made.add_tokens([AddedToken(text, normalized=False) for text in ("think>\n\n", "think>ye")])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("hm</think>\n\nyes", "hm</think>yes"):
        grammar = Grammars.of(backend, tokenizer, 320).matcher(Grammar("choice", '["yes"]'))
        matcher = AfterReasoning(grammar, OPEN, tokenizer, 320)
        assert len(tokenizer.encode(text, add_special=False)) < len(text) - 5
        follow(matcher, tokenizer, text)
        assert matcher.is_over
        assert not matcher.error


def test_a_budget_ends_the_reasoning(model, thinking_folder, tokenizer, backend):
    """After so many tokens, without a grammar as well as before one, and resumed anywhere."""
    core = structured_core(model, thinking_folder, backend)
    (mark,) = tokenizer.encode("</think>", add_special=False)
    for budget in (0, 5):
        free = ask(
            tokenizer,
            Reasoning("<think>", "</think>", True, budget),
            bias=-100.0,
            max_tokens=20,
            grammar=None,
        )
        tied = ask(tokenizer, Reasoning("<think>", "</think>", True, budget), bias=-100.0)
        made = run(core, {"free": free, "tied": tied}, eos=tokenizer.eos_token_ids)
        whole = made["free"].tokens
        assert whole.index(mark) == made["tied"].tokens.index(mark) == budget
        assert len(whole) == 20
        assert re.sub(", *", ", ", parts(tokenizer, made["tied"].tokens)[1]) in ANSWERS
        plain = run(
            core,
            {"p": ask(tokenizer, None, bias=-100.0, max_tokens=20, grammar=None)},
            eos=tokenizer.eos_token_ids,
        )
        assert plain["p"].tokens[:budget] == whole[:budget]  # up to there nothing is changed
        for num in (1, 4, 5, 6, 9):
            core.submit(
                Submit("y", *free, list(tokenizer.eos_token_ids), resumed=[Resumed(0, whole[:num])])
            )
            rest = []
            while core.has_work:
                rest += [token for delta in core.step()[0].deltas for token in delta.token_ids]
            assert whole[:num] + rest == whole
    assert not core.part(StructuredOutput)


def test_a_budget_of_marks_of_several_tokens(byte_folder):
    tokenizer = Tokenizer.load(byte_folder)
    made = AfterReasoning(None, Reasoning("<think>", "</think>", False, 4), tokenizer, 320)
    everything = allowed(made, tokenizer)
    follow(made, tokenizer, "<think>abc<")
    for text in "/think>":  # of which the first byte was the model's own
        assert allowed(made, tokenizer) == {text}
        assert made.forced().decode() == "/think>"["/think>".index(text) :]
        follow(made, tokenizer, text)
    assert made.is_done
    assert allowed(made, tokenizer) == everything
    made = AfterReasoning(None, Reasoning("<think>", "</think>", False, 4), tokenizer, 320)
    follow(made, tokenizer, "<thing")  # it does not reason
    assert made.is_done
