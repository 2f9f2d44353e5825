"""The GPU's runner, interpreted, in memory that is not a number wherever a sequence has not
written: fresh buffers, the null page, and pages when they are taken. Nothing of it may reach a
token, whichever features meet."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers import Grower, Guesser, greedy, guess_with, load_model, make_core, run
from tests.models.test_families import make as make_family
from tests.models.test_state_models import make_reference as make_states
from tests.runner.test_cuda_runner import SMALL, OnCpu, assert_same, folder, ids, on_gpu  # noqa: F401 - fixtures
from tidemill import config
from tidemill.kernels.cuda import lanes
from tidemill.kv.pages import PagePool
from tidemill.runner import cuda_runner
from tidemill.runner.cuda_last import LastLayerApart
from tidemill.runner.spec.heads import Target, new_head
from tidemill.runner.spec.stored import save_draft
from tidemill.types.sampling import SamplingParams

COMMON = ids(48, 21)
REQUESTS = {  # which share a prefix longer than any window, and fork
    "forks": (
        [*COMMON, 3, 4, 5],
        SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=5, logprobs=1),
    ),
    "shares": ([*COMMON, 9], greedy(7, logprobs=1)),
    "other": (ids(50, 6), greedy(4, logprobs=1)),
}
WINDOWS = {
    "Mistral": {"sliding_window": 20},
    "Gemma2": {
        "sliding_window": 20,
        "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}
ABOUT_HEADS = {"least_probability": 0.0, "draft_cost": 0.1, "step_costs": [1.0, 1.01]}
NAN = float("nan")


class Stale(TorchFunctionMode):
    """Memory that nobody has written to."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if (
            func in (torch.empty, torch.empty_like, torch.Tensor.new_empty)
            and made.device.type == "cpu"
        ):
            made.fill_(
                NAN
                if made.is_floating_point()
                else -77
                if made.dtype in (torch.int32, torch.int64)
                else 1
            )
        return made


@pytest.fixture
def stale(on_gpu, monkeypatch):  # noqa: F811
    taken, take, take_all = set(), PagePool.take, PagePool.take_all
    monkeypatch.setattr(PagePool, "take", lambda self: (page := take(self), taken.add(page))[0])
    monkeypatch.setattr(
        PagePool,
        "take_all",
        lambda self, num: (pages := take_all(self, num), taken.update(pages))[0],
    )
    change = cuda_runner.CudaRunner.change_pages

    @torch.inference_mode()
    def changed(self, plan):
        self.cache[[0, *sorted(taken)]] = 255 if self.cache.dtype == torch.uint8 else NAN
        taken.clear()
        attention, buffers = self.slots.attention, self.slots.buffers
        entered = [each.entered for each in self.captured if isinstance(each, LastLayerApart)]
        for buffer in (attention.partial, buffers.hidden, buffers.logits, *entered):
            buffer.fill_(NAN)
        assert not attention.done.any()
        change(self, plan)

    monkeypatch.setattr(cuda_runner.CudaRunner, "change_pages", changed)

    def make(*given, **more):
        taken.clear()
        return on_gpu(*given, token_budget=64, max_requests=4, **more)

    with Stale():
        yield make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "how"), [("Gemma2", "drafts"), ("Gemma2", "trees"), ("Mistral", "halves")]
)
def test_windows(family, how, stale, monkeypatch, tmp_path):
    make_family(family, **SMALL | WINDOWS[family]).save_pretrained(tmp_path)
    expected = run(
        make_core(load_model(tmp_path), max_requests=8, max_context=128, page_size=16), REQUESTS
    )
    known, options = (
        {tuple(prompt): expected[name].tokens for name, (prompt, _) in REQUESTS.items()},
        {"speculate": "off"},
    )
    if how == "trees":
        head = new_head("medusa", 32, {"num_heads": 3}).requires_grad_(False)
        save_draft(
            tmp_path / "heads",
            head,
            Target(load_model(tmp_path), torch.arange(2, 64, 2)),
            ABOUT_HEADS,
        )
        options = {"speculate": "medusa", "draft_heads": str(tmp_path / "heads")}
    elif how == "halves":
        monkeypatch.setattr(lanes, "new_context", OnCpu)
        options |= {"nano_batching": "on"}
    core = stale(tmp_path, **options)
    guess_with(core, Grower(known, vocab_size=64) if how == "trees" else Guesser(known))
    assert_same(run(core, REQUESTS), expected)


@pytest.mark.slow
def test_states(stale, monkeypatch, tmp_path):
    monkeypatch.setattr(config.cache, "STATE_INTERVAL", 16)
    make_states("Qwen3Next", tmp_path)
    requests = {name: REQUESTS[name] for name in ("forks", "shares")}
    expected = run(make_core(load_model(tmp_path), max_requests=8, max_context=128), requests)
    assert_same(run(stale(tmp_path, page_size=16), requests), expected)
