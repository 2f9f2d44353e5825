"""Ranks that share a model with experts on GPUs, with interpreted kernels on a CPU: ranks are
threads, and take turns."""

from dataclasses import replace

import pytest

from tests.helpers import greedy, load_model, make_core, run
from tests.models.test_moe import make as make_experts
from tests.parallel.threads import run_ranks
from tests.runner.test_cuda_runner import SMALL, OnCpu, assert_same, folder, ids, on_gpu  # noqa: F401
from tidemill.config import EngineOptions, resolve
from tidemill.distributed.cuts import part_config
from tidemill.distributed.world import World
from tidemill.engine.load import core_of
from tidemill.kernels import machine
from tidemill.models.registry import model_class
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import open_checkpoint


@pytest.mark.usefixtures("on_gpu")
# a shared expert; biases
@pytest.mark.parametrize("family", ["Qwen2Moe", pytest.param("GptOss", marks=pytest.mark.slow)])
@pytest.mark.parametrize("expert_parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts_on_two_ranks(family, expert_parallel, tmp_path):
    make_experts(
        family, **SMALL | {"num_key_value_heads": 2}, intermediate_size=32
    ).save_pretrained(tmp_path)
    asked = {
        "long": (ids(20, 2), greedy(2, logprobs=1)),
        "short": ([5, 6, 7], greedy(2, logprobs=1)),
    }
    expected = run(
        make_core(load_model(tmp_path), max_requests=8, max_context=128, speculate="off"), asked
    )
    checkpoint = open_checkpoint(tmp_path)
    cls = model_class(checkpoint)
    shape = cls.read_config(checkpoint)
    options = EngineOptions(
        device="cuda", kv_memory_bytes=2**22, max_requests=8, token_budget=32, max_context=128, speculate="off",
        tensor_parallel=2, expert_parallel=expert_parallel, nano_batching="off",
    )  # fmt: skip
    here = replace(machine.detect(), gpu="none", gpu_bytes=2**36, gpu_free_bytes=2**36, num_gpus=1)
    world = World(2, (shape.num_layers,))

    def work(shard):
        with OnCpu():
            own = part_config(shape, world.part(shard.rank), expert_parallel)
            config = resolve(options, shape, here, own)
            plan = WeightPlan(config.scheme, "cuda", shard=shard, expert_parallel=expert_parallel)
            model = cls.load(checkpoint, shape, plan)
            core = core_of(model, config)
            return run(core, asked), run(core, {"long": asked["long"]})["long"]

    (first, alone), (second, _) = run_ranks(2, work)
    assert first == second
    assert first["long"] == alone
    assert_same(first, expected)
