"""Models with states of constant size on the GPU at hand, timed: the kernels of one layer, and
engines of realistic sizes with random weights.

    python -m bench.gpu_states [--json out.json] [--models mamba2,mamba,next] [--only kernels,times]
    [--token-budget n]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.kernels.cuda.records import HEADER
from tidemill.kernels.cuda.scan import CudaStates, StateLists
from tidemill.kernels.cuda.tuning import time_us
from tidemill.kernels.state import PagedStates, ScanInputs, StateWeights, TorchStates
from tidemill.models.registry import model_class
from tidemill.runner.cuda_work import make_work, padded, state_sequences
from tidemill.types.cache_layout import StateLayout
from tidemill.types.model_config import StateSpec
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.checkpoint import open_checkpoint

SPECS = {
    "mamba": StateSpec(kind="mamba", num_heads=80, head_dim=64, state_size=16, rank=160),
    "mamba2": StateSpec(kind="mamba2", num_heads=80, head_dim=64, state_size=128, norm_size=5120),
    "delta": StateSpec(
        kind="delta", num_heads=32, head_dim=128, state_size=128, num_groups=16, norm_size=128
    ),
}
MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {  # Mamba-2 2.7B
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64,
        "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4, "vocab_size": 50288,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
    "mamba": {  # Mamba 2.8B
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 2560, "num_hidden_layers": 64,
        "intermediate_size": 5120, "state_size": 16, "time_step_rank": 160, "conv_kernel": 4, "vocab_size": 50280,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
    "next": {  # the first 12 of Qwen3-Next 80B's 48 layers
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 12,
        "intermediate_size": 5120, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
        "partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}  # fmt: skip
INTERVAL = 256
Items = list[tuple[int, int, int]]  # row, start, count


class Layer:
    """One layer's kernels over pages in no order, and random inputs of a sequence for each row."""

    def __init__(
        self, spec: StateSpec, num_rows: int, num_tokens: int, device: str = "cuda"
    ) -> None:
        torch.manual_seed(1)
        self.spec, self.device = spec, device
        size = -(-max(spec.piece_bytes) // 64) * 64
        layout, blocks = StateLayout.pack([spec.piece_bytes], 4 * size), -(-num_tokens // INTERVAL)
        num = num_rows * blocks * layout.block_pages
        # NaN: what others left there
        pool = torch.full((1 + num, layout.page_bytes), 255, dtype=torch.uint8, device=device)
        table = 1 + torch.randperm(num, dtype=torch.int32).view(num_rows, -1).to(device)
        self.paged = PagedStates(pool, list(table.split(blocks, dim=1)), layout, (spec,), INTERVAL)
        is_mamba, heads = spec.kind == "mamba", spec.num_heads
        decay = torch.rand(heads, spec.state_size, spec.head_dim) if is_mamba else torch.rand(heads)
        self.learned = StateWeights(
            conv_KC=torch.randn(spec.kernel, spec.num_channels).to(device) / 2,
            conv_bias_C=None if spec.kind == "delta" else torch.randn(spec.num_channels).to(device),
            decay=-decay.to(device),
            skip_I=None if spec.kind == "delta" else torch.randn(spec.num_inner).to(device),
            step_bias=None if is_mamba else torch.randn(heads).to(device),
            norm_I=torch.randn(spec.num_inner).to(device) if spec.norm_size else None,
            eps=1e-5,
        )
        widths = [spec.num_projected, *((spec.num_inner, 2 * spec.state_size) if is_mamba else ())]
        self.inputs = [
            torch.randn(num_rows, num_tokens, width).bfloat16().to(device) for width in widths
        ]

    def take(self, items: Items) -> list[torch.Tensor]:
        return [
            torch.cat([values[row, start : start + num] for row, start, num in items])
            for values in self.inputs
        ]

    def prepare(self, items: Items, num_programs: int = 64) -> Callable[[], torch.Tensor]:
        """The step's work on the device; what is returned launches it."""
        table = np.array(items, np.int32)
        num, words = int(table[:, 2].sum()), np.zeros(8 * (table[:, 2].sum() + 1000), np.int32)
        work = make_work(table, np.ones(len(items), bool), [], 1, 1 << 30)
        work.state_sequences = state_sequences(table)
        work.write(words, num, 0, (0, 0, 0, num_programs))
        there = torch.from_numpy(words).cuda()
        rows, positions = (there[HEADER + i * padded(num) :][:num] for i in range(2))
        step = CudaStates(self.paged).step(StateLists(rows, positions, there, num_programs))
        projected, *more = self.take(items)

        def run() -> torch.Tensor:
            mixed = step.convolve(0, projected, self.learned)
            return step.scan(0, ScanInputs(mixed, projected, *more), self.learned)

        return run

    def run(self, items: Items, num_programs: int = 64) -> list[torch.Tensor]:
        return list(self.prepare(items, num_programs)().split([num for *_, num in items]))

    def reference(self, num: int) -> torch.Tensor:
        """The first row's tokens in float32, on the CPU."""
        here = Layer(self.spec, 1, num, "cpu")
        here.inputs = [values[:1, :num].cpu().float() for values in self.inputs]
        learned = {f.name: getattr(self.learned, f.name) for f in dataclasses.fields(StateWeights)}
        here_too: dict[str, Any] = {
            name: one.cpu() if isinstance(one, torch.Tensor) else one
            for name, one in learned.items()
        }
        moved = StateWeights(**here_too)
        step = TorchStates(here.paged).plan(np.array([0]), np.array([0]), np.array([num]))
        projected, *more = here.take([(0, 0, num)])
        return step.scan(0, ScanInputs(step.convolve(0, projected, moved), projected, *more), moved)


def time_kernels() -> list[dict[str, Any]]:
    """Of one layer: convolution, recurrence, norm. A decoding sequence reads and writes its state."""
    lines = []
    for kind, spec in SPECS.items():
        for num_rows, num in ((1, 1), (64, 1), (256, 1), (1, 4096), (4, 2048)):
            layer = Layer(spec, num_rows, num + 1)
            run = layer.prepare([(row, 1, num) for row in range(num_rows)], num_rows)
            us = time_us([run], 5)
            rate = 2 * num_rows * sum(spec.piece_bytes) / us / 1e6
            lines.append({"kind": kind, "sequences": num_rows, "tokens": num, "us": us})
            print(
                f"{kind} {num_rows}x{num}: {us:.1f} us, {us / num:.3f} a token; states {rate:.2f} TB/s",
                flush=True,
            )
            del layer, run
    return lines


def profile_steps(
    core: Any, label: str, num: int, length: int, skip: int, num_steps: int
) -> dict[str, Any]:
    """Microseconds a step by kernel, after `skip` steps of so many requests."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    core.scheduler.kv.clear_prefixes()
    for i in range(num):
        params = SamplingParams(temperature=0.0, max_tokens=skip + num_steps + 9, ignore_eos=True)
        core.submit(Submit(str(i), [(7 * i + j) % 1000 + 10 for j in range(length)], params))
    for _ in range(skip):
        core.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            core.step()
        torch.cuda.synchronize()
    spent = defaultdict[str, float](float)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            spent[event.name[:60]] += event.time_range.elapsed_us() / num_steps
    ranked = dict(sorted(spent.items(), key=lambda item: -item[1])[:10])
    print(f"{label}: kernels {sum(spent.values()):,.0f} us a step", flush=True)
    for name, us in ranked.items():
        print(f"  {us:9.1f} us  {name}")
    while core.has_work:
        core.step()
    return {"what": label, "kernels_us": ranked}


def time_model(name: str, token_budget: int | None) -> list[dict[str, Any]]:
    folder, draw = Path(tempfile.mkdtemp()), random.Random(0)
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    checkpoint = open_checkpoint(folder)
    shape = model_class(checkpoint).read_config(checkpoint)
    options = EngineOptions(
        model=str(folder), load_format="dummy", max_context=16384, max_requests=128, token_budget=token_budget,
        kv_memory_bytes=256 * shape.state_bytes + 2**31,
    )  # fmt: skip
    begin = time.perf_counter()
    core = load_core(options)
    per_s = 4.25e12  # what an H200's memory gives
    floor_ms = (
        2e3
        * (
            shape.num_active_parameters
            - (0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size)
        )
        / per_s
    )
    state_ms = 2e3 * shape.state_bytes / per_s
    print(
        f"{name}: ready in {time.perf_counter() - begin:.1f} s; {core.config.token_budget} tokens a step",
        flush=True,
    )

    def run(num: int, length: int, new: int) -> float:
        """Seconds of so many requests."""
        core.scheduler.kv.clear_prefixes()
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        for i in range(num):
            core.submit(Submit(str(i), [draw.randrange(10, 50000) for _ in range(length)], params))
        torch.cuda.synchronize()
        start = time.perf_counter()
        while core.has_work:
            _, failed = core.step()
            assert not failed, failed
        return time.perf_counter() - start

    lines = []
    for num in (1, 64):
        run(num, 128, 4)
        ms = 1e3 * (run(num, 128, 289) - run(num, 128, 33)) / 256
        least = floor_ms + num * state_ms
        lines.append({"model": name, "what": f"decode b{num}", "ms": ms, "least_ms": least})
        print(
            f"{name} decode b{num}: {ms:.3f} ms a step; weights and states once: {least:.3f}",
            flush=True,
        )
    for num in (1, 16):
        run(num, 4096, 1)
        seconds = min(partial(run, num, 4096, 1)() for _ in range(3))
        lines.append(
            {
                "model": name,
                "what": f"prefill {num} x 4096",
                "ms": 1e3 * seconds,
                "tok/s": num * 4096 / seconds,
            }
        )
        print(
            f"{name} prefill {num} x 4096: {1e3 * seconds:.1f} ms, {num * 4096 / seconds:.0f} tok/s",
            flush=True,
        )
    for label, num, length, skip in (
        ("decode b1", 1, 64, 3),
        ("decode b64", 64, 64, 20),
        ("a prompt", 1, 12000, 1),
    ):
        lines.append(
            profile_steps(core, f"{name} {label}", num, length, skip, 4 if length > 1000 else 8)
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    parser.add_argument("--models", default="mamba2", help=f"to be timed, of {', '.join(MODELS)}")
    parser.add_argument("--only", default="kernels,times")
    parser.add_argument("--token-budget", type=int, help="of the timed engines")
    given = parser.parse_args()
    parts, lines = given.only.split(","), list[dict[str, Any]]()
    if "kernels" in parts:
        lines += time_kernels()
    if "times" in parts:
        for name in filter(None, given.models.split(",")):
            lines += time_model(name, given.token_budget)
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
