"""What it costs that several processes compute one model: all-reduces by size and transport, steps
by layout, bytes by rank.

python -m bench.parallel --model smollm2 --layouts 1x1 2x1 1x2 python -m bench.parallel --random
dense --threads 8 --layouts 1x1 2x1 2x1:gathered 4x1 4x1:2d 1x2 2x2

A layout is TENSORxSTAGES, or TENSORx1:gathered, TENSORx1:phased, TENSORx1:2d,
TENSORxSTAGES:experts, or with the layers of each stage, like 1x2:12,18. Every layout has as many
threads in all as --threads says, or each rank as many as --rank-threads. Layouts take turns, so
that what else the machine does meets all of them; figures are medians. Beside them: what `tidemill
plan-layout --hardware here` estimates, and if both name the same layout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tidemill.config import EngineOptions
from tidemill.config.choices import TENSOR_LAYOUTS
from tidemill.distributed.channel import Door
from tidemill.distributed.group import Group
from tidemill.distributed.layouts import Phase, engine_seconds, rank_of_host
from tidemill.distributed.peers import meet_peers
from tidemill.distributed.shared import SharedGroup, make_shared
from tidemill.distributed.sockets import SocketGroup
from tidemill.engine.core import EngineCore
from tidemill.engine.load import inspect, load_core
from tidemill.kernels import machine
from tidemill.kernels.rates import measure_rates
from tidemill.runner.worker_group import WorkerGroup
from tidemill.types.model_config import ModelConfig
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

KEY = b"of this benchmark"
SHAPES = ((1, 576), (1, 4096), (16, 4096), (256, 4096))
ROUNDS = 200
TINY = {
    "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 8192, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
}  # fmt: skip
RANDOM = {  # about 200 million values each
    "dense": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 5632} | TINY,
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": 5632, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 352, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    } | TINY,
}  # fmt: skip


def join(kind: str, folder: Path, rank: int) -> Group:
    if kind == "shared":
        return SharedGroup(folder / "group", rank, 2)
    address: list[str | tuple[str, int]] = [str(folder / f"{one}.sock") for one in range(2)]
    return SocketGroup(
        rank, meet_peers(rank, {1 - rank}, address, Door(str(folder / f"{rank}.sock"), KEY), KEY)
    )


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


def parts_of(layout: str) -> tuple[int, int, str]:
    """Ranks that share layers, stages, and how layers are shared."""
    ranks, _, how = layout.partition(":")
    tensor, stages = map(int, ranks.split("x"))
    return tensor, stages, how or "1d"


def threads_of(given: argparse.Namespace, layout: str) -> int:
    """Of each rank."""
    tensor, stages, _ = parts_of(layout)
    return given.rank_threads or max(1, given.threads // (tensor * stages))


def start(given: argparse.Namespace, layout: str) -> EngineCore:
    tensor, stages, how = parts_of(layout)
    core = load_core(
        EngineOptions(
            model=given.model, dtype=given.dtype, device="cpu", threads=threads_of(given, layout), max_requests=given.requests,
            tensor_parallel=tensor, tensor_layout=how if how in TENSOR_LAYOUTS else "1d", expert_parallel=how == "experts",
            pipeline_parallel=stages, pipeline_layers=how if "," in how else None, kv_memory_bytes=2**28, speculate="off",
            prefix_caching=False, load_format="dummy" if given.random else "auto",
        )
    )  # fmt: skip
    if isinstance(core.runner, WorkerGroup) and not given.random:
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
                f"  {layout}: rank 0 holds {held:.1f} MiB of weights; {all_bytes:.1f} MiB are gathered in each step",
                flush=True,
            )
    return core


def decode(core: EngineCore, given: argparse.Namespace, name: str) -> tuple[float, float]:
    """Seconds for the prompts, and of a step that decodes."""
    params = SamplingParams(temperature=0.0, max_tokens=given.steps + 1, ignore_eos=True)
    for i in range(given.requests):
        core.submit(
            Submit(
                f"{name}-{i}",
                [100 + (7919 * i + 31 * k) % 8_000 for k in range(given.prompt_len)],
                params,
            )
        )
    begin, waiting = time.perf_counter(), {f"{name}-{i}" for i in range(given.requests)}
    while waiting:
        waiting -= {delta.request_id for delta in core.step()[0].deltas if delta.token_ids}
    prefill, times = time.perf_counter() - begin, []
    while core.has_work:
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    return prefill, statistics.median(times)


def compare(given: argparse.Namespace, took: dict[str, tuple[float, float]]) -> None:
    """The cost model's order of layouts that have as many ranks, and the measured one."""
    model: ModelConfig = inspect(given.model)[2]
    num, context = given.requests, given.prompt_len
    for size in sorted({parts_of(layout)[0] for layout in took} - {1}):
        measured = {
            how: times
            for layout, times in took.items()
            for tensor, stages, how in [parts_of(layout)]
            if (tensor, stages) == (size, 1)
        }
        threads = given.rank_threads * size or given.threads
        machine.set_threads(threads)
        rates = measure_rates()
        flops, read, copied = (rate / 1e9 for rate in (rates.flops, rates.memory, rates.copies))
        print(
            f"estimates, by {flops:.0f} GFLOP/s, {read:.1f} GB/s read and {copied:.1f} GB/s copied by {threads} threads:"
        )
        device = rank_of_host(rates.flops, rates.memory, rates.copies, size)
        for place, phase in enumerate(
            (Phase("prefill", num * context, num, context), Phase("decode", num, num, context))
        ):
            seconds = engine_seconds(model, size, phase, device)
            estimated = {how: spent for how, spent in seconds.items() if how in measured}
            if len(estimated) < 2:
                continue
            clock = {how: measured[how][place] for how in estimated}
            by_cost, by_clock = (
                sorted(estimated, key=estimated.__getitem__),
                sorted(clock, key=clock.__getitem__),
            )
            told = ", ".join(
                f"{how} {1e3 * estimated[how]:.1f} ({1e3 * clock[how]:.1f})" for how in by_cost
            )
            agree = "the same order" if by_cost == by_clock else "the same first"
            verdict = agree if by_cost[0] == by_clock[0] else f"measured, {by_clock[0]} is first"
            print(f"  {size} ranks, {phase.name}, ms estimated (measured): {told}: {verdict}")


def measure(given: argparse.Namespace) -> None:
    cores = {}
    for layout in given.layouts:
        begin = time.perf_counter()
        cores[layout] = start(given, layout)
        print(f"  {layout}: started in {time.perf_counter() - begin:.1f} s", flush=True)
    taken: dict[str, list[tuple[float, float]]] = {layout: [] for layout in cores}
    with contextlib.suppress(KeyboardInterrupt):  # what has been measured by then is shown
        for number in range(given.rounds):
            for layout, core in cores.items():
                # this process has rank 0 of all layouts, and one pool of threads
                machine.set_threads(threads_of(given, layout))
                taken[layout].append(decode(core, given, str(number)))
    took = {}
    for layout, times in taken.items():
        prefill, step = (statistics.median(column) for column in zip(*times, strict=True))
        took[layout] = prefill, step
        cores[layout].close()
    base = took[given.layouts[0]]
    threads = (
        f"{given.rank_threads} threads a rank"
        if given.rank_threads
        else f"{given.threads} threads in all"
    )
    rounds = min(map(len, taken.values()))
    print(
        f"{rounds} rounds, {given.requests} requests, prompts of {given.prompt_len}, {threads}; ratios to {given.layouts[0]}:"
    )
    for layout, (prefill, step) in took.items():
        ratios = f"{prefill / base[0]:.2f}, {step / base[1]:.2f}"
        print(
            f"  {layout:12} prefill {1e3 * prefill:8.1f} ms, step {1e3 * step:7.2f} ms ({ratios})"
        )
    compare(given, took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--random", choices=list(RANDOM), help="random weights of this shape instead of a model"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=["1x1", "2x1", "1x2", "2x1:gathered"],
        help="ranks x stages[:layout]",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--rank-threads",
        type=int,
        default=0,
        help="threads of each rank, however many ranks there are",
    )
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-collectives", action="store_true")
    parser.add_argument("--rank-one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.rank_one:
        reduce_all(join(given.rank_one[0], Path(given.rank_one[1]), 1))
        return
    if not given.no_collectives:
        show_collectives()
    print("ranks:", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if given.random:
            given.model = folder
            (Path(folder) / "config.json").write_text(json.dumps(RANDOM[given.random]))
        measure(given)


if __name__ == "__main__":
    main()
