"""What a request asks about its prompt: computed in launch, read in collect."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tidemill.runner.base import StepResult
from tidemill.runner.reports import PromptReport
from tidemill.runner.sampler import Scores, score
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

BROKEN = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The embedding of one token is not a number."""
    folder = tmp_path_factory.mktemp("broken")
    make_llama(folder, vocab_size=320, max_position_embeddings=512, tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return load_model(folder)


@pytest.mark.parametrize(
    "params",
    [
        greedy(2, prompt_logprobs=2),
        SamplingParams(pooling="mean", max_tokens=1),
        SamplingParams(pooling="last"),
    ],
)
def test_a_prompt_that_is_not_a_number_fails_alone(model, params):
    """In the step that computes it, before the prompt is complete, where its logprobs are asked
    for."""
    core, failed, seen = make_core(model, token_budget=16, max_requests=4), [], []
    core.submit(Submit("bad", [20, BROKEN, *range(30, 70)], params))
    core.submit(Submit("good", [20, 21, 22], greedy(2, prompt_logprobs=1)))
    while core.has_work:
        output, refused = core.step()
        failed += [(one.request_id, one.error) for one in refused]
        seen += output.deltas
    core.scheduler.table.check_integrity()
    assert failed == [("bad", "ModelFailed")]
    expected = run(make_core(model), {"good": ([20, 21, 22], greedy(2, prompt_logprobs=1))})["good"]
    assert [token for delta in seen for token in delta.token_ids] == expected.tokens
    assert [delta.prompt_logprobs for delta in seen if delta.prompt_logprobs] == [
        expected.prompt_logprobs
    ]


def test_named_tokens_in_each_place_of_the_prompt(model):
    """In steps of 16 tokens as at once, with the same bits."""
    prompt, named = [*range(20, 60)], (22, 300, 5)
    params = greedy(1, prompt_logprobs=0, prompt_logprob_token_ids=named)
    made = [
        run(make_core(model, token_budget=budget, max_requests=4), {"a": (prompt, params)})[
            "a"
        ].prompt_logprobs
        for budget in (16, 512)
    ]
    assert made[0] == made[1]
    assert [{token for token, _ in entry.top} for entry in made[0]] == [
        {entry.token_id, *named} for entry in made[0]
    ]
    best = run(make_core(model), {"a": (prompt, greedy(1, prompt_logprobs=20))})[
        "a"
    ].prompt_logprobs
    for entry, other in zip(made[0], best, strict=True):
        assert entry.logprob == other.logprob
        known = dict(other.top)
        assert all(
            value == pytest.approx(known[token], abs=1e-5)
            for token, value in entry.top
            if token in known
        )


def test_a_prompt_report_fails_its_row():
    result = StepResult({3: [5], 4: [6]})
    good, bad = torch.tensor([-1.0, float("-inf")]), torch.tensor([-1.0, float("nan")])
    for row, chosen in ((3, good), (4, bad), (5, bad)):
        scores = Scores(chosen, torch.empty(2, 0), torch.empty(2, 0, dtype=torch.int64))
        PromptReport(row, 0, torch.tensor([8, 9]), scores).read(result)
    PromptReport(6, 0, pooled=torch.tensor([1.0, float("inf")])).read(result)
    assert result.tokens == {3: [5], 4: [-1], 5: [-1], 6: [-1]}
    assert [(entry.token_id, entry.logprob) for entry in result.prompt_logprobs[3]] == [
        (8, -1.0),
        (9, float("-inf")),
    ]


def test_the_best_are_in_order_of_value_then_token():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    entries = score(logits, torch.tensor([2, 5]), 6).entries([2, 5], [5, 2])
    assert [token for token, _ in entries[0].top] == [1, 3, 2, 4, 5]
    assert entries[1].top[0][0] == 5
    assert len(entries[1].top) == 2
    assert entries[0].logprob == pytest.approx(entries[0].top[2][1])
