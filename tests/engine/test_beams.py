"""Beam search: the beams and scores of Transformers, whatever else the engine does meanwhile."""

from collections import Counter

import pytest
import torch

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tests.models import test_families, test_state_models
from tidemill.engine.parts.beams import BeamSearch
from tidemill.errors import InvalidRequest
from tidemill.types import events
from tidemill.types.sampling import Beams, BeamSearchParams, SamplingParams
from tidemill.types.wire import Abort, Resumed, Submit, TokenLogprobs

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.3,
}  # fmt: skip
SETTINGS = [  # width, length penalty, early stopping, ending tokens
    (4, 1.0, False, [1]),
    (3, 0.0, "never", [1, 5]),
    (5, 2.0, True, [1, 5, 9]),
    (2, -1.0, False, [1, 2, 3]),
    (8, 0.7, "never", [1]),
    (16, 1.0, True, [1, 7]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("beams")


@pytest.fixture(scope="module")
def reference(folder):
    return make_llama(folder, seed=2, **SMALL)


@pytest.fixture(scope="module")
def model(reference, folder):
    return load_model(folder)


def ids(num, seed):
    return torch.randint(2, 64, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def beams(width, max_tokens=12, penalty=1.0, early=False, **more):
    return SamplingParams(
        **{"n": width, "max_tokens": max_tokens, "beams": Beams(width, penalty, early)} | more
    )


def search(core, prompt, params, ends=(1,)):
    """Its outputs, best first: tokens, score, finish reason and logprobs."""
    core.submit(Submit("x", prompt, params, list(ends)))
    return collect(core)["x"]


def collect(core, seen=None):
    """Of all requests. `seen`: gets the events."""
    made = {}
    while core.has_work:
        output, failed = core.step()
        assert not failed
        core.scheduler.table.check_integrity()
        if seen is not None:
            seen += output.events
        for delta in output.deltas:
            if delta.finish_reason:
                made.setdefault(delta.request_id, {})[delta.index] = delta
    return {
        name: [
            (one.token_ids, one.score, one.finish_reason, one.logprobs)
            for _, one in sorted(of.items())
        ]
        for name, of in made.items()
    }


@torch.inference_mode()
def expected(reference, prompt, width, penalty, early, ends, max_tokens):
    made = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=width, num_return_sequences=width,
        max_new_tokens=max_tokens, length_penalty=penalty, early_stopping=early, do_sample=False, eos_token_id=ends,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    lengths = (made.beam_indices >= 0).sum(-1).tolist()
    tokens = [
        row[len(prompt) : len(prompt) + num]
        for row, num in zip(made.sequences.tolist(), lengths, strict=True)
    ]
    return tokens, made.sequences_scores.tolist()


@pytest.mark.parametrize(
    ("setting", "num_prompts"),
    [
        (0, 20),
        (1, 4),
        (2, 4),
        *(pytest.param(i, 24, marks=pytest.mark.slow) for i in range(1, len(SETTINGS))),
    ],
)
def test_they_are_transformers_beams(reference, model, setting, num_prompts):
    width, penalty, early, ends = SETTINGS[setting]
    core = make_core(model, max_requests=16, page_size=4, threads=1)
    for seed in range(num_prompts):
        prompt = ids(1 + 3 * seed, seed)
        tokens, scores = expected(reference, prompt, width, penalty, early, ends, 10)
        made = search(core, prompt, beams(width, 10, penalty, early), ends)
        assert [one[0] for one in made] == tokens, seed
        assert [one[1] for one in made] == pytest.approx(scores, abs=1e-4)
        assert [one[2] for one in made] == [
            "stop" if one[0][-1] in ends else "length" for one in made
        ]


@torch.inference_mode()
def diverse(reference, prompt, how, ends, max_tokens):
    """Group beam search, plainly: outputs of all groups by score. Groups choose in turn; each token
    that a beam of an earlier group has chosen in this step costs the penalty."""
    size = how.width // how.groups
    live, found, going = (
        [[([], 0.0)]] * how.groups,
        [[] for _ in range(how.groups)],
        set(range(how.groups)),
    )
    for length in range(1, max_tokens + 1):
        if not going:
            break
        every = [prompt + tokens for group in sorted(going) for tokens, _ in live[group]]
        scores = iter(reference(torch.tensor(every)).logits[:, -1].float().log_softmax(-1))
        chosen = Counter()
        for group in sorted(going):
            logits = torch.stack([next(scores) for _ in live[group]])
            for token, times in chosen.items():
                logits[:, token] -= how.diversity_penalty * times
            ranked = [
                (total + score, tokens + [token])
                for (tokens, total), row in zip(live[group], logits.tolist(), strict=True)
                for token, score in enumerate(row)
            ]
            ranked.sort(key=lambda one: -one[0])
            is_last = length == max_tokens
            ended = [one for one in ranked[:size] if one[1][-1] in ends or is_last]
            found[group] += [
                (total / length**how.length_penalty, tokens) for total, tokens in ended
            ]
            found[group] = sorted(found[group], key=lambda one: -one[0])[:size]
            live[group] = [(tokens, total) for total, tokens in ranked if tokens[-1] not in ends][
                :size
            ]
            enough = len(found[group]) == size
            if is_last or (
                enough
                and (
                    how.early_stopping
                    or live[group][0][1] / length**how.length_penalty <= found[group][-1][0]
                )
            ):
                going.remove(group)
            else:
                chosen.update(tokens[-1] for tokens, _ in live[group])
    return sorted((one for of_group in found for one in of_group), key=lambda one: -one[0])[
        : how.width
    ]


@pytest.mark.parametrize(
    ("how", "ends", "num_prompts"),
    [
        (Beams(4, 1.0, False, 2, 0.8), [1, 5], 20),
        pytest.param(Beams(6, 0.0, True, 3, 2.5), [1, 5, 9], 20, marks=pytest.mark.slow),
        pytest.param(Beams(3, 1.5, False, 3, 0.3), [2], 20, marks=pytest.mark.slow),
    ],
)
def test_groups_are_diverse(reference, model, how, ends, num_prompts):
    core = make_core(model, max_requests=16, page_size=4, threads=1)
    num_other = 0
    for seed in range(num_prompts):
        prompt = ids(1 + seed, seed)
        made = search(core, prompt, SamplingParams(n=how.width, max_tokens=5, beams=how), ends)
        wanted = diverse(reference, prompt, how, ends, 5)
        assert [one[0] for one in made] == [tokens for _, tokens in wanted], seed
        assert [one[1] for one in made] == pytest.approx([score for score, _ in wanted], abs=1e-4)
        if not num_other:
            num_other += [one[0] for one in made] != [
                one[0] for one in search(core, prompt, beams(how.width, 5), ends)
            ]
    assert num_other > 0


def test_groups_among_others_and_in_small_memory(model):
    asked = {
        f"b{i}": (
            ids(10 + i, i),
            SamplingParams(n=4, max_tokens=10, beams=Beams(4, 1.0, False, 2, 0.7)),
        )
        for i in range(3)
    }
    alone = {}
    for name, (prompt, params) in asked.items():
        core = make_core(model, max_requests=8, page_size=4)
        core.submit(Submit(name, prompt, params, [1]))
        alone |= collect(core)
    core = make_core(model, max_requests=8, page_size=4, token_budget=11, kv_memory_bytes=2**15)
    for name, (prompt, params) in asked.items():
        core.submit(Submit(name, prompt, params, [1]))
    assert collect(core) == alone


@pytest.mark.parametrize(
    ("groups", "penalty", "name"),
    [
        (3, 1.0, "groups"),
        (0, 1.0, "groups"),
        (2, 0.0, "Give both"),
        (1, 1.0, "Give both"),
        (2, -1.0, "from 0"),
    ],
)
def test_wrong_groups_are_refused(groups, penalty, name):
    with pytest.raises(InvalidRequest, match=name):
        BeamSearchParams(
            beam_width=4, max_tokens=4, num_beam_groups=groups, diversity_penalty=penalty
        )


@pytest.mark.slow
def test_long_outputs(reference, model):
    core = make_core(model, max_requests=16, page_size=4)
    tokens, scores = expected(reference, ids(9, 1), 6, 1.0, False, [63], 60)
    made = search(core, ids(9, 1), beams(6, 60), [63])
    assert [one[0] for one in made] == tokens
    assert [one[1] for one in made] == pytest.approx(scores, abs=1e-4)


PROMPT = ids(21, 3)
PARAMS = beams(4, 14, logprobs=2)


@pytest.fixture(scope="module")
def alone(model):
    return search(make_core(model, page_size=4), PROMPT, PARAMS)


def test_scores_are_sums_of_logprobs(alone):
    assert len({tuple(tokens) for tokens, *_ in alone}) == 4
    for tokens, score, _, entries in alone:
        assert [entry.token_id for entry in entries] == tokens
        assert all(len(entry.top) == 2 for entry in entries)
        assert sum(entry.logprob for entry in entries) / len(tokens) == pytest.approx(score)


def others(num):
    return {
        f"o{i}": (ids(1 + 7 * i, 50 + i), beams(3, 9) if i % 2 else greedy(15, n=2))
        for i in range(num)
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_budget": 8, "max_requests": 8},
        {"prefix_caching": False, "page_size": 1},
        {"max_requests": 5},  # other beams have some of the slots
        # 30 pages: beams are preempted
        {"kv_memory_bytes": 30 * 4 * 2 * 2 * 16 * 4, "max_context": 64},
        pytest.param({"policy": "static"}, marks=pytest.mark.slow),
        pytest.param({"policy": "prefill-first"}, marks=pytest.mark.slow),
        pytest.param({"policy": "none"}, marks=pytest.mark.slow),
        pytest.param(
            {"prefix_caching": False, "max_requests": 4, "token_budget": 4}, marks=pytest.mark.slow
        ),
    ],
)
def test_among_others_they_are_the_same_bits(model, alone, options):
    core = make_core(model, **{"page_size": 4, "threads": 1} | options)
    for name, (prompt, params) in list(others(4).items()):
        core.submit(Submit(name, prompt, params, [1]))
    core.submit(Submit("x", PROMPT, PARAMS, [1]))
    seen = []
    made = collect(core, seen)
    assert made["x"] == alone
    assert (
        any(isinstance(event, events.Preempted) for event in seen)
        or "kv_memory_bytes" not in options
    )
    assert core.scheduler.kv.num_free_pages == core.scheduler.kv.num_pages


def test_preempted_at_every_step(model, alone):
    """One beam after another loses its pages, also while it waits for the others."""
    core = make_core(model, page_size=4)
    core.submit(Submit("x", PROMPT, PARAMS, [1]))
    made, num = {}, 0
    while core.has_work:
        output, failed = core.step()
        assert not failed
        made |= {
            one.index: (one.token_ids, one.score, one.finish_reason, one.logprobs)
            for one in output.deltas
            if one.score
        }
        running = core.scheduler.running
        if running and num < 40:
            core.scheduler.table.preempt(running[num % len(running)], "test")
            num += 1
        core.scheduler.table.check_integrity()
    assert num > 10
    assert [made[i] for i in range(4)] == alone


@pytest.mark.parametrize(
    "family",
    [
        "Mistral",  # windows
        pytest.param("Gemma3", marks=pytest.mark.slow),
        pytest.param("Mamba", marks=pytest.mark.slow),  # states: forks start from the prefix cache
        pytest.param("Qwen3Next", marks=pytest.mark.slow),
    ],
)
def test_families_with_windows_and_states(family, tmp_path):
    """Against Transformers, and again with preemption at every step."""
    is_state = family in test_state_models.FAMILIES
    reference = test_state_models.make_reference(family) if is_state else test_families.make(family)
    reference.float().eval().save_pretrained(tmp_path)
    model, prompt = load_model(tmp_path), ids(50, 4)
    tokens, scores = expected(reference, prompt, 3, 1.0, False, [1], 12)
    for preempts in (False, True):
        core = make_core(model, max_requests=4, max_context=128, threads=1)
        core.submit(Submit("x", prompt, beams(3, 12), [1]))
        made = {}
        while core.has_work:
            output, failed = core.step()
            assert not failed
            made |= {one.index: one for one in output.deltas if one.score is not None}
            if preempts and core.scheduler.running:
                core.scheduler.table.preempt(core.scheduler.running[-1], "test")
            core.scheduler.table.check_integrity()
        assert [made[i].token_ids for i in range(3)] == tokens
        assert [made[i].score for i in range(3)] == pytest.approx(scores, abs=1e-3)


def test_it_is_one_request(model):
    core = make_core(model, page_size=4)
    core.submit(Submit("x", PROMPT, PARAMS, [1]))
    seen, num_deltas = core.take_events(), 0
    while core.has_work:
        output, _ = core.step()
        seen += output.events
        num_deltas += len(output.deltas)
    count = lambda kind: sum(isinstance(event, kind) for event in seen)  # noqa: E731
    assert (
        count(events.Submitted),
        count(events.FirstToken),
        count(events.Finished),
        count(events.Aborted),
    ) == (1, 1, 1, 0)
    assert {event.request_id for event in seen if hasattr(event, "request_id")} == {"x"}
    assert num_deltas == 5  # it has begun, and four outputs
    reordered = [event for event in seen if isinstance(event, events.BeamsReordered)]
    assert reordered[0].parents == (0, 0, 0, 0)
    assert (
        sum(len(event.parents) - len(set(event.parents)) for event in reordered)
        == count(events.Forked)
        > 4
    )
    steps = [event for event in seen if isinstance(event, events.StepPlanned)]
    assert steps[1].tokens_of == (("x", 4),)


def test_aborted_at_every_step(model):
    core = make_core(model, page_size=4)
    for num_steps in range(8):
        core.submit(Submit("x", PROMPT, PARAMS, [1]))
        for _ in range(num_steps):
            core.step()
        core.take_events()
        core.abort(Abort("x", "test"))
        assert sum(isinstance(event, events.Aborted) for event in core.take_events()) == 1
        core.scheduler.table.check_integrity()
        assert not core.has_work
        assert core.scheduler.kv.num_free_pages == core.scheduler.kv.num_pages


def test_a_beam_whose_logits_are_not_numbers_fails_its_request_alone(model, monkeypatch):
    core = make_core(model, page_size=4)
    core.submit(Submit("y", ids(5, 1), greedy(9)))
    core.submit(Submit("x", PROMPT, PARAMS, [1]))
    for _ in range(4):
        core.step()
    collected = core.runner.collect

    def broken(launched):
        result = collected(launched)
        row = core.scheduler.running[-1].row
        result.tokens[row] = [-1]
        return result

    monkeypatch.setattr(core.runner, "collect", broken)
    _, failed = core.step()
    assert [(one.request_id, one.error) for one in failed] == [("x", "ModelFailed")]
    monkeypatch.undo()
    assert len(collect(core)["y"][0][0]) > 0
    core.scheduler.table.check_integrity()


def test_started_again_by_another_engine(model, alone):
    core = make_core(model, page_size=4)
    resumed = [Resumed(1, []), Resumed(3, [])]
    core.submit(Submit("x", PROMPT, PARAMS, [1], resumed=resumed))
    assert collect(core)["x"] == [alone[1], alone[3]]


def test_row_copies_instead_of_rows_in_full(model, monkeypatch):
    core = make_core(model, page_size=4)
    plans, launch = [], core.runner.launch
    monkeypatch.setattr(core.runner, "launch", lambda plan: plans.append(plan) or launch(plan))
    search(core, PROMPT, PARAMS)
    assert sum(len(plan.new_rows) for plan in plans) == 1
    assert sum(len(plan.row_copies) for plan in plans) > 4


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"beam_width": -1}, "beam_width"),
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 17}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": 1000}, "length_penalty"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"beam_with": 3}, "beam_with"),
    ],
)
def test_wrong_parameters(given, param):
    with pytest.raises(InvalidRequest) as error:
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 8} | given)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"top_p": 0.9}, "top_p"),
        ({"stop": ("x",)}, "stop_token_ids"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"n": 5}, "more than beam_width"),
    ],
)
def test_what_does_not_go_with_beams(given, words):
    with pytest.raises(InvalidRequest, match=words):
        beams(4, **given)


def test_more_beams_than_the_engine_has_slots_or_candidates(model):
    core = make_core(model, max_requests=4)
    with pytest.raises(InvalidRequest, match="needs as many slots"):
        core.submit(Submit("x", PROMPT, beams(5), [1]))
    core = make_core(model, max_requests=16)
    with pytest.raises(InvalidRequest, match="together there may be 20"):
        core.submit(Submit("x", PROMPT, beams(16, stop_token_ids=(2, 3, 4, 5)), [1]))
    assert not core.has_work


def test_no_output_ends_before_min_tokens(model):
    core = make_core(model, page_size=4)
    short = search(core, PROMPT, beams(4, 12), list(range(1, 16)))
    assert min(len(tokens) for tokens, *_ in short) < 4
    made = search(core, PROMPT, beams(4, 12, min_tokens=4), list(range(1, 16)))
    assert min(len(tokens) for tokens, *_ in made) >= 5  # the token that ends it comes after


def test_a_beam_of_one_is_greedy(model):
    core = make_core(model, page_size=4)
    ends = list(range(1, 16))
    answer = run(core, {"y": (PROMPT, greedy(12, logprobs=0))}, eos=tuple(ends))["y"]
    ((tokens, _, reason, _),) = search(core, PROMPT, beams(1), ends)
    assert (tokens, reason) == (answer.tokens, answer.finish_reason)


def test_choices_by_hand():
    """Two beams; token 9 ends an output."""
    top = lambda *pairs: TokenLogprobs(0, 0.0, list(pairs))  # noqa: E731
    search = BeamSearch(Beams(2), frozenset({9}), max_tokens=3)
    assert search.advance([top((1, -1.0), (9, -1.5), (2, -2.0))]) == [0, 0]
    assert [(one.score, one.finish_reason) for one in search.outputs] == [(-1.5, "stop")]
    assert [[token.token_id for token in beam.tokens] for beam in search.beams] == [[1], [2]]
    # The second beam's best are worse than the third of the first.
    assert search.advance(
        [top((3, -0.5), (4, -0.6), (9, -0.7)), top((5, -0.1), (6, -9.0), (9, -9.0))]
    ) == [0, 0]
    assert (
        search.advance([top((1, -1.0), (2, -2.0), (9, -8.0)), top((1, -1.0), (2, -2.0), (9, -8.0))])
        == []
    )
    assert [round(one.score, 4) for one in search.outputs] == [-0.8333, -0.8667]
