"""Costs of adapters on the GPU at hand.

    python -m bench.gpu_lora [--json out.json] [--model llama8b] [--adapters 8] [--rank 16]

mixed_256 with an adapter of all linear layers for every request, beside the same without, in turns;
decode steps of 1, 64 and 256 requests.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_workloads import MODELS, workloads
from bench.lora import make_adapter
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.kernels.cuda.gemm import LIBRARY, choose_tile
from tidemill.kernels.cuda.lora import CudaLora
from tidemill.kernels.pending import with_added
from tidemill.layers.cuda_lora import CudaLoras
from tidemill.quant.cuda import CudaWeight
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.lora import LoraPair


class Lists(CudaLoras):
    """The lists without a model."""

    def __init__(self, num_slots: int, most_tokens: int) -> None:
        super().__init__({}, num_slots, 256, most_tokens, torch.device("cuda"))


SHAPES = (
    (4096, {"q": 4096, "k": 1024, "v": 1024}, ""), (4096, {"o": 4096}, ""), (4096, {"gate": 14336, "up": 14336}, "silu"),
    (14336, {"down": 4096}, ""),
)  # fmt: skip


def time_matmuls(num_adapters: int, rank: int) -> None:
    """Microseconds of the linear layers of llama8b, without adapters and with. Rows have adapters
    in turn, as requests that decode, or in stretches of 256, as prompts."""
    device = torch.device("cuda")
    draw = partial(torch.randn, device=device)
    for num_in, outs, act in SHAPES:
        num_out = sum(outs.values())
        weights = [
            CudaWeight(draw(num_out, num_in, dtype=torch.bfloat16), None, False, act)
            for _ in range(4)
        ]
        for num_rows in (1, 16, 64, 128, 192, 256, 512, 2048):
            lists = Lists(num_adapters, num_rows)
            mades = [
                CudaLora(num_in, outs, lists, num_adapters, rank, act, device, torch.bfloat16)
                for _ in weights
            ]
            for made in mades:
                for slot in range(num_adapters):
                    made.put(
                        slot,
                        {
                            n: LoraPair(draw(rank, num_in), draw(k, rank), 1.0)
                            for n, k in outs.items()
                        },
                    )
            lists.write(
                np.arange(num_rows) // (256 if num_rows > 256 else 1) % num_adapters, num_rows
            )
            x = draw(num_rows, num_in, dtype=torch.bfloat16)
            pairs = list(zip(weights, mades, strict=True))
            taken = {
                "without": _microseconds(lambda w, _, x=x: w(x), pairs),
                "with": _microseconds(lambda w, m, x=x: m.adapted(x, w), pairs),
                "left to the kernel behind": _microseconds(
                    lambda w, m, x=x: with_added(m.pending(x, w)), pairs
                ),
            }
            tile = choose_tile(num_rows, num_out, num_in)
            said = ", ".join(f"{name} {us:.1f}" for name, us in taken.items())
            print(
                f"{num_in} -> {num_out}, {num_rows} rows, {'library' if tile is LIBRARY else tile}: {said}",
                flush=True,
            )


def _microseconds(work: Any, pairs: list[tuple[CudaWeight, CudaLora]]) -> float:
    """For one of the weights with its adapters, which a CUDA graph takes in turn."""
    work(*pairs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pair in pairs:
            work(*pair)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 100 / len(pairs)


def run_workload(
    core: EngineCore, requests: list[tuple[list[int], int]], num_adapters: int
) -> float:
    """Seconds."""
    core.scheduler.kv.clear_prefixes()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i, (prompt, length) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        core.submit(
            Submit(str(i), prompt, params, adapter=1 + i % num_adapters if num_adapters else 0)
        )
    while core.has_work:
        _, failed = core.step()
        assert not failed, failed
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    parser.add_argument("--model", default="llama8b", choices=MODELS)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--max-lora-rank", type=int, help="of the engine; if not given, the rank, and at least 16"
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--parts", default="kernels,workloads", help="separated by commas")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if "kernels" in parts:
        time_matmuls(given.adapters, given.rank)
    if "workloads" in parts:
        measure(given)


def measure(given: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[given.model]))
    options = EngineOptions(
        model=str(folder), load_format="dummy", max_context=34816, max_waiting=10**6, max_loras=given.adapters,
        max_lora_rank=given.max_lora_rank or max(given.rank, 16),
    )  # fmt: skip
    begin = time.perf_counter()
    core = load_core(options)
    print(f"{given.model}: ready in {time.perf_counter() - begin:.1f} s", flush=True)
    for i in range(given.adapters):
        path = make_adapter(core, folder / f"lora{i}", given.rank, i)
        begin = time.perf_counter()
        core.part(AdapterStore).load_now(1 + i, f"a{i}", str(path))
        print(f"adapter {i} loaded in {time.perf_counter() - begin:.2f} s", flush=True)
    made = workloads(min(MODELS[given.model]["vocab_size"], 120_000))
    cases = {"mixed_256": made["mixed_256"]}
    cases |= {
        f"decode_b{num}": [(prompt[:128], 128) for prompt, _ in made["decode_b256"][:num]]
        for num in (1, 64, 256)
    }
    cases["prefill_4k"] = made["prefill_4k"][:16]
    lines = []
    for name, requests in cases.items():
        run_workload(core, requests[:8], given.adapters)
        times: dict[int, list[float]] = {0: [], given.adapters: []}
        for _ in range(given.turns):
            for num in times:
                times[num].append(run_workload(core, requests, num))
        without, with_them = min(times[0]), min(times[given.adapters])
        lines.append(
            {
                "workload": name,
                "without_s": without,
                "with_s": with_them,
                "speed": without / with_them,
            }
        )
        print(
            f"{name:12} without {without:7.3f} s, with {with_them:7.3f} s: {without / with_them:.3f} of the speed",
            flush=True,
        )
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
