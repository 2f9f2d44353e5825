"""Rows of embeddings in the place of tokens: the same bits alone, among others, in chunks, cached,
preempted and speculated."""

import numpy as np
import pytest
import torch

from tests.engine.test_invariance import PARAMS, ids, others
from tests.helpers import Answer, greedy, make_core, make_llama, run, take, watch
from tests.vectors import VectorLlama, with_vectors
from tidemill.engine.parts.drafting import Drafting
from tidemill.errors import InvalidRequest
from tidemill.kernels import native
from tidemill.quant import SCHEMES, WeightPlan
from tidemill.types import events
from tidemill.types.inputs import EMBEDDINGS, PICTURE, Segment, key_of
from tidemill.types.sampling import Beams, SamplingParams
from tidemill.types.wire import Resumed, Submit, decode_to_engine, encode
from tidemill.weights.checkpoint import open_checkpoint

LEN, PLACES = 150, [(10, 12), (40, 5), (45, 20), (100, 9)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    return make_llama(folder, seed=5), folder


@pytest.fixture(scope="module", params=["native", "torch"])
def model(request, reference):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "lib", None)
        elif native.lib is None:
            pytest.skip(native.why)
        checkpoint = open_checkpoint(reference[1])
        config = VectorLlama.read_config(checkpoint)
        yield VectorLlama.load(checkpoint, config, WeightPlan(SCHEMES["float32"]))


def asked(model, kind=PICTURE, seed=0):
    return with_vectors(ids(model, LEN, 0), PLACES, model.config.hidden_size, kind, seed)


def request(model, params, kind=PICTURE, seed=0):
    prompt, segments, contents = asked(model, kind, seed)
    return prompt, params, segments, contents


@pytest.fixture(scope="module")
def alone(model):
    return {
        name: run(make_core(model), {"x": request(model, params)})["x"]
        for name, params in PARAMS.items()
    }


def test_rows_of_the_table_have_the_bits_of_their_tokens(model, reference):
    prompt, params = ids(model, LEN, 0), greedy(12, logprobs=2)
    expected = run(make_core(model), {"x": (prompt, params)})["x"]
    table, blank, segments, contents = reference[0].model.embed_tokens.weight, list(prompt), [], {}
    for start, length in PLACES:
        content = table[prompt[start : start + length]].detach().numpy().tobytes()
        segments.append(Segment(start, length, PICTURE, key_of(content)))
        contents[key_of(content)] = content
        blank[start : start + length] = [3] * length
    assert run(make_core(model), {"x": (blank, params, segments, contents)})["x"] == expected
    assert run(make_core(model), {"x": (blank, params)})["x"] != expected


def test_vectors_give_what_transformers_computes(model, reference):
    prompt, segments, contents = asked(model)
    embedded = reference[0].model.embed_tokens(torch.tensor([prompt])).detach().clone()
    for each in segments:
        rows = np.frombuffer(contents[each.key], np.float32).reshape(each.length, -1)
        embedded[0, each.start : each.end] = torch.tensor(rows)
    with torch.inference_mode():
        logprobs = reference[0](inputs_embeds=embedded).logits[0, -1].log_softmax(0)
    [entry] = run(make_core(model), {"x": (prompt, greedy(1, logprobs=0), segments, contents)})[
        "x"
    ].logprobs
    assert abs(logprobs[entry.token_id].item() - entry.logprob) < 1e-4
    assert entry.token_id == logprobs.argmax().item()


@pytest.mark.parametrize("kind", PARAMS)
def test_among_others_that_have_some_too(model, alone, kind):
    crowd = others(model, 9) | {f"p{i}": request(model, greedy(5), seed=i % 3) for i in range(6)}
    core = make_core(model, token_budget=128, max_requests=8)
    assert run(core, crowd | {"x": request(model, PARAMS[kind])})["x"] == alone[kind]


@pytest.mark.parametrize(("kind", "chunk"), [("greedy", 20), ("seeded", 23), ("penalties", 64)])
def test_in_chunks_that_no_picture_is_cut_by(model, alone, kind, chunk):
    core, plans = make_core(model, token_budget=chunk, max_requests=1), []
    launch = core.runner.launch
    core.runner.launch = lambda plan: plans.append(plan) or launch(plan)
    assert run(core, {"x": request(model, PARAMS[kind])})["x"] == alone[kind]
    ends = {item.start + item.count for plan in plans for item in plan.items}
    assert not any(start < end < start + length for start, length in PLACES for end in ends)
    assert sum(len(plan.encodes) for plan in plans) == len(PLACES)


def test_vectors_that_may_be_cut_are(model, alone):
    core = make_core(model, token_budget=11, max_requests=1)
    assert run(core, {"x": request(model, PARAMS["seeded"], EMBEDDINGS)})["x"] == alone["seeded"]


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_cached_and_never_found_behind_other_vectors(model, alone, index):
    core = make_core(model, token_budget=64, max_requests=4, prefix_index=index, page_size=16)
    run(core, {"other": request(model, PARAMS["seeded"], seed=1)})
    first = run(core, {"x": request(model, PARAMS["seeded"])})["x"]
    assert first.last.num_cached <= PLACES[0][0]
    again = run(core, {"x": request(model, PARAMS["greedy"])})["x"]
    assert again.last.num_cached >= LEN - 16
    assert (first, again) == (alone["seeded"], alone["greedy"])


def test_a_picture_of_two_requests_is_encoded_once(model):
    core, plans = make_core(model, prefix_caching=False), []
    launch = core.runner.launch
    core.runner.launch = lambda plan: plans.append(plan) or launch(plan)
    answers = run(core, {name: request(model, PARAMS["greedy"]) for name in "ab"})
    assert answers["a"] == answers["b"]
    assert sum(len(plan.encodes) for plan in plans) == len(PLACES)


@pytest.mark.parametrize("caching", [True, False])
def test_after_preemption(model, alone, caching):
    core = make_core(model, token_budget=24, max_requests=2, prefix_caching=caching)
    answers, prompt = {"x": Answer()}, asked(model)
    core.submit(Submit("x", prompt[0], PARAMS["seeded"], segments=prompt[1], contents=prompt[2]))
    num_steps = 0
    while core.has_work:
        take(core, answers)
        num_steps += 1
        if num_steps in (2, 5, 14) and core.scheduler.running:
            core.scheduler.table.preempt(core.scheduler.running[0], "test")
        core.scheduler.table.check_integrity()
    assert answers["x"] == alone["seeded"]


def test_samples_and_beams_have_them_too(model):
    params = SamplingParams(temperature=1.0, max_tokens=8, n=3, seed=9)
    together = run(make_core(model), {"x": request(model, params)})
    for index in range(3):
        lone = run(make_core(model), {"x": request(model, params.sample(index))})["x"]
        assert together["x" if index == 0 else f"x:{index}"] == lone
    beams = SamplingParams(max_tokens=4, temperature=0.0, beams=Beams(2))
    cores = [make_core(model, token_budget=budget, max_requests=4) for budget in (40, 512)]
    assert len({tuple(run(core, {"x": request(model, beams)})["x"].tokens) for core in cores}) == 1


def test_drafts_are_right_and_no_placeholders(model, alone):
    core = make_core(model, speculate="ngram", adaptive_drafts=False, max_drafts=4)
    seen = watch(core)
    propose = core.part(Drafting).drafters[0].propose
    core.part(Drafting).drafters[0].propose = lambda asks: [
        (*tokens[:1], 3, 3) for tokens in propose(asks)
    ]
    answer = run(core, {"x": request(model, PARAMS["greedy"])})["x"]
    assert answer == alone["greedy"]
    drafted = [
        num for event in seen if isinstance(event, events.DraftsVerified) for _, num, _ in event.of
    ]
    assert set(drafted) <= {1}


def test_goes_on_in_another_engine(model, alone):
    """What a client submits again after a crash: the request as it came over the wire, with the
    tokens so far."""
    prompt, segments, contents = asked(model)
    begun = [Resumed(0, alone["seeded"].tokens[:7])]
    sent = encode(
        Submit("x", prompt, PARAMS["seeded"], segments=segments, contents=contents, resumed=begun)
    )
    core, answers = make_core(model, token_budget=40, max_requests=4), {"x": Answer()}
    core.submit(decode_to_engine(sent))
    while core.has_work:
        take(core, answers)
    assert answers["x"].tokens == alone["seeded"].tokens[7:]


def test_what_cannot_be_computed_is_refused(model):
    prompt, segments, contents = asked(model)
    core = make_core(model, token_budget=16, max_requests=2)
    with pytest.raises(InvalidRequest, match="too long"):
        core.submit(Submit("x", prompt, greedy(1), segments=segments, contents=contents))
    with pytest.raises(InvalidRequest, match="bytes of content"):
        make_core(model).submit(Submit("x", prompt, greedy(1), segments=segments))
