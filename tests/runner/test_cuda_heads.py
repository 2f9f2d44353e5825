"""Heads and trees of drafts on the GPU's runner, whose kernels are interpreted
(test_cuda_runner.py): tokens and logprobs have the bits that they have without drafts."""

import numpy as np
import pytest
import torch

from tests.helpers import Grower, greedy, guess_with, load_model, run, watch
from tests.runner.test_cuda_runner import folder, ids, on_gpu  # noqa: F401 - fixtures
from tidemill.config import HEADS
from tidemill.errors import ConfigError
from tidemill.runner.cuda_trees import CudaTrees
from tidemill.runner.cuda_work import make_work, parts
from tidemill.runner.spec.heads import Target, new_head
from tidemill.runner.spec.stored import save_draft
from tidemill.sched.plan import StepItem
from tidemill.types.events import DraftsVerified
from tidemill.types.sampling import SamplingParams

SETTINGS = {
    "medusa": {"num_heads": 3},
    "eagle": {"num_heads": 2, "window": 24},
    "exit": {"layer": 1, "rank": 8},
}
REQUESTS = {
    "over a split": (ids(29, 1), greedy(12, logprobs=2)),  # which ends at 32
    "seeded": (
        ids(9, 2),
        SamplingParams(temperature=0.9, seed=4, top_k=20, max_tokens=8, logprobs=1),
    ),
}


@pytest.fixture(scope="module")
def heads(folder, tmp_path_factory):  # noqa: F811
    """A folder for each drafter, of heads that were never trained."""
    path, made = tmp_path_factory.mktemp("heads"), {}
    target = Target(load_model(folder), torch.arange(2, 64, 2))
    for kind, settings in SETTINGS.items():
        for layer in (1,) if kind != "exit" else (1, 2):
            torch.manual_seed(layer)
            head = new_head(kind, 32, settings).requires_grad_(False)
            for value in head.parameters():
                value += torch.randn_like(value) * 0.2
            about = {"least_probability": 0.0, "draft_cost": 0.1, "step_costs": [1.0, 1.01]}
            save_draft(path / kind / ("" if layer == 1 else "exit-2"), head, target, about)
    return {name: str(path / name.partition("-")[0]) for name in HEADS} | made


def verified_by(core):
    seen = watch(core)
    return lambda: [one for event in seen if isinstance(event, DraftsVerified) for one in event.of]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle-tree", "exit"])
def test_heads_change_nothing(on_gpu, heads, name):  # noqa: F811
    """Alone and beside prompts, which come in chunks; greedy, seeded, and with penalties, for which
    drafts are chains."""
    asked = {
        "over a split": REQUESTS["over a split"],
        "avoids": (ids(7, 3), greedy(4, repetition_penalty=1.3)),
    }
    without = run(on_gpu(speculate="off"), asked)
    core = on_gpu(speculate=name, draft_heads=heads[name], adaptive_drafts=False, max_drafts=4)
    verified = verified_by(core)
    assert core.runner.takes_trees == (name in ("medusa", "eagle-tree"))
    assert run(core, asked) == without
    assert sum(num for _, num, _ in verified()) > 8


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"token_budget": 12, "max_requests": 2}])
def test_trees_change_nothing(on_gpu, heads, options):  # noqa: F811
    """Of any shape, over the ends of pages and splits; what is right is found on any branch, and
    goes on from there."""
    without = run(on_gpu(speculate="off", **options), REQUESTS)
    core = on_gpu(speculate="medusa", draft_heads=heads["medusa"], **options)
    known = {tuple(prompt): without[name].tokens for name, (prompt, _) in REQUESTS.items()}
    guess_with(core, Grower(known, vocab_size=64))
    verified = verified_by(core)
    assert run(core, REQUESTS) == without
    assert sum(num_right for _, _, num_right in verified()) > 2


def test_what_a_tree_reads():
    """Each draft its own splits from where the tree begins, its ancestors in their order; the known
    part is shared."""
    items = [
        StepItem(0, 0, 40, 5, True, 0, num_drafts=4),
        StepItem(1, 1, 3, 1, True, 0),
        StepItem(2, 2, 600, 4, True, 0, 3),
    ]
    table = np.array([part for item in items for part in parts(item)], np.int32)
    trees = CudaTrees(32, 6, torch.device("cpu"))
    bases = trees.write(items, table, {0: [-1, -1, 0, 2], 2: [-1, -1, 1]})
    assert table[:, 1].tolist() == [40, 41, 41, 42, 43, 3, 600, 601, 601, 602]
    assert trees.places[:10].tolist() == [40, 41, 42, 43, 44, 3, 600, 601, 602, 603]
    assert [row[:4] for row in trees.paths[[4, 9]].tolist()] == [
        [41, 41, 43, 44],
        [601, 602, 603, 2**30],
    ]
    assert trees.paths[[0, 5, 6], 0].tolist() == [2**30] * 3
    pages = np.arange(3 * 16, dtype=np.int32).reshape(3, 16) + 1
    work = make_work(table[:, :3], table[:, 3].astype(bool), [pages], 4, 32, 1, bases)
    assert work.shared[:, 1].tolist() == [4]  # the split before the tree of the third
    assert work.singles[:, 7].tolist() == [1] * len(work.singles)


def test_heads_do_not_go_with_an_address_range(on_gpu, heads):  # noqa: F811
    with pytest.raises(ConfigError, match="draft heads are in graphs of paged attention"):
        on_gpu(speculate="medusa", draft_heads=heads["medusa"], kv_layout="virtual")
