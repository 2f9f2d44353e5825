"""Models cut over ranks, which are threads here: the tokens of one process."""

import pytest

from tests.helpers import Answer, greedy, load_model, make_core, make_llama, run
from tests.models.test_llama import prompts
from tests.parallel.threads import run_ranks
from tidemill.models.registry import model_class
from tidemill.parallel.shard import Shard
from tidemill.quant import SCHEMES, WeightPlan
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.weights.checkpoint import open_checkpoint

NEAR_TIE = 1e-4


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    """A recording belongs to the process, not to a thread."""
    monkeypatch.setattr(CpuRunner, "_record", lambda runner: None)


def load_rank(path, shard: Shard, dtype: str = "float32", expert_parallel: bool = False):
    checkpoint = open_checkpoint(path)
    cls = model_class(checkpoint)
    return cls.load(
        checkpoint, cls.read_config(checkpoint), WeightPlan(SCHEMES[dtype], shard=shard, expert_parallel=expert_parallel)
    )


def ask(num: int, num_tokens: int, vocab_size: int):
    return {name: (prompt, greedy(num_tokens, logprobs=2)) for name, prompt in prompts(num, vocab_size).items()}


def excused(answers: dict[str, Answer], expected: dict[str, Answer]) -> int:
    """How many sequences differ from a near-tie on. Any other difference fails."""
    num = 0
    for name, answer in expected.items():
        got = answers[name].tokens
        assert len(got) == len(answer.tokens)
        at = next((i for i, pair in enumerate(zip(got, answer.tokens, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            best = answer.logprobs[at].top
            assert abs(best[0][1] - best[1][1]) < NEAR_TIE, (name, at, best)
            num += 1
    return num


def check(
    path, size: int, num_prompts: int = 2, num_tokens: int = 6, dtype: str = "float32", expert_parallel: bool = False, **options
):
    """Tokens of `size` ranks and of one process."""
    whole = load_model(path, dtype)
    requests = ask(num_prompts, num_tokens, whole.config.vocab_size)
    expected = run(make_core(whole, **options), requests)

    def work(shard):
        model = load_rank(path, shard, dtype, expert_parallel)
        return model, run(make_core(model, **options), requests)

    ranks = run_ranks(size, work)
    assert all(answers == ranks[0][1] for _, answers in ranks)
    assert excused(ranks[0][1], expected) <= 0.02 * num_prompts * num_tokens
    return whole, [model for model, _ in ranks]


def test_llama(tmp_path):
    make_llama(tmp_path)
    check(tmp_path, 2)
