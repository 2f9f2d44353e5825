"""What it costs that several processes compute one model: all-reduces by size and transport, steps by layout, bytes by rank.

.venv/bin/python bench/parallel.py --model smollm2 --layouts 1x1 2x1 1x2

A layout is TENSORxSTAGES, or TENSORx1:gathered, TENSORx1:2d. Every layout has as many threads in all as --threads says. Layouts
take turns, so that what else the machine does meets all of them; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.parallel.channel import Door
from tidemill.parallel.group import Group
from tidemill.parallel.peers import meet_peers
from tidemill.parallel.shared import SharedGroup, make_shared
from tidemill.parallel.sockets import SocketGroup
from tidemill.runner.worker_group import WorkerGroup
from tidemill.sampling import SamplingParams
from tidemill.wire import Submit

KEY = b"of this benchmark"
SHAPES = ((1, 576), (1, 4096), (16, 4096), (256, 4096))
ROUNDS = 200


def join(kind: str, folder: Path, rank: int) -> Group:
    if kind == "shared":
        return SharedGroup(folder / "group", rank, 2)
    address: list[str | tuple[str, int]] = [str(folder / f"{one}.sock") for one in range(2)]
    return SocketGroup(rank, meet_peers(rank, {1 - rank}, address, Door(str(folder / f"{rank}.sock"), KEY), KEY))


def reduce_all(group: Group) -> list[list[float]]:
    """Seconds of each all-reduce, by shape."""
    took = []
    for shape in SHAPES:
        x, times = torch.ones(shape), []
        group.barrier()
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            group.all_reduce(x)
            times.append(time.perf_counter() - begin)
            x.fill_(1.0)
        took.append(times)
    return took


def show_collectives() -> None:
    print("all-reduce of two processes, microseconds (median, fastest tenth):")
    for kind in ("shared", "sockets"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make_shared(folder / "group", 2)
            other = subprocess.Popen([sys.executable, __file__, "--rank-one", kind, str(folder)])
            took = reduce_all(join(kind, folder, 0))
            other.wait()
        for (rows, width), times in zip(SHAPES, took, strict=True):
            ordered = sorted(times)
            middle, low = 1e6 * statistics.median(times), 1e6 * ordered[len(ordered) // 10]
            print(f"  {kind:8} {rows:4} x {width}: {middle:9.1f} {low:9.1f}")


def start(given: argparse.Namespace, layout: str) -> EngineCore:
    ranks, _, how = layout.partition(":")
    tensor, stages = map(int, ranks.split("x"))
    threads = max(1, given.threads // (tensor * stages))
    core = load_core(
        EngineOptions(
            model=given.model, dtype=given.dtype, device="cpu", threads=threads, max_requests=given.requests,
            tensor_parallel=tensor, tensor_layout=how or "1d", pipeline_parallel=stages, kv_memory_bytes=2**28,
            speculate="off", prefix_caching=False,
        )
    )  # fmt: skip
    if isinstance(core.runner, WorkerGroup):
        read = core.runner.team.read_bytes
        each = ", ".join(f"{num / 2**20:.1f}" for num in read)
        print(
            f"  {layout}: MiB of the checkpoint read by each rank: {each}; the most is {max(read) / sum(read):.1%} of all",
            flush=True,
        )
        streaming = core.runner.own.model.streaming  # type: ignore[attr-defined]
        if streaming is not None:
            held, all_bytes = streaming.held_bytes / 2**20, streaming.streamed_bytes / 2**20
            print(
                f"  {layout}: rank 0 holds {held:.1f} MiB of weights; {all_bytes:.1f} MiB are gathered in each step", flush=True
            )
    return core


def decode(core: EngineCore, given: argparse.Namespace, name: str) -> tuple[float, float]:
    """Seconds for the prompts, and of a step that decodes."""
    params = SamplingParams(temperature=0.0, max_tokens=given.steps + 1, ignore_eos=True)
    for i in range(given.requests):
        core.submit(Submit(f"{name}-{i}", [100 + (7919 * i + 31 * k) % 40_000 for k in range(given.prompt_len)], params))
    begin, waiting = time.perf_counter(), given.requests
    while waiting:
        waiting -= sum(1 for delta in core.step()[0].deltas if delta.token_ids)
    prefill, times = time.perf_counter() - begin, []
    while core.has_work:
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    return prefill, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--layouts", nargs="+", default=["1x1", "2x1", "1x2", "2x1:gathered"], help="ranks x stages[:layout]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank-one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank_one:
        reduce_all(join(given.rank_one[0], Path(given.rank_one[1]), 1))
        return
    show_collectives()
    print("ranks:")
    cores = {layout: start(given, layout) for layout in given.layouts}
    taken: dict[str, list[tuple[float, float]]] = {layout: [] for layout in cores}
    for number in range(given.rounds):
        for layout, core in cores.items():
            taken[layout].append(decode(core, given, str(number)))
    base = [statistics.median(column) for column in zip(*taken[given.layouts[0]], strict=True)]
    print(
        f"{given.requests} requests, prompts of {given.prompt_len}, {given.threads} threads in all; ratios to {given.layouts[0]}:"
    )
    for layout, times in taken.items():
        prefill, step = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = f"{prefill / base[0]:.2f}, {step / base[1]:.2f}"
        print(f"  {layout}: prefill {1e3 * prefill:8.1f} ms, step {1e3 * step:7.2f} ms ({ratios})")
        cores[layout].close()


if __name__ == "__main__":
    main()
