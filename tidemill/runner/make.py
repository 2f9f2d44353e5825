"""The runner for a device."""

from __future__ import annotations

from typing import cast

import torch

from tidemill.config import EngineConfig, fmt_bytes
from tidemill.errors import ConfigError
from tidemill.models.base import CausalLM, Model
from tidemill.runner.base import Runner
from tidemill.runner.make_cpu import make_cpu_runner
from tidemill.runner.page_moves import CpuMover, Outside, PageMover


def make_runner(model: Model, config: EngineConfig) -> Runner:
    if config.device != "cuda":
        return make_cpu_runner(model, config)
    from tidemill.runner.cuda_encoder import CudaEncoder  # needs Triton
    from tidemill.runner.make_cuda import make_cuda_runner

    try:
        if model.config.pooler is not None:
            return CudaEncoder(model, config)
        return make_cuda_runner(cast(CausalLM, model), config)
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"The GPU's memory ran out at start: weights {fmt_bytes(config.weight_bytes)}, KV cache "
            f"{fmt_bytes(config.kv_bytes)}, activations {fmt_bytes(config.activation_bytes)}; "
            f"{fmt_bytes(free)} of {fmt_bytes(total)} are left.",
            fix=f"Give less than {fmt_bytes(config.kv_bytes)} with --kv-memory, or stop what else uses the GPU.",
        ) from error


def make_mover(runner: Runner, config: EngineConfig, outside: Outside) -> PageMover:
    """The mover of pages between the device, host memory, disk and other engines."""
    pages = runner.cache.flatten(1).view(torch.uint8)
    assert pages.shape[1] == config.page_bytes or config.num_ranks > 1  # ranks may have fewer heads
    if config.device != "cuda":
        return CpuMover(pages.numpy(), config.host_slots, outside)
    from tidemill.runner.cuda_moves import CudaMover

    return CudaMover(pages, config.host_slots, outside)
