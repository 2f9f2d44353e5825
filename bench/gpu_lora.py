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
from tidemill.kernels.cuda import lora
from tidemill.kernels.cuda.gemm import LIBRARY, choose_tile
from tidemill.kernels.cuda.lora import CudaLora
from tidemill.kernels.handover import with_added
from tidemill.layers.cuda_lora import CudaLoras
from tidemill.quant.cuda import CudaWeight
from tidemill.sampling import SamplingParams
from tidemill.weights.lora import LoraPair
from tidemill.wire import Submit


class _Lists(CudaLoras):
    """The lists without a model."""

    def __init__(self, num_slots: int, most_tokens: int) -> None:
        super().__init__({}, num_slots, 256, most_tokens, torch.device("cuda"))


SHAPES = (
    (4096, {"q": 4096, "k": 1024, "v": 1024}, ""), (4096, {"o": 4096}, ""), (4096, {"gate": 14336, "up": 14336}, "silu"),
    (14336, {"down": 4096}, ""),
)  # fmt: skip


def check_kernels() -> None:
    """Against float64, in bfloat16; a token alone has the bits that it has among others, whoever adds."""
    torch.manual_seed(0)
    device, num_slots, num = torch.device("cuda"), 9, 300
    for num_in, outs, act in (*SHAPES, (576, {"q": 576, "k": 192, "v": 192}, "")):
        lists = _Lists(num_slots, 512)
        made = CudaLora(num_in, outs, lists, num_slots, 256, act, device, torch.bfloat16)
        adapters = list[dict[str, LoraPair]]()
        for rank in (16, 8, 1, 64, 256, 33, 16, 16):
            pairs = {
                name: LoraPair(
                    (torch.randn(rank, num_in) / num_in**0.5).bfloat16(), (torch.randn(size, rank) / rank**0.5).bfloat16(), 0.7
                )
                for name, size in outs.items()
                if rank != 8 or name != "k"
            }
            made.put(len(adapters), pairs)
            adapters.append(pairs)
        slots = np.random.default_rng(0).integers(-1, len(adapters), num)
        x = torch.randn(num, num_in, device=device, dtype=torch.bfloat16)
        values = (torch.randn(sum(outs.values()), num_in, device=device) / num_in**0.5).bfloat16()
        weight = CudaWeight(values, None, False, act)
        plain = torch.from_numpy(slots < 0).to(device)
        lists.write(slots, num)
        together = made.adapted(x, weight)
        right = _expected(x, values, slots, adapters, outs, act)
        error = (together.double() - right).abs().max() / right.abs().max()
        assert error < (2**-6 if act else 2**-7), error  # gate and up are rounded twice each
        assert torch.equal(together[plain], weight(x)[plain])
        assert torch.equal(_added(made.adapted(x, weight, leave=True)), together), "left to the kernel behind"
        few, lora._FEW = lora._FEW, 512
        made._lists = small = _Lists(num_slots, 512)
        small.write(slots, num)
        assert torch.equal(made.adapted(x, weight), together), "small tiles"
        made._lists, lora._FEW = lists, few
        for row in range(0, num, 7):
            lists.write(slots[row : row + 1], 1)
            alone = x[row : row + 1].contiguous()
            assert torch.equal(made.adapted(alone, weight)[0], together[row]), row
            assert torch.equal(_added(made.adapted(alone, weight, leave=True))[0], together[row]), row
        print(f"{num_in} -> {outs}: largest error {error:.1e} of the largest value", flush=True)


def check_behind() -> None:
    """The kernel behind gate and up also multiplies for `down`: against the kernel that does it otherwise, and a token alone."""
    device, num_slots, num = torch.device("cuda"), 9, 300
    slots = np.random.default_rng(0).integers(-1, num_slots, num)
    (gates, downs), lists = (SHAPES[2], SHAPES[3]), _Lists(num_slots, 512)
    made = [CudaLora(num_in, outs, lists, num_slots, 64, act, device, torch.bfloat16) for num_in, outs, act in (gates, downs)]
    weights = []
    for one, (num_in, outs, act) in zip(made, (gates, downs), strict=True):
        for slot, rank in enumerate((16, 8, 1, 64, 33, 16, 16, 16, 16)):
            pairs = {
                name: LoraPair(
                    (torch.randn(rank, num_in) / num_in**0.5).bfloat16(), (torch.randn(size, rank) / rank**0.5).bfloat16(), 0.7
                )
                for name, size in outs.items()
            }
            one.put(slot, pairs)
        values = (torch.randn(sum(outs.values()), num_in, device=device) / num_in**0.5).bfloat16()
        weights.append(CudaWeight(values, None, False, act))
    x = torch.randn(num, gates[0], device=device, dtype=torch.bfloat16)

    def both(x: torch.Tensor) -> torch.Tensor:
        return _added(made[1].adapted(made[0].adapted(x, weights[0]), weights[1], leave=True))

    lists.write(slots, num)
    apart = both(x)
    made[0].behind = made[1]
    together = both(x)
    error = (together.float() - apart.float()).abs().max() / apart.float().abs().max()
    assert 0 < error < 2**-7, error  # sums end at other places
    few, lora._FEW = lora._FEW, 512
    made[0]._lists = made[1]._lists = small = _Lists(num_slots, 512)
    small.write(slots, num)
    assert torch.equal(both(x), together), "small tiles"
    made[0]._lists, made[1]._lists, lora._FEW = lists, lists, few
    for row in range(0, num, 7):
        lists.write(slots[row : row + 1], 1)
        assert torch.equal(both(x[row : row + 1].contiguous())[0], together[row]), row
    print(f"down behind gate and up: {error:.1e} of the largest value beside its own kernel", flush=True)


def _added(y: torch.Tensor) -> torch.Tensor:
    """As the kernel behind adds."""
    y, added = with_added(y)
    return y if added is None else y + added


def _expected(
    x: torch.Tensor, weight: torch.Tensor, slots: np.ndarray, adapters: list[dict[str, LoraPair]], outs: dict[str, int], act: str
) -> torch.Tensor:  # fmt: skip
    """In float64."""
    made, first = x.double() @ weight.double().t(), 0
    for part, (name, size) in enumerate(outs.items()):
        columns = slice(part, None, 2) if act else slice(first, first + size)
        for slot, pairs in enumerate(adapters):
            rows = torch.from_numpy(np.flatnonzero(slots == slot)).to(x.device)
            if name in pairs:
                low = x[rows].double() @ pairs[name].down_RK.to(x.device).double().t()
                made[rows, columns] += pairs[name].scale * low @ pairs[name].up_NR.to(x.device).double().t()
        first += size
    if act:
        gate, up = made[:, 0::2], made[:, 1::2]
        made = gate / (1 + (-gate).exp()) * up
    return made


def time_matmuls(num_adapters: int, rank: int) -> None:
    """Microseconds of the linear layers of llama8b, without adapters and with. Rows have adapters in turn, as requests that
    decode, or in stretches of 256, as prompts."""
    device = torch.device("cuda")
    draw = partial(torch.randn, device=device)
    for num_in, outs, act in SHAPES:
        num_out = sum(outs.values())
        weights = [CudaWeight(draw(num_out, num_in, dtype=torch.bfloat16), None, False, act) for _ in range(4)]
        for num_rows in (1, 16, 64, 128, 192, 256, 512, 2048):
            lists = _Lists(num_adapters, num_rows)
            mades = [CudaLora(num_in, outs, lists, num_adapters, rank, act, device, torch.bfloat16) for _ in weights]
            for made in mades:
                for slot in range(num_adapters):
                    made.put(slot, {n: LoraPair(draw(rank, num_in), draw(k, rank), 1.0) for n, k in outs.items()})
            lists.write(np.arange(num_rows) // (256 if num_rows > 256 else 1) % num_adapters, num_rows)
            x = draw(num_rows, num_in, dtype=torch.bfloat16)
            pairs = list(zip(weights, mades, strict=True))
            taken = {
                "without": _microseconds(lambda w, _, x=x: w(x), pairs),
                "with": _microseconds(lambda w, m, x=x: m.adapted(x, w), pairs),
                "left to the kernel behind": _microseconds(lambda w, m, x=x: with_added(m.adapted(x, w, leave=True)), pairs),
            }
            tile = choose_tile(num_rows, num_out, num_in)
            said = ", ".join(f"{name} {us:.1f}" for name, us in taken.items())
            print(f"{num_in} -> {num_out}, {num_rows} rows, {'library' if tile is LIBRARY else tile}: {said}", flush=True)


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
    for i in range(len(requests)):
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
    parser.add_argument("--max-lora-rank", type=int, help="of the engine; if not given, the rank, and at least 16")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--parts", default="checks,kernels,workloads", help="separated by commas")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if "checks" in parts:
        check_kernels()
        check_behind()
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
