"""Collectives on a GPU, and steps of ranks that share one: `python -m bench.gpu_group [--ranks 2]
[--only sums,time,hosts]`

sums: CUDA IPC and NCCL beside each other; time: decode steps of the 8B shape by one process and by
ranks; hosts: the last rank as of another host, which talks by sockets of the loopback interface:
what NCCL costs at least, not what a network does.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.gpu.ranks import as_host, other_host, sharing

SIZES = [(1, 4096), (16, 4096), (64, 4096), (256, 4096), (2048, 4096)]


def measure(path: Path, rank: int, size: int) -> None:
    import torch

    from tidemill.distributed.channel import Door
    from tidemill.distributed.cuda import CudaGroup
    from tidemill.distributed.peers import Devices, meet_peers, on_devices
    from tidemill.distributed.sockets import SocketGroup
    from tidemill.kernels.cuda.nccl import Library

    os.environ |= as_host(rank)
    faulthandler.dump_traceback_later(50, exit=True)  # it hangs
    key, addresses = b"a key of this bench", [str(path / f"{one}.sock") for one in range(size)]
    host = SocketGroup(
        rank,
        meet_peers(rank, set(range(size)) - {rank}, addresses, Door(addresses[rank], key), key),
    )
    groups: dict[str, Any] = {"IPC": CudaGroup(host)}
    before, began = torch.cuda.mem_get_info()[0], time.perf_counter()
    groups["NCCL"] = on_devices(host, Devices("cuda", "nccl"))
    taken, seconds = (before - torch.cuda.mem_get_info()[0]) / 2**20, time.perf_counter() - began
    if rank == 0:
        print(
            f"NCCL {Library().version}: started in {seconds:.1f} s, {taken:.0f} MiB of both ranks",
            flush=True,
        )
    for group in groups.values():
        group.begin()
    for rows, width in SIZES:
        measure_sums(groups, rows, width)
    widths = [64128 + 128 * i for i in range(size)]
    logits = [
        torch.randn(17, width, generator=torch.Generator().manual_seed(i))
        for i, width in enumerate(widths)
    ]
    for name, group in groups.items():
        for _ in range(5):
            assert torch.equal(
                group.all_gather(logits[rank].cuda(), 1, widths).cpu(), torch.cat(logits, 1)
            ), "wrong gather"
        long = [one.T.contiguous() for one in logits]
        assert torch.equal(group.all_gather(long[rank].cuda(), 0, widths).cpu(), torch.cat(long)), (
            "wrong gather of rows"
        )
        if rank == 0:
            print(f"{name}: all_gather of 17 x 128k logits: right", flush=True)
    host.barrier()
    groups["NCCL"].close()
    faulthandler.cancel_dump_traceback_later()


def measure_sums(groups: dict[str, Any], rows: int, width: int) -> None:
    """Right, the same bits by both, eager and captured; and times."""
    import torch

    from tidemill.kernels.cuda.collectives import all_reduce_reference

    rank, size = groups["IPC"].rank, groups["IPC"].size
    parts = [
        torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + i)).bfloat16()
        for i in range(size)
    ]
    own, wanted, times = parts[rank].cuda(), all_reduce_reference(parts), dict[str, float]()
    for name, group in groups.items():
        for _ in range(20 if name == "IPC" else 3):
            made = group.all_reduce(own.clone())
            assert torch.equal(made.cpu(), wanted), f"{name}: wrong sum"
        num, x = 50 if name == "IPC" else 10, torch.zeros_like(own)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(num):
                group.all_reduce(x)
        x.copy_(own)
        graph.replay()
        summed = wanted
        for _ in range(num - 1):
            summed = all_reduce_reference([summed] * size)
        assert torch.equal(x.cpu(), summed), f"{name}: wrong sum in a graph"
        x.zero_()
        seen = list[float]()
        for _ in range(20 if name == "IPC" else 7):
            group.barrier()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seen.append(start.elapsed_time(end) * 1000 / num)
        times[name] = sorted(seen)[len(seen) // 2]
    if rank == 0:
        moved = (2 + size) * own.nbytes / 4.0e12 * 1e6
        told = ", ".join(f"{name} {us:8.1f} us" for name, us in times.items())
        print(
            f"all_reduce {rows:5d} x {width} bf16: {told}, floor {moved:.1f}; bits equal",
            flush=True,
        )


def time_engine(num_ranks: int, is_remote: bool = False) -> None:
    """Decode steps of the 8B shape: one process, and ranks that share the GPU. `is_remote`: the
    last one as of another host."""
    from bench.gpu_workloads import MODELS
    from tidemill.config import EngineOptions
    from tidemill.engine.load import load_core
    from tidemill.types.sampling import SamplingParams
    from tidemill.types.wire import Submit

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as workers:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS["llama8b"]))
        for ranks in [num_ranks] if is_remote else [1, num_ranks]:
            given = {
                "kv_memory_bytes": 2**32,
                "max_requests": 64,
                "max_context": 2048,
                "tensor_parallel": ranks,
            }
            given |= workers.enter_context(other_host(Path(folder)))[0] if is_remote else {}
            core = load_core(EngineOptions(model=folder, load_format="dummy", **given))  # type: ignore[arg-type]
            for num in (1, 64):
                for i in range(num):
                    params = SamplingParams(max_tokens=200, ignore_eos=True)
                    core.submit(Submit(f"{num}-{i}", list(range(5 + i, 25 + i)), params))
                times, last = [], time.perf_counter()
                while core.has_work:
                    core.step()
                    now = time.perf_counter()
                    times.append(now - last)
                    last = now
                print(
                    f"llama8b, {ranks} rank(s), batch {num}: {sorted(times)[len(times) // 2] * 1000:.2f} ms a step",
                    flush=True,
                )
            core.close()
            del core


def measure_all(command: list[str], path: Path, num_ranks: int) -> list[int]:
    """The collectives, each rank in a process; their exit codes."""
    ranks = [
        subprocess.Popen([*command, "--path", str(path), "--rank", str(rank)])
        for rank in range(num_ranks)
    ]
    try:
        return [rank.wait(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="sums,time,hosts")
    parser.add_argument(
        "--path", type=Path, help="of the ranks' sockets, in a process that is a rank"
    )
    parser.add_argument("--rank", type=int)
    given = parser.parse_args()
    if given.rank is not None:
        measure(given.path, given.rank, given.ranks)
        return
    with tempfile.TemporaryDirectory() as folder, sharing(Path(folder)):
        command = [sys.executable, "-m", "bench.gpu_group", "--ranks", str(given.ranks)]
        for part in given.only.split(","):
            if part == "sums" and any(measure_all(command, Path(folder), given.ranks)):
                sys.exit("A rank failed.")
            elif part != "sums":
                time_engine(given.ranks, is_remote=part == "hosts")


if __name__ == "__main__":
    main()
