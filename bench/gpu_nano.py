"""Steps in two halves on the GPU at hand (`--nano-batching`): the same bits as whole ones, and their times beside each other.

    python -m bench.gpu_nano [--only check,trial,engine] [--model llama8b] [--quantization auto]

check: a small Llama, tokens and log probabilities with and without. trial: steps of the model's shape, whole and in halves, in
several contexts, and how long the trials of a start take. engine: whole workloads, with and without, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu import run_workload
from bench.gpu_engine_checks import ask, random_llama
from bench.gpu_workloads import MODELS, workloads
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels.cuda import lanes
from tidemill.runner import cuda_runner, nano
from tidemill.sampling import SamplingParams

CONTEXTS = (384, 2048)


def check() -> None:
    folder, draw = Path(tempfile.mkdtemp()), random.Random(0)
    random_llama(folder)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    common = ids(600)
    requests = {
        f"r{i}": (
            (common if i % 5 == 0 else []) + ids(1 + (i * 37) % 900),
            SamplingParams(temperature=float(i % 2), max_tokens=10 + i % 50, seed=i, logprobs=2, ignore_eos=True),
        )
        for i in range(200)
    }
    seen = {}
    for how in ("off", "on"):
        options = {"kv_memory_bytes": 2**29, "max_requests": 128, "token_budget": 512, "nano_batching": how}
        core = load_core(EngineOptions(model=str(folder), **options))  # type: ignore[arg-type]
        cuts = getattr(core.runner, "_cuts", {})
        seen[how] = ask(core, requests)
        alone = ask(core, {"r40": requests["r40"]})["r40"]
        print(f"nano-batching {how}: {len(cuts)} sizes in halves; alone as among others: {alone == seen[how]['r40']}", flush=True)
        drop(core)
    same = seen["on"] == seen["off"]
    print(f"nano-batching: tokens and log probabilities as without: {same}{'' if same else '   <<< WRONG'}", flush=True)


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

    def run(rivals: Any) -> tuple[list[Any], set[Any]]:
        make = rivals.capture

        def capture(decodes: bool, size: int) -> Any:
            torch.cuda.synchronize()  # what was wrong before is not the step's fault
            return make(decodes, size)

        rivals.capture = capture
        begin = time.perf_counter()
        kept, taken = nano.run_trials(rivals)
        torch.cuda.synchronize()
        print(f"trials of a start: {time.perf_counter() - begin:.2f} s", flush=True)
        for one in kept:
            print(f"  start: {one}", flush=True)
        for name, way in ways.items():
            for context in CONTEXTS:
                with mock.patch.object(nano, "_CONTEXT", context), mock.patch.object(cuda_runner, "in_order", way):
                    for decodes, size in ((True, 64), (True, 128), (True, 256), (False, 512), (False, 2048)):
                        if name == "free" and not decodes:  # a prompt's second half needs the first's keys
                            continue
                        made = nano._try(rivals, decodes, size)
                        if made is not None:
                            gain = made.whole_ms / made.halves_ms
                            print(f"  {name}, context {context}: {made} ({gain:.3f}x)", flush=True)
        return kept, taken

    with mock.patch.object(cuda_runner, "run_trials", run):
        begin = time.perf_counter()
        core = new_core(model, quantization, "auto")
        print(f"{model} {quantization}: started in {time.perf_counter() - begin:.1f} s with all of it", flush=True)
        drop(core)


def engine(model: str, quantization: str) -> None:
    """Whole workloads in turns, both engines beside each other."""
    cores = {how: new_core(model, quantization, how) for how in ("off", "auto")}
    for one in getattr(cores["auto"].runner, "nano", ()):
        print(f"  start: {one}", flush=True)
    wanted = {name: requests for name, requests in workloads(100_000).items() if name in ("prefill_4k", "mixed_256")}
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="check,trial,engine")
    parser.add_argument("--model", default="llama8b")
    parser.add_argument("--quantization", default="auto", help="of weights; several separated by commas")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for name in given.only.split(","):
        for quantization in given.quantization.split(",") if name != "check" else ("",):
            try:
                check() if name == "check" else (trial if name == "trial" else engine)(given.model, quantization)
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    main()
