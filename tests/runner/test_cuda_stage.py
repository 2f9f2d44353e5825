"""Stages of a pipeline on a GPU, with interpreted kernels on a CPU: two runners that hand hidden
states on, and what one says."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.helpers import greedy, load_model, make_core, run
from tests.runner.test_cuda_runner import assert_same, folder, ids, on_gpu  # noqa: F401
from tidemill.config import EngineOptions, resolve
from tidemill.distributed.channel import Door, connect
from tidemill.distributed.stages import decide_stages, kv_layers
from tidemill.distributed.world import World
from tidemill.engine.load import core_of
from tidemill.kernels import machine
from tidemill.models.registry import model_class
from tidemill.quant import WeightPlan
from tidemill.runner import cuda_runner
from tidemill.runner.cuda_stage import PipelineStage
from tidemill.runner.make_cuda import make_cuda_runner
from tidemill.runner.worker_group import append, drawn_in, launch
from tidemill.types.sampling import SamplingParams
from tidemill.weights.checkpoint import open_checkpoint


class TwoStages:
    """As a WorkerGroup has them, one after the other."""

    steps_ahead, fallback, mover, loras, no_disk = 0, "", None, None, ""

    def __init__(self, first, last):
        self.first, self.last, self.cache = first, last, first.cache

    def launch(self, plan):
        return launch(self.first, plan), launch(self.last, plan)

    def collect(self, launched):
        first, last = launched
        assert not self.first.collect(first.own).tokens
        result = self.last.collect(last.own)
        append(self.first.state, drawn_in(last, result))
        return result

    def change_pages(self, plan):
        for runner in (self.first, self.last):
            runner.change_pages(plan)


@pytest.mark.slow
@pytest.mark.usefixtures("on_gpu")
def test_stages_say_what_the_cpu_says(folder, tmp_path, monkeypatch):  # noqa: F811
    # slow where kernels are interpreted
    monkeypatch.setattr(cuda_runner.CudaRunner, "compile", lambda self: None)
    asked = {
        "short": ([5, 6, 7], greedy(4, logprobs=2, prompt_logprobs=1)),
        "long": (ids(45, 2), SamplingParams(temperature=0.9, seed=4, max_tokens=3)),
    }
    expected = run(make_core(load_model(folder), max_requests=8), asked)
    checkpoint = open_checkpoint(folder)
    cls = model_class(checkpoint)
    shape = cls.read_config(checkpoint)
    world = World(1, (1, 2))
    options = EngineOptions(
        device="cuda",
        kv_memory_bytes=2**22,
        max_requests=8,
        token_budget=32,
        max_context=128,
        pipeline_parallel=2,
    )
    here = replace(machine.detect(), gpu="none", gpu_bytes=2**36, gpu_free_bytes=2**36, num_gpus=1)
    layers, reason = decide_stages(options, shape, here)
    config = resolve(
        options, shape, here, stages=[kv_layers(shape, world.stage(rank)) for rank in range(2)]
    )
    config = replace(
        config, pipeline_layers=layers, reasons=config.reasons | {"pipeline_layers": reason}
    )
    door = Door(str(tmp_path / "stage"), b"0123456789abcdef")
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(
            connect, str(tmp_path / "stage"), b"0123456789abcdef", "first", 60.0
        )
        first_end = door.accept("last", 60.0)
        last_end = coming.result()
    runners = []
    for rank, ends in enumerate([(None, first_end), (last_end, None)]):
        stage = world.stage(rank)
        model = cls.load(checkpoint, shape, WeightPlan("dense", "cuda"), stage=stage)
        own = replace(config, layout=config.layout.only(kv_layers(shape, stage)))
        runners.append(make_cuda_runner(model, own, PipelineStage(model, own, stage, *ends)))
    core = core_of(model, config, group=TwoStages(*runners), whole=shape)
    assert_same(run(core, asked), expected)
    # from the prefix cache
    assert_same(run(core, {"long": asked["long"]}), {"long": expected["long"]})
    for channel in (first_end, last_end):
        channel.close()
    door.close()
