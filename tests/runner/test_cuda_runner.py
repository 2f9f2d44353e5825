"""The GPU's runner without a GPU: its kernels interpreted, in float32, on a device that is the CPU
under another name. Graphs are steps that run again. What it says must be what the CPU's engine
says, whose kernels and order of work are others."""

import contextlib
import importlib
import random
from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.overrides import TorchFunctionMode

from tests.helpers import (
    Answer,
    Guesser,
    greedy,
    guess_with,
    load_model,
    make_core,
    make_llama,
    run,
    take,
    watch,
)
from tests.kernels.test_cuda import flash_reference
from tests.models.test_bloom import make as make_bloom
from tests.models.test_families import make as make_family
from tests.models.test_moe import make as make_experts
from tests.models.test_state_models import make_reference as make_states
from tidemill import config
from tidemill.config import EngineOptions, resolve
from tidemill.engine import load
from tidemill.engine.load import core_of
from tidemill.engine.parts.drafting import Drafting
from tidemill.errors import ConfigError
from tidemill.kernels import flex_attention, machine
from tidemill.kernels.cuda import attention, attention_lists, flash, gemm, glu, moe, tuning
from tidemill.kernels.cuda import norm as cuda_norm
from tidemill.kernels.flex_attention import FlexAttention
from tidemill.layers import mlp, norm
from tidemill.models import olmo2
from tidemill.models.registry import model_class
from tidemill.planning.calibration import shared_unit
from tidemill.quant import WeightPlan
from tidemill.runner import (
    cuda_attention,
    cuda_graphs,
    cuda_kinds,
    cuda_last,
    cuda_runner,
    cuda_work,
    flash_trial,
    make_cuda,
)
from tidemill.runner.make import make_runner
from tidemill.types.events import DraftsVerified, ExpertsUsed, KernelsFellBack, Preempted
from tidemill.types.sampling import Beams, SamplingParams
from tidemill.types.wire import Abort, Submit
from tidemill.weights.checkpoint import open_checkpoint


class OnCpu(TorchFunctionMode):
    """Whoever asks for the GPU, for pinned memory or for bfloat16 (which numpy does not have) gets
    the next best."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def instead(value):
            if value is torch.bfloat16:
                return torch.float32
            is_gpu = (isinstance(value, torch.device) and value.type == "cuda") or value == "cuda"
            return torch.device("cpu") if is_gpu else value

        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.view:  # of bytes
            return func(*args, **kwargs or {})
        args = tuple(
            instead(value) if isinstance(value, torch.device | torch.dtype | str) else value
            for value in args
        )
        kwargs = {
            name: instead(value) if isinstance(value, torch.device | torch.dtype | str) else value
            for name, value in (kwargs or {}).items()
            if name != "pin_memory"
        }
        return func(*args, **kwargs)


class Stream:
    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


class Again:
    """In the place of a recorded graph."""

    def __init__(self, step):
        self.step, self.size, self.grid, self.second_grid, self.out = (
            step.run,
            step.size,
            step.grid,
            step.second_grid,
            None,
        )

    def replay(self, work=None):
        self.out = self.step()


def captured(step, pool, run_first):
    assert torch.is_inference_mode_enabled()  # tensors of the runner may be changed in it alone
    return Again(step)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda")
    make_llama(
        path, vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048,
    )  # fmt: skip
    return path


@pytest.fixture
def on_gpu(folder, monkeypatch):
    with engines(folder, monkeypatch) as make:
        yield make


@contextlib.contextmanager
def engines(folder, monkeypatch):
    """Yields what makes an engine for the GPU with the given options."""
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(tuning, "find_tiles", lambda *given, **more: None)
    # slow where kernels are interpreted
    monkeypatch.setattr(cuda_runner.CudaRunner, "compile", lambda self: None)
    monkeypatch.setattr(cuda_graphs, "capture", captured)
    for module, name, value in (
        (config.cache, "GPU_PAGE", 16),
        (attention, "BLOCK", 16),
        (attention, "SPLIT", 32),
        (cuda_work, "SPLIT", 32),
        (cuda_work, "_PER_SPLIT", 2),
        (cuda_attention, "SPLIT", 32),
        (cuda_attention, "_SHARED_GRID", 2),
        # graphs of 16 tokens have their last layer, graphs of 32 do not
        (cuda_last, "FROM_TOKENS", 32),
        (cuda_attention, "_decode_grid", lambda num_requests: 3),
        (cuda_attention, "num_prompt_programs", lambda num_tiles, num_kv_heads, by_roles: 2),
        (gemm, "choose_tile", lambda num_rows, num_out, num_in: gemm.Tile(32, 256, 64, 1, 4)),
        (moe, "choose_tile", lambda *shape, **more: gemm.Tile(32, 64, 64, 1, 4)),
    ):
        monkeypatch.setattr(module, name, value)
    with OnCpu():

        def make(path=folder, **options):
            checkpoint = open_checkpoint(path)
            cls = model_class(checkpoint)
            shape = cls.read_config(checkpoint)
            options = {
                "device": "cuda", "kv_memory_bytes": 2**22, "max_requests": 8, "token_budget": 32, "max_context": 128
            } | options  # fmt: skip
            here = replace(machine.detect(), gpu="none", gpu_bytes=2**36, gpu_free_bytes=2**36)
            settled = resolve(EngineOptions(**options), shape, here, shape)
            streaming = load.to_gpu(settled, shape) if settled.weight_memory else None
            plan = WeightPlan(settled.scheme, "cuda", settled.fast_math)
            model = cls.load(checkpoint, shape, plan, streaming=streaming)
            return core_of(model, settled, draft=None if streaming else model)  # drafts for itself

        yield make


def ids(num, seed):
    draw = random.Random(seed)
    return [draw.randrange(2, 64) for _ in range(num)]


COMPILE = cuda_runner.CudaRunner.compile
COMMON = ids(40, 1)
REQUESTS = {
    "short": ([5, 6, 7], greedy(4, logprobs=2, prompt_logprobs=1)),
    "names": (
        [5, 6],
        greedy(
            2,
            logprobs=0,
            logprob_token_ids=(9, 30),
            prompt_logprobs=0,
            prompt_logprob_token_ids=(30, 4),
        ),
    ),
    "long": (ids(75, 2), SamplingParams(temperature=0.9, seed=4, max_tokens=3)),
    "asks": (
        ids(33, 3),  # in two steps
        SamplingParams(
            temperature=1.2,
            seed=5,
            top_k=9,
            top_p=0.9,
            min_p=0.01,
            typical_p=0.95,
            max_tokens=4,
            logprobs=1,
            prompt_logprobs=3,
        ),
    ),
    "avoids": (
        ids(5, 4),
        greedy(
            4,
            presence_penalty=0.7,
            frequency_penalty=0.4,
            repetition_penalty=1.3,
            logit_bias={9: -3.0},
            min_tokens=4,
        ),
    ),
    "holds back": (
        ids(5, 7),
        greedy(4, allowed_token_ids=tuple(range(2, 40)), bad_word_ids=((5,), (6, 7))),
    ),
    "one": ([*COMMON, 8], greedy(3)),
    "other": ([*COMMON, 9, 10], greedy(3)),
    "several": ([11] * 17, SamplingParams(temperature=1.0, seed=6, n=2, max_tokens=3)),
}


@pytest.fixture(scope="module")
def expected(folder):
    return run(make_core(load_model(folder), max_requests=8), REQUESTS)


def assert_same(answers, expected):
    for name, answer in expected.items():
        assert answers[name].tokens == answer.tokens, name
        assert answers[name].finish_reason == answer.finish_reason
        mine, theirs = (
            [entry.logprob for entry in (*one.logprobs, *(one.prompt_logprobs or [])) if entry]
            for one in (answers[name], answer)
        )
        assert mine == pytest.approx(theirs, abs=1e-3)
        if name == "names":
            for one, other in zip(answers[name].logprobs, answer.logprobs, strict=True):
                assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-3)


def test_it_says_what_the_cpu_says(expected, on_gpu):
    core = on_gpu()
    # a calibration measures prefixes that sequences share
    assert shared_unit(core) == attention_lists.SPLIT
    assert_same(run(core, REQUESTS), expected)
    # from the prefix cache
    assert_same(run(core, {"one": REQUESTS["one"]}), {"one": expected["one"]})


def test_beams(folder, on_gpu):
    """Beside another request, which is computed a step ahead. Rows are copied on the device, tokens
    written into them."""
    params = SamplingParams(n=3, max_tokens=4, logprobs=1, beams=Beams(3))
    made = []
    for core in (make_core(load_model(folder), max_requests=8), on_gpu()):
        core.submit(Submit("beams", ids(18, 8), params, [1]))
        core.submit(Submit("other", [5, 6, 7], greedy(5)))
        outputs = {}
        while core.has_work:
            output, failed = core.step()
            assert not failed
            outputs |= {
                one.index: (one.token_ids, one.score)
                for one in output.deltas
                if one.score is not None
            }
            core.scheduler.table.check_integrity()
        made.append([outputs[i] for i in range(3)])
    on_cpu, on_device = made
    assert [tokens for tokens, _ in on_device] == [tokens for tokens, _ in on_cpu]
    assert [score for _, score in on_device] == pytest.approx(
        [score for _, score in on_cpu], abs=1e-3
    )


@pytest.mark.parametrize(
    ("chance", "sure"),
    [
        (0.6, 1e-30),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(0.6, 1.0), (1.0, 0.9)]),
    ],
)
def test_drafts_change_nothing(expected, on_gpu, chance, sure):
    """Greedy, sampled, with penalties and logprobs; alone and beside prompts. Whether steps wait
    for them or follow them."""
    longer = {
        "loops": ([7, 8, 9] * 6, greedy(9)),
        "avoids": REQUESTS["avoids"],
        "asks": REQUESTS["asks"],
    }
    without = run(on_gpu(speculate="off"), longer)
    drafter = Guesser(
        {tuple(prompt): without[name].tokens for name, (prompt, _) in longer.items()}, chance
    )
    core = guess_with(on_gpu(), drafter)
    core.part(Drafting).sure = sure
    assert run(core, longer) == without
    assert drafter.num_asked


@pytest.mark.slow
def test_a_model_drafts_for_itself(on_gpu):
    """In a runner of its own, whose steps are launched ahead of each other. Every draft is right."""
    longer = {
        "loops": ([7, 8, 9] * 6, greedy(12)),
        "long": (ids(75, 2), SamplingParams(temperature=0.9, seed=4, max_tokens=12)),
    }
    longer |= {name: REQUESTS[name] for name in ("avoids", "asks")}
    without = run(on_gpu(speculate="off"), longer)
    core = on_gpu(draft_model="itself", adaptive_drafts=False, max_drafts=3)
    seen = watch(core)
    assert run(core, longer) == without
    verified = [one for event in seen if isinstance(event, DraftsVerified) for one in event.of]
    assert len(verified) >= 5
    assert all(num == num_right for name, num, num_right in verified if name in ("loops", "long"))


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SMALL_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
IN_TRITON = [
    (norm, cuda_norm.add_rms_norm), (norm, cuda_norm.post_norm), (norm, cuda_norm.add_layer_norm),
    (mlp, glu.activate), (olmo2, cuda_norm.qk_norm),
]  # fmt: skip


@pytest.mark.parametrize(
    "family",
    ["GPT2", "Olmo2", "Phi"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("Phi3 with longrope", "Granite", "Gemma3 with vision", "Olmo with clipping")
    ],
)
def test_families_whose_layers_differ(family, on_gpu, monkeypatch, tmp_path):
    """With the norms and activations in Triton, too."""
    make_family(family, **(SMALL_GPT2 if family == "GPT2" else SMALL)).save_pretrained(tmp_path)
    requests = {
        "long": (ids(20, 2), greedy(2, logprobs=1)),
        "short": ([5, 6, 7], greedy(2, logprobs=1)),
    }
    expected = run(make_core(load_model(tmp_path), max_requests=8, max_context=128), requests)
    for module, op in IN_TRITON:
        monkeypatch.setattr(module, op.__name__, op)
    assert_same(run(on_gpu(tmp_path), requests), expected)


@pytest.mark.parametrize(
    "family",
    ["Qwen3Moe", "GptOss"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("Mixtral", "Qwen2Moe", "Olmoe", "Qwen3Moe top-1", "GraniteMoe")
    ],
)
def test_families_with_experts(family, on_gpu, monkeypatch, tmp_path):
    """Few tokens, which take a way of their own through the experts, and more. The last layer's
    count tokens that it computes."""
    make_experts(family, **SMALL, intermediate_size=32).save_pretrained(tmp_path)
    requests = {
        "long": (ids(20, 2), greedy(2, logprobs=1)),
        "short": ([5, 6, 7], greedy(2, logprobs=1)),
    }
    on_cpu = make_core(load_model(tmp_path), max_requests=8, max_context=128, speculate="off")
    on_cpu.runner.kinds = [on_cpu.runner.whole]  # the last layer, too, counts all tokens
    seen = watch(on_cpu)
    expected = run(on_cpu, requests)
    counted = [expert_tokens(seen)]
    assert_same(run(on_gpu(tmp_path, speculate="off"), requests), expected)
    monkeypatch.setattr(cuda_last, "FROM_TOKENS", 64)
    core = on_gpu(tmp_path, speculate="off")
    seen = watch(core)
    assert_same(run(core, requests), expected)
    counted.append(expert_tokens(seen))
    assert counted[0] == counted[1]
    assert any(map(sum, counted[0].values()))


def expert_tokens(events):
    """By layer, as events say."""
    totals = {}
    for event in (event for event in events if isinstance(event, ExpertsUsed)):
        for layer, counts in event.tokens_of:
            totals[layer] = [
                a + b for a, b in zip(totals.get(layer, [0] * len(counts)), counts, strict=True)
            ]
    return totals


@pytest.mark.slow
def test_alibi(on_gpu, tmp_path):
    make_bloom(vocab_size=64, hidden_size=32, n_layer=1, n_head=2).save_pretrained(tmp_path)
    requests = {
        "long": (ids(40, 2), greedy(2, logprobs=1)),
        "short": ([5, 6, 7], greedy(2, logprobs=1)),
    }
    expected = run(make_core(load_model(tmp_path), max_requests=8, max_context=128), requests)
    core = on_gpu(tmp_path)
    assert core.runner.fallback == ""
    assert_same(run(core, requests), expected)


def test_attention_that_no_kernel_has(on_gpu, monkeypatch, tmp_path):
    """Goes to torch's FlexAttention, here not compiled."""
    make_bloom(vocab_size=64, hidden_size=48, n_layer=1, n_head=2).save_pretrained(tmp_path)
    monkeypatch.setattr(make_cuda, "FlexAttention", lambda kv: FlexAttention(kv, is_compiled=False))
    requests = {
        "long": (ids(20, 2), greedy(2, logprobs=1)),
        "short": ([5, 6, 7], greedy(2, logprobs=1)),
    }
    expected = run(make_core(load_model(tmp_path), max_requests=8, max_context=128), requests)
    core = on_gpu(tmp_path, kv_memory_bytes=2**18, max_requests=2, token_budget=16)
    [event] = [event for event in core.take_events() if isinstance(event, KernelsFellBack)]
    assert "not of 24" in event.reason
    assert_same(run(core, requests), expected)


def test_attention_that_does_not_compile_is_refused(on_gpu, monkeypatch, tmp_path):
    make_bloom(vocab_size=64, hidden_size=48, n_layer=1, n_head=2).save_pretrained(tmp_path)

    def fails(*given, **more):
        raise TorchDynamoException("not here")

    monkeypatch.setattr(flex_attention, "_kernel", lambda is_compiled: fails)
    monkeypatch.setattr(cuda_runner.CudaRunner, "compile", COMPILE)
    with pytest.raises(ConfigError, match=r"FlexAttention does not compile for it: not here"):
        on_gpu(tmp_path, kv_memory_bytes=2**18, max_requests=1, token_budget=16)


def test_a_state_in_place_of_keys_and_values(on_gpu, monkeypatch, tmp_path):
    """A prompt beside one that decodes, over more than one state that is kept."""
    monkeypatch.setattr(config.cache, "STATE_INTERVAL", 16)
    make_states(
        "Mamba2",
        tmp_path,
        vocab_size=64,
        num_hidden_layers=1,
        hidden_size=16,
        num_heads=2,
        n_groups=1,
    )
    requests = {
        "short": ([5, 6], greedy(3, logprobs=1)),
        "long": (ids(17, 2), greedy(2, logprobs=1)),
    }
    expected = run(make_core(load_model(tmp_path), max_requests=8, max_context=128), requests)
    assert_same(run(on_gpu(tmp_path, max_requests=2, token_budget=16), requests), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mamba", "Mamba2", "Qwen3Next"])
def test_families_with_states(family, on_gpu, monkeypatch, tmp_path):
    """A prompt in two steps beside one that decodes, over several states that are kept; then from
    the prefix cache."""
    monkeypatch.setattr(config.cache, "STATE_INTERVAL", 16)
    make_states(family, tmp_path)
    requests = {
        "long": (ids(38, 2), greedy(2, logprobs=1)),
        "short": ([5, 6, 7], greedy(3, logprobs=1)),
    }
    expected = run(make_core(load_model(tmp_path), max_requests=8, max_context=128), requests)
    core = on_gpu(tmp_path, max_requests=2, page_size=16)
    together = run(core, requests)
    assert_same(together, expected)
    again = run(core, {"long": requests["long"]})["long"]
    assert again.last.num_cached == 32
    assert again == together["long"]  # bit for bit


def test_what_runs_before_the_first_request_leaves_nothing_behind(expected, on_gpu, monkeypatch):
    """Every kernel is compiled and run before the graphs are captured, as at a real start."""
    monkeypatch.setattr(cuda_runner.CudaRunner, "compile", COMPILE)
    core = on_gpu(max_requests=1, token_budget=16)
    assert_same(run(core, {"long": REQUESTS["long"]}), {"long": expected["long"]})


def test_prefill_first_with_a_prompt_beyond_the_budget(expected, on_gpu):
    """Budget 32, prompt 75: no graph is larger than the budget."""
    core = on_gpu(policy="prefill-first")
    assert_same(
        run(core, {"long": REQUESTS["long"], "one": REQUESTS["one"]}),
        {name: expected[name] for name in ("long", "one")},
    )


def test_preempted_and_aborted_while_steps_are_in_flight(folder, on_gpu, monkeypatch):
    """Somebody leaves in the middle; then a request has to make room for a more important one."""
    requests = {"low": (ids(70, 1), greedy(4)), "high": (ids(60, 2), greedy(3))}
    core = on_gpu(kv_memory_bytes=8 * 16 * 2 * 2 * 16 * 2, prefix_caching=False)
    seen, answers = [], {name: Answer() for name in requests}
    monkeypatch.setattr(core.scheduler.table, "_emit", seen.append)
    core.submit(Submit("leaves", ids(20, 9), greedy(50)))
    for _ in range(3):
        core.step()
    core.abort(Abort("leaves", "left"))
    for name, priority in (("low", 1), ("high", 0)):
        core.submit(Submit(name, *requests[name], priority=priority))
        for _ in range(4):
            take(core, answers)
    while core.has_work:
        take(core, answers)
    core.scheduler.table.check_integrity()
    assert_same(answers, run(make_core(load_model(folder)), requests))
    assert [event.request_id for event in seen if isinstance(event, Preempted)] == ["low"]


@pytest.mark.parametrize(("is_right", "ours_us"), [(True, 20.0), (False, 20.0), (True, 9.0)])
def test_flash_attention_is_tried_first(expected, on_gpu, monkeypatch, is_right, ours_us):
    """It is taken if it agrees and is faster."""
    calls = []

    def forward(q, k, v, **more):
        calls.append(q.shape[0])
        flash_reference(q, k, v if is_right else -v, **more)

    def timed(replay, graph, work):
        calls.clear()
        replay(graph, work)
        return 10.0 if calls else ours_us

    monkeypatch.setattr(flash, "forward", lambda: forward)
    for module, name, value in (
        (flash_trial, "FROM_TOKENS", 20),
        (cuda_kinds, "FROM_TOKENS", 20),
        (flash_trial, "_TRIAL", 32),
        (flash_trial, "time_replay", timed),
    ):
        monkeypatch.setattr(module, name, value)
    core = on_gpu(fast_math=True)
    is_taken = is_right and ours_us > 10
    assert core.runner.flash.is_taken == is_taken, core.runner.flash.why
    if is_taken:
        calls.clear()
        assert_same(run(core, {"long": REQUESTS["long"]}), {"long": expected["long"]})
        # two steps; of their last layer, only keys and values are computed. The third is too small
        assert calls == [32] * 2


def test_a_trial_stays_within_the_context(on_gpu, monkeypatch):
    """Tables of rotations end there, though pages may go on."""
    seen = []
    monkeypatch.setattr(flash, "forward", lambda: flash_reference)
    monkeypatch.setattr(flash_trial, "FROM_TOKENS", 20)
    monkeypatch.setattr(
        flash_trial,
        "time_replay",
        lambda replay, graph, work: seen.append(work.positions.max()) or 1.0,
    )
    on_gpu(fast_math=True, max_context=100)
    assert 64 <= max(seen) < 100


def test_without_flash_attention(on_gpu, monkeypatch):
    monkeypatch.setattr(
        flash, "forward", lambda: importlib.import_module("flash_attn_that_is_not_there")
    )
    core = on_gpu(fast_math=True, token_budget=1024, max_context=1024)
    assert (
        core.runner.flash.why
        == "cannot be used: ModuleNotFoundError: No module named 'flash_attn_that_is_not_there'"
    )


def test_memory_that_runs_out_at_start_is_explained(tmp_path, monkeypatch):
    make_llama(tmp_path)
    model = load_model(tmp_path)
    here = replace(machine.detect(), gpu="some GPU", gpu_bytes=2**36, gpu_free_bytes=2**36)
    given = resolve(EngineOptions(device="cuda", kv_memory_bytes=2**30), model.config, here)

    def run_out(model, config):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(make_cuda, "make_cuda_runner", run_out)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**28, 2**36))
    with pytest.raises(
        ConfigError, match=r"KV cache 24 MiB.*256 MiB of 64.00 GiB are left"
    ) as caught:
        make_runner(model, given)
    assert "--kv-memory" in caught.value.fix
