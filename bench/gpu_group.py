"""Collectives on a GPU: ranks as processes that share one. `python -m bench.gpu_group [--ranks 2]`

Without the multi-process service, a GPU runs kernels of several processes in turns of about a millisecond, and a rank that waits
for another waits for its turn. So it is started, if it can be; the table says if it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = [(1, 4096), (16, 4096), (64, 4096), (256, 4096), (2048, 4096)]


def measure(path: Path, rank: int, size: int) -> None:
    import torch

    from tidemill.kernels.cuda.collectives import all_reduce_reference
    from tidemill.parallel.cuda import CudaGroup
    from tidemill.parallel.shared import SharedGroup

    group = CudaGroup(SharedGroup(path, rank, size))
    for rows, width in SIZES:
        parts = [torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + i)).bfloat16() for i in range(size)]
        own = parts[rank].cuda()
        wanted = all_reduce_reference(parts)
        for _ in range(20):
            made = group.all_reduce(own.clone())
            assert torch.equal(made.cpu(), wanted), "wrong sum"
        x = torch.zeros_like(own)
        graph = torch.cuda.CUDAGraph()
        group.all_reduce(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(50):
                group.all_reduce(x)
        times = []
        for _ in range(20):
            group.barrier()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / 50)
        if rank == 0:
            moved = (2 + size) * own.nbytes / 4.0e12 * 1e6
            print(
                f"all_reduce {rows:5d} x {width} bf16: {sorted(times)[10]:8.1f} us, best {min(times):.1f}, floor {moved:.1f}",
                flush=True,
            )
    widths = [64128 + 128 * i for i in range(size)]
    logits = [torch.randn(17, width, generator=torch.Generator().manual_seed(i)) for i, width in enumerate(widths)]
    for _ in range(5):
        assert torch.equal(group.all_gather(logits[rank].cuda(), 1, widths).cpu(), torch.cat(logits, 1)), "wrong gather"
    if rank == 0:
        print("all_gather of 17 x 128k logits: right")
    group.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--rank", type=int)
    given = parser.parse_args()
    if given.rank is not None:
        measure(given.path, given.rank, given.ranks)
        return
    from tidemill.parallel.shared import make_shared

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "group"
        make_shared(path, given.ranks)
        os.environ.setdefault("CUDA_MPS_PIPE_DIRECTORY", f"{folder}/pipe")
        os.environ.setdefault("CUDA_MPS_LOG_DIRECTORY", f"{folder}/log")
        try:
            service = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, text=True, check=False)
            print("multi-process service:", service.returncode, service.stdout.strip(), service.stderr.strip(), flush=True)
        except OSError as error:
            print("multi-process service: not there:", error, flush=True)
        command = [sys.executable, "-m", "bench.gpu_group", "--ranks", str(given.ranks), "--path", str(path)]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(given.ranks)]
        try:
            codes = [rank.wait(timeout=120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, capture_output=True)
        print("exit codes", codes)


if __name__ == "__main__":
    main()
