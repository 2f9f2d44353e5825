"""Steps in two halves on the GPU at hand (`--nano-batching`), beside whole ones.

    python -m bench.gpu_nano [--only trial,engine] [--model llama8b] [--quantization auto]

trial: steps of the model's shape, whole and in halves, in several contexts, and how long the trials
of a start take. engine: whole workloads, with and without, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu import run_workload
from bench.gpu_workloads import MODELS, workloads
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels.cuda import lanes
from tidemill.runner import cuda_microbatches, cuda_step, nano

CONTEXTS = (384, 2048)


def drop(core: EngineCore) -> None:
    core.close()
    del core
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def new_core(model: str, quantization: str, how: str) -> EngineCore:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return load_core(
        EngineOptions(
            model=str(folder), load_format="dummy", max_context=8192, max_waiting=10**6, nano_batching=how,
            kv_memory_bytes=48 * 2**30, quantization=quantization, speculate="off",
        )
    )  # fmt: skip


@contextlib.contextmanager
def free(kind: str) -> Iterator[None]:
    yield


def trial(model: str, quantization: str) -> None:
    """Every point of a start's trials, in each way of putting halves beside each other."""
    ways: dict[str, Any] = {"in order": lanes.in_order, "free": free}

    def run(candidates: Any) -> tuple[list[Any], set[Any]]:
        make = candidates.capture

        def capture(decodes: bool, size: int) -> Any:
            torch.cuda.synchronize()  # what was wrong before is not the step's fault
            return make(decodes, size)

        candidates.capture = capture
        begin = time.perf_counter()
        kept, taken = nano.run_trials(candidates)
        torch.cuda.synchronize()
        print(f"trials of a start: {time.perf_counter() - begin:.2f} s", flush=True)
        for one in kept:
            print(f"  start: {one}", flush=True)
        for name, way in ways.items():
            for context in CONTEXTS:
                with (
                    mock.patch.object(nano, "_CONTEXT", context),
                    mock.patch.object(cuda_step, "in_order", way),
                ):
                    for decodes, size in (
                        (True, 64),
                        (True, 128),
                        (True, 256),
                        (False, 512),
                        (False, 2048),
                    ):
                        # a prompt's second half needs the first's keys
                        if name == "free" and not decodes:
                            continue
                        made = nano._try(candidates, decodes, size)
                        if made is not None:
                            gain = made.whole_ms / made.halves_ms
                            print(f"  {name}, context {context}: {made} ({gain:.3f}x)", flush=True)
        return kept, taken

    with mock.patch.object(cuda_microbatches, "run_trials", run):
        begin = time.perf_counter()
        core = new_core(model, quantization, "auto")
        print(
            f"{model} {quantization}: started in {time.perf_counter() - begin:.1f} s with all of it",
            flush=True,
        )
        drop(core)


def engine(model: str, quantization: str) -> None:
    """Whole workloads in turns, both engines beside each other."""
    cores = {how: new_core(model, quantization, how) for how in ("off", "auto")}
    for one in getattr(cores["auto"].runner, "nano", ()):
        print(f"  start: {one}", flush=True)
    wanted = {
        name: requests
        for name, requests in workloads(100_000).items()
        if name in ("prefill_4k", "mixed_256")
    }
    for core in cores.values():
        run_workload(core, [([5] * 600, 8)] * 4)
    for name, requests in wanted.items():
        for turn in range(2 if name == "prefill_4k" else 1):
            took = {how: run_workload(core, requests)[0] for how, core in cores.items()}
            print(
                f"{model} {quantization} {name}, turn {turn}: off {took['off']:.2f} s, auto {took['auto']:.2f} s "
                f"({took['off'] / took['auto']:.3f}x)",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="trial,engine")
    parser.add_argument("--model", default="llama8b")
    parser.add_argument(
        "--quantization", default="auto", help="of weights; several separated by commas"
    )
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for name in given.only.split(","):
        for quantization in given.quantization.split(","):
            try:
                (trial if name == "trial" else engine)(given.model, quantization)
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    main()
