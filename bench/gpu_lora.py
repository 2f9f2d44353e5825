"""Adapters on the GPU at hand: the kernels against a reference, answers alone and together, and what they cost.

    python -m bench.gpu_lora [--json out.json] [--model llama8b] [--adapters 8] [--rank 16]

The cost is that of mixed_256 with an adapter of all linear layers for every request, beside the same without, in turns; and of
decode steps of 1, 64 and 256 requests.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_workloads import MODELS, workloads
from bench.lora import make_adapter
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels.cuda import lora
from tidemill.kernels.cuda.elementwise import glu
from tidemill.kernels.cuda.gemm import Tile, gemm, matmul, tile_with_adapters
from tidemill.kernels.cuda.lora import CudaLora
from tidemill.layers.cuda_lora import CudaLoras
from tidemill.sampling import SamplingParams
from tidemill.weights.lora import LoraPair
from tidemill.wire import Submit


class _Lists(CudaLoras):
    """The lists without a model."""

    def __init__(self, num_slots: int, most_tokens: int) -> None:
        super().__init__({}, num_slots, 256, most_tokens, torch.device("cuda"))


def check_kernels() -> None:
    """Against float64, in bfloat16; a token alone has the bits that it has among others."""
    torch.manual_seed(0)
    device, num_slots = torch.device("cuda"), 9
    for num_in, outs, is_gated in (
        (4096, {"q": 4096, "k": 1024, "v": 1024}, False),
        (4096, {"gate": 14336, "up": 14336}, True),
        (14336, {"down": 4096}, False),
        (576, {"q": 576, "k": 192, "v": 192}, False),
    ):
        lists = _Lists(num_slots, 512)
        made = CudaLora(num_in, outs, lists, num_slots, 256, "silu" if is_gated else "", device, torch.bfloat16)
        adapters = []
        for rank in (16, 8, 1, 64, 256, 33, 16, 16):
            pairs = {
                name: LoraPair(
                    (torch.randn(rank, num_in) / num_in**0.5).bfloat16(), (torch.randn(size, rank) / rank**0.5).bfloat16(), 0.7
                )
                for name, size in outs.items()
                if rank != 8 or name != "k"
            }
            made.put(len(adapters), pairs)
            lists.set_rank(len(adapters), rank)
            adapters.append(pairs)
        slots = np.random.default_rng(0).integers(-1, len(adapters), 300)
        x = torch.randn(300, num_in, device=device, dtype=torch.bfloat16)
        y = torch.randn(300, sum(outs.values()), device=device, dtype=torch.bfloat16)
        lists.write(slots, 300)
        together = y.clone()
        activated = made.add(x, together)
        together = together if activated is None else activated
        expected, first = y.double(), 0
        for part, (name, size) in enumerate(outs.items()):
            columns = slice(part, None, 2) if is_gated else slice(first, first + size)
            for slot, pairs in enumerate(adapters):
                rows = torch.from_numpy(np.flatnonzero(slots == slot)).to(device)
                if name in pairs:
                    pair = pairs[name]
                    low = x[rows].double() @ pair.down_RK.to(device).double().t()
                    expected[rows, columns] += pair.scale * low @ pair.up_NR.to(device).double().t()
            first += size
        if is_gated:
            gate, up = expected[:, 0::2], expected[:, 1::2]
            expected = gate / (1 + (-gate).exp()) * up
        error = (together.double() - expected).abs().max() / expected.abs().max()
        assert error < 2**-7, error
        plain = torch.from_numpy(slots < 0).to(device)
        assert torch.equal(together[plain], glu(y, "silu")[plain] if is_gated else y[plain])
        check_matmul(made, lists, x, slots, {name: i for i, name in enumerate(outs)}, adapters, is_gated)
        lists.write(slots, 300)
        for row in range(0, 300, 7):
            lists.write(slots[row : row + 1], 1)
            alone = y[row : row + 1].clone()
            activated = made.add(x[row : row + 1].contiguous(), alone)
            assert torch.equal((alone if activated is None else activated)[0], together[row]), row
        print(f"kernels {num_in} -> {outs}: largest error {error:.1e} of the largest value", flush=True)


def check_matmul(
    made: CudaLora, lists: _Lists, x: torch.Tensor, slots: np.ndarray, parts: dict[str, int], adapters: list[dict[str, LoraPair]],
    is_gated: bool,
) -> None:  # fmt: skip
    """The matmul that adds adapters itself: inputs in one go and in stretches, in the tiles of several numbers of rows."""
    sizes = [next(pairs[name].up_NR.shape[0] for pairs in adapters if name in pairs) for name in parts]
    num_in, num_out, act = x.shape[1], sum(sizes), "silu" if is_gated else ""
    weight = (torch.randn(num_out, num_in, device=x.device) / num_in**0.5).bfloat16()
    lists.write(slots, 300)
    expected = x.double() @ weight.double().t()
    first = 0
    for name, part in parts.items():
        columns = slice(part, None, 2) if is_gated else slice(first, first + sizes[part])
        for slot, pairs in enumerate(adapters):
            rows = torch.from_numpy(np.flatnonzero(slots == slot)).to(x.device)
            if name in pairs:
                low = x[rows].double() @ pairs[name].down_RK.to(x.device).double().t()
                expected[rows, columns] += pairs[name].scale * low @ pairs[name].up_NR.to(x.device).double().t()
        first += sizes[part]
    if is_gated:
        gate, up = expected[:, 0::2], expected[:, 1::2]
        expected = gate / (1 + (-gate).exp()) * up
    together = gemm(x, weight, Tile(16, 64, 64, 3, 4), act=act, low_rank=made.low_rank(x))
    error = (together.double() - expected).abs().max() / expected.abs().max()
    assert error < 2**-7, error
    plain = torch.from_numpy(slots < 0).to(x.device)
    assert torch.equal(together[plain], gemm(x, weight, Tile(16, 64, 64, 3, 4), act=act)[plain])
    for num_rows in (1, 16, 32, 64, 128, 256, 300):
        tile = tile_with_adapters(num_rows, num_out, num_in)
        assert torch.equal(gemm(x, weight, tile, act=act, low_rank=made.low_rank(x)), together), tile
    usual = lora._MOST_IN_STRETCHES, lora._FEW
    lora._MOST_IN_STRETCHES = lora._FEW = 1
    assert torch.equal(gemm(x, weight, tile, act=act, low_rank=made.low_rank(x)), together), "one pass"
    lora._MOST_IN_STRETCHES, lora._FEW = usual
    for row in range(0, 300, 7):
        lists.write(slots[row : row + 1], 1)
        alone = x[row : row + 1].contiguous()
        tile = tile_with_adapters(1, num_out, num_in)
        assert torch.equal(gemm(alone, weight, tile, act=act, low_rank=made.low_rank(alone))[0], together[row]), row
    print(f"matmul {num_in} -> {num_out} with adapters: largest error {error:.1e} of the largest value", flush=True)


def time_matmuls(num_adapters: int, rank: int) -> None:
    """Microseconds of the linear layers of llama8b, without adapters and with. Rows have adapters in turn, as requests that
    decode, or in stretches of 256, as prompts."""
    device = torch.device("cuda")
    for num_in, outs, act in (
        (4096, {"q": 4096, "k": 1024, "v": 1024}, ""), (4096, {"o": 4096}, ""), (4096, {"gate": 14336, "up": 14336}, "silu"),
        (14336, {"down": 4096}, ""),
    ):  # fmt: skip
        num_out = sum(outs.values())
        weights = [torch.randn(num_out, num_in, device=device, dtype=torch.bfloat16) for _ in range(4)]
        for num_rows in (1, 16, 64, 256, 2048):
            lists = _Lists(num_adapters, num_rows)
            made = CudaLora(num_in, outs, lists, num_adapters, rank, act, device, torch.bfloat16)
            for slot in range(num_adapters):
                lists.set_rank(slot, rank)
                made.put(slot, {n: LoraPair(torch.randn(rank, num_in), torch.randn(k, rank), 1.0) for n, k in outs.items()})
            lists.write(np.arange(num_rows) // (256 if num_rows > 256 else 1) % num_adapters, num_rows)
            x = torch.randn(num_rows, num_in, device=device, dtype=torch.bfloat16)
            tile = tile_with_adapters(num_rows, num_out, num_in)
            without = _microseconds(lambda w, x=x, act=act: matmul(x, w, None, act), weights)
            same = _microseconds(lambda w, x=x, tile=tile, act=act: gemm(x, w, tile, act=act), weights)
            with_them = _microseconds(
                lambda w, x=x, tile=tile, made=made, act=act: gemm(x, w, tile, act=act, low_rank=made.low_rank(x)), weights
            )
            taken = f"{without:.1f} without, {same:.1f} in the same tiles, {with_them:.1f} with adapters"
            print(f"{num_in} -> {num_out}, {num_rows} rows: {taken}", flush=True)


def _microseconds(work: Any, weights: list[torch.Tensor]) -> float:
    """For one of the weights, which a CUDA graph takes in turn."""
    work(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            work(weight)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 100 / len(weights)


def answers(core: EngineCore, requests: list[tuple[list[int], int, int]]) -> list[list[Any]]:
    """Tokens and logprobs of each: (prompt, tokens to generate, adapter)."""
    made: list[list[Any]] = [[] for _ in requests]
    for i, (prompt, length, adapter) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=1)
        core.submit(Submit(str(i), prompt, params, adapter=adapter))
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        for delta in output.deltas:
            made[int(delta.request_id)] += [(entry.token_id, entry.logprob) for entry in delta.logprobs or []]
    return made


def check_answers(core: EngineCore, num_adapters: int) -> None:
    """Alone and among others, bit for bit; other adapters give other answers."""
    prompts = [[(31 * i * i + 7 * k) % 1000 + 10 for k in range(20 + 37 * i)] for i in range(24)]
    requests = [(prompt, 24, i % (num_adapters + 1)) for i, prompt in enumerate(prompts)]
    core.scheduler.kv.clear_prefixes()
    together = answers(core, requests)
    for i in range(0, 24, 3):
        core.scheduler.kv.clear_prefixes()
        assert answers(core, requests[i : i + 1])[0] == together[i], i
    same = answers(core, [(prompts[5], 24, adapter) for adapter in range(num_adapters + 1)])
    num_different = len({tuple(token for token, _ in one) for one in same})
    print(
        f"{len(requests)} requests alone and together: equal; {num_different} of {num_adapters + 1} answers differ",
        flush=True,
    )


def run_workload(core: EngineCore, requests: list[tuple[list[int], int]], num_adapters: int) -> float:
    """Seconds."""
    core.scheduler.kv.clear_prefixes()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i, (prompt, length) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        core.submit(Submit(str(i), prompt, params, adapter=1 + i % num_adapters if num_adapters else 0))
    while core.has_work:
        _, failed = core.step()
        assert not failed, failed
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--model", default="llama8b", choices=MODELS)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--parts", default="checks,kernels,workloads", help="separated by commas")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if "checks" in parts:
        check_kernels()
    if "kernels" in parts:
        time_matmuls(given.adapters, given.rank)
    if "workloads" in parts:
        measure(given)


def measure(given: argparse.Namespace) -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[given.model]))
    options = EngineOptions(
        model=str(folder), load_format="dummy", max_context=34816, max_waiting=10**6, max_loras=given.adapters,
        max_lora_rank=max(given.rank, 16),
    )  # fmt: skip
    begin = time.perf_counter()
    core = load_core(options)
    print(f"{given.model}: ready in {time.perf_counter() - begin:.1f} s", flush=True)
    for i in range(given.adapters):
        path = make_adapter(core, folder / f"lora{i}", given.rank, i)
        begin = time.perf_counter()
        core.adapters.load_now(1 + i, f"a{i}", str(path))
        print(f"adapter {i} loaded in {time.perf_counter() - begin:.2f} s", flush=True)
    check_answers(core, given.adapters)
    made = workloads(min(MODELS[given.model]["vocab_size"], 120_000))
    cases = {"mixed_256": made["mixed_256"]}
    cases |= {f"decode_b{num}": [(prompt[:128], 128) for prompt, _ in made["decode_b256"][:num]] for num in (1, 64, 256)}
    cases["prefill_4k"] = made["prefill_4k"][:16]
    lines = []
    for name, requests in cases.items():
        run_workload(core, requests[:8], given.adapters)
        times: dict[int, list[float]] = {0: [], given.adapters: []}
        for _ in range(given.turns):
            for num in times:
                times[num].append(run_workload(core, requests, num))
        without, with_them = min(times[0]), min(times[given.adapters])
        lines.append({"workload": name, "without_s": without, "with_s": with_them, "speed": without / with_them})
        print(f"{name:12} without {without:7.3f} s, with {with_them:7.3f} s: {without / with_them:.3f} of the speed", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
