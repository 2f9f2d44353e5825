"""Collectives on a GPU: ranks as processes that share one. `python -m bench.gpu_group [--ranks 2]`

NCCL does not let ranks of one host share a GPU. So here each gives itself another name of its host (NCCL_HOSTID), and they talk
by sockets of the loopback interface: what it shows is that all is right, and what NCCL costs at least, not what a network does.

Without the multi-process service, a GPU runs kernels of several processes in turns of about a millisecond, and a rank that waits
for another waits for its turn. So it is started, if it can be; the table says if it was.

Checks of engines say what they are at. One that stands still for a while shows where all of its threads are, its workers' too.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

_SERVICE = "CUDA_MPS_PIPE_DIRECTORY"
SIZES = [(1, 4096), (16, 4096), (64, 4096), (256, 4096), (2048, 4096)]


class Progress:
    """What a check is at, and since when. Nothing to say for `still_s`: it hangs."""

    def __init__(self, still_s: float = 60.0) -> None:
        self._began, self.still_s = time.monotonic(), still_s
        self._watch: threading.Timer | None = None

    def __call__(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", flush=True)
        self.end()
        self._watch = threading.Timer(self.still_s, self._show)
        self._watch.daemon = True
        self._watch.start()

    def end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def _show(self) -> None:
        """Workers show theirs as they end: a group without them is of no use, so this process ends as well."""
        print(f"nothing happened for {self.still_s:.0f} s", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        for child in children(os.getpid()):
            with contextlib.suppress(OSError):
                if b"tidemill.engine.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(child, signal.SIGABRT)


say = Progress()


def as_host(number: int) -> dict[str, str]:
    """The environment of a rank that is to be seen as one of another host."""
    off = {f"NCCL_{what}": "0" for what in ("NVLS_ENABLE", "MNNVL_ENABLE")}
    return {"NCCL_HOSTID": f"host-{number}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", **off}


def measure(path: Path, rank: int, size: int) -> None:
    import torch

    from tidemill.kernels.cuda.nccl import Library
    from tidemill.parallel.channel import Door
    from tidemill.parallel.cuda import CudaGroup
    from tidemill.parallel.peers import Devices, meet_peers, on_devices
    from tidemill.parallel.sockets import SocketGroup

    os.environ |= as_host(rank)
    faulthandler.dump_traceback_later(50, exit=True)  # it hangs
    key, addresses = b"a key of this bench", [str(path / f"{one}.sock") for one in range(size)]
    host = SocketGroup(rank, meet_peers(rank, set(range(size)) - {rank}, addresses, Door(addresses[rank], key), key))
    groups: dict[str, Any] = {"IPC": CudaGroup(host)}
    before, began = torch.cuda.mem_get_info()[0], time.perf_counter()
    groups["NCCL"] = on_devices(host, Devices("cuda", "nccl"))
    taken, seconds = (before - torch.cuda.mem_get_info()[0]) / 2**20, time.perf_counter() - began
    if rank == 0:
        print(f"NCCL {Library().version}: started in {seconds:.1f} s, {taken:.0f} MiB of both ranks", flush=True)
    for group in groups.values():
        group.begin()
    for rows, width in SIZES:
        measure_sums(groups, rows, width)
    widths = [64128 + 128 * i for i in range(size)]
    logits = [torch.randn(17, width, generator=torch.Generator().manual_seed(i)) for i, width in enumerate(widths)]
    for name, group in groups.items():
        for _ in range(5):
            assert torch.equal(group.all_gather(logits[rank].cuda(), 1, widths).cpu(), torch.cat(logits, 1)), "wrong gather"
        long = [one.T.contiguous() for one in logits]
        assert torch.equal(group.all_gather(long[rank].cuda(), 0, widths).cpu(), torch.cat(long)), "wrong gather of rows"
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
    parts = [torch.randn(rows, width, generator=torch.Generator().manual_seed(rows + i)).bfloat16() for i in range(size)]
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
        print(f"all_reduce {rows:5d} x {width} bf16: {told}, floor {moved:.1f}; bits equal", flush=True)


def check_engine(num_ranks: int) -> None:
    """Ranks that share each layer: as near to float32 as one process, and the same bits alone, among others and in halves."""
    from bench.gpu_engine_checks import ask, assert_near, random_llama
    from tidemill.config import EngineOptions
    from tidemill.engine.load import load_core
    from tidemill.sampling import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        reference = random_llama(Path(folder))
        options = EngineOptions(model=folder, kv_memory_bytes=2**28, max_requests=64, tensor_parallel=num_ranks)
        core = load_core(options)
        requests = {
            f"r{i}": ([(7 * i + j) % 250 + 2 for j in range(20 + 37 * i)], SamplingParams(max_tokens=24, logprobs=2, seed=i))
            for i in range(12)
        }
        together = ask(core, requests)
        for name, request in list(requests.items())[::5]:
            assert ask(core, {name: request})[name] == together[name], "alone and among others differ"
        assert_near(reference, core, list(range(2, 200)))
        core.close()
        print(f"engine of {num_ranks} ranks: right", flush=True)
        core = load_core(replace(options, nano_batching="on"))
        assert ask(core, requests) == together, "steps in halves differ"
        core.close()
        print(f"engine of {num_ranks} ranks, steps in halves: right", flush=True)


def small_core(folder: str, **options: Any) -> Any:
    from tidemill.config import EngineOptions
    from tidemill.engine.load import load_core

    given = {"kv_memory_bytes": 2**27, "max_requests": 8, "token_budget": 256, "max_context": 512} | options
    return load_core(EngineOptions(model=folder, **given))


def some_requests() -> dict[str, Any]:
    from tidemill.sampling import SamplingParams

    return {
        f"r{i}": ([(7 * i + j) % 250 + 2 for j in range(20 + 37 * i)], SamplingParams(max_tokens=16, logprobs=2, seed=i))
        for i in range(6)
    }


@contextlib.contextmanager
def other_host(folder: Path) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    """A worker that comes by TCP, as one of another host would. Options of the engine, and the worker."""
    key = folder / "key"
    key.write_text(secrets.token_hex(32))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["worker", "--join", address, "--key-file", str(key)]
    os.environ |= as_host(0)
    worker = subprocess.Popen([sys.executable, "-m", "tidemill", *command], env=os.environ | as_host(1))
    try:
        yield {"remote_workers": 1, "workers_address": address, "workers_key_file": str(key)}, worker
    finally:
        worker.kill()
        worker.wait()


def check_pipeline(num_ranks: int) -> None:
    """Stages on one GPU: bit for bit what one process computes, alone and among others; the last one also as of another host."""
    from bench.gpu_engine_checks import ask, random_llama

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as workers:
        random_llama(Path(folder))
        requests, answers = some_requests(), []
        for layout in ({}, {"pipeline_parallel": num_ranks}, {"pipeline_parallel": num_ranks, "remote": True}):
            say(f"{layout or 'one process'}: starts")
            given = dict(layout)
            if given.pop("remote", False):
                given |= workers.enter_context(other_host(Path(folder)))[0]
            core = small_core(folder, **given)
            say("is ready")
            answers.append(ask(core, requests))
            say("has answered all")
            alone = ask(core, {"r3": requests["r3"]})["r3"]
            say("has answered one alone")
            core.close()
            assert alone == answers[-1]["r3"], "alone and among others differ"
            assert answers[0] == answers[-1], "stages and one process differ"
        say(f"pipeline of {num_ranks} stages: the bits of one process")


def check_hosts(num_ranks: int, kind: str = "llama") -> None:
    """Ranks that share each layer, the last one as of another host, by NCCL: bit for bit what they compute by CUDA IPC, alone and
    among others."""
    from bench.gpu_engine_checks import ask, random_llama

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as workers:
        (random_llama if kind == "llama" else random_moe)(Path(folder))
        layout = {"tensor_parallel": num_ranks} | ({} if kind == "llama" else {"expert_parallel": True})
        requests, answers = some_requests(), []
        for is_remote in (False, True):
            say(f"{kind}, {layout}, {'one of another host' if is_remote else 'one host'}: starts")
            given = workers.enter_context(other_host(Path(folder)))[0] if is_remote else {}
            halves = {"max_requests": 64, "nano_batching": "auto"}  # they are tried before the ranks begin
            core = small_core(folder, **halves, **layout, **given)
            say(f"is ready: {core_groups(core)}; {'; '.join(str(one) for one in core.runner.own.nano)}")
            answers.append(ask(core, requests))
            say("has answered all")
            for name in ("r0", "r3"):
                assert ask(core, {name: requests[name]})[name] == answers[-1][name], "alone and among others differ"
            say("the same bits alone and among others")
            core.close()
        assert answers[0] == answers[1], "NCCL and CUDA IPC differ"
        say(f"{kind} on {num_ranks} ranks of two hosts: the bits of CUDA IPC")


def core_groups(core: Any) -> str:
    """By which groups the layers of an engine exchange."""
    from tidemill.parallel.group import group_of
    from tidemill.parallel.shard import Shard

    return type(group_of(Shard(0, core.runner.team.world.tensor))).__name__


def check_ends(num_ranks: int) -> None:
    """A worker of another host that is killed amid a step ends the engine, with one error; so does an engine its worker."""
    from bench.gpu_engine_checks import random_llama
    from tidemill.errors import WorkerLost
    from tidemill.sampling import SamplingParams
    from tidemill.wire import Submit

    with tempfile.TemporaryDirectory() as folder, other_host(Path(folder)) as (given, worker):
        random_llama(Path(folder))
        core = small_core(folder, tensor_parallel=num_ranks, **given)
        core.submit(Submit("x", list(range(2, 100)), SamplingParams(max_tokens=400, ignore_eos=True)))
        for _ in range(20):
            core.step()
        say("computes; the worker is killed")
        worker.kill()
        began = time.monotonic()
        try:
            while core.has_work:
                core.step()
            raise AssertionError("went on without a rank")
        except WorkerLost as error:
            say(f"{time.monotonic() - began:.1f} s later: {error.message}")
        core.close()
    with tempfile.TemporaryDirectory() as folder, other_host(Path(folder)) as (given, worker):
        random_llama(Path(folder))
        command = [sys.executable, "-m", "bench.gpu_group", "--ranks", str(num_ranks), "--run", folder, json.dumps(given)]
        engine = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert engine.stdout is not None
        while engine.stdout.readline() != b"computes\n":
            assert engine.poll() is None
        say("an engine computes")
        rank = children(worker.pid)
        assert len(rank) == 1
        engine.kill()
        engine.wait()
        say("was killed")
        began = time.monotonic()
        while children(worker.pid) == rank:
            assert time.monotonic() < began + 40.0, "its worker waits for it"
            time.sleep(0.1)
        say("its worker has ended, and waits for another")


def children(pid: int) -> set[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(one) for each in found for one in each.read_text().split()}


def run_for_ever(folder: str, num_ranks: int, given: dict[str, Any]) -> None:
    from tidemill.sampling import SamplingParams
    from tidemill.wire import Submit

    core = small_core(folder, tensor_parallel=num_ranks, **given)
    for turn in range(10**6):
        core.submit(Submit(f"x{turn}", list(range(2, 100)), SamplingParams(max_tokens=400, ignore_eos=True)))
        while core.has_work:
            core.step()
            if turn == 0:
                print("computes", flush=True)


def random_moe(folder: Path) -> Any:
    """A small mixture of experts, as Transformers computes it in float32."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from bench.gpu_engine_checks import with_weights

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=2048, initializer_range=0.05, num_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=256, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
    )  # fmt: skip
    model = with_weights(Qwen3MoeForCausalLM(config), torch.bfloat16)
    model.save_pretrained(folder)
    return with_weights(model.cuda().eval(), torch.float32)


def check_experts(num_ranks: int) -> None:
    """Experts divided among ranks: as near to float32 as in one process, and the same bits alone and among others."""
    import torch

    from bench.gpu_engine_checks import ask

    with tempfile.TemporaryDirectory() as folder:
        say("a model is made")
        reference, requests, prompt = random_moe(Path(folder)), some_requests(), list(range(2, 200))
        exact, errors = exact_scores(reference, prompt), []
        del reference
        torch.cuda.empty_cache()
        for layout in ({}, {"tensor_parallel": num_ranks, "expert_parallel": True}):
            say(f"{layout or 'one process'}: starts")
            core = small_core(folder, **layout)
            say("is ready")
            together = ask(core, requests)
            say("has answered all")
            assert ask(core, {"r3": requests["r3"]})["r3"] == together["r3"], "alone and among others differ"
            errors.append(error_of(core, prompt, exact))
            core.close()
            say(f"the same bits alone and among others; off by {errors[-1]:.4f}")
        assert errors[1] < 1.3 * errors[0] + 0.005
        say(f"experts on {num_ranks} ranks: right")


def exact_scores(reference: Any, prompt: list[int]) -> Any:
    """Log probabilities of a prompt's tokens, in float32."""
    import torch

    targets = torch.tensor(prompt[1:], device="cuda")[:, None]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt], device="cuda")).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, targets).flatten().cpu()


def error_of(core: Any, prompt: list[int], exact: Any) -> float:
    import torch

    from bench.gpu_engine_checks import ask
    from tidemill.sampling import SamplingParams

    scored = ask(core, {"x": (prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))})["x"][1]
    error = torch.tensor([entry.logprob for entry in scored]) - exact
    return float(error.pow(2).mean().sqrt())


def check_quantized(kind: str, num_ranks: int) -> None:
    """Quantized weights, cut among ranks: as near to float32 as in one process, and the same bits alone and among others."""
    from bench.gpu_engine_checks import ask, random_llama

    with tempfile.TemporaryDirectory() as folder:
        reference, requests, prompt = random_llama(Path(folder)), some_requests(), list(range(2, 200))
        exact, errors = exact_scores(reference, prompt), []
        del reference
        for ranks in (1, num_ranks):
            say(f"{kind} on {ranks}: starts")
            core = small_core(folder, quantization=kind, tensor_parallel=ranks)
            say("is ready")
            together = ask(core, requests)
            assert ask(core, {"r3": requests["r3"]})["r3"] == together["r3"], "alone and among others differ"
            errors.append(error_of(core, prompt, exact))
            core.close()
        say(f"{kind}: off by {errors[0]:.4f} in one process, {errors[1]:.4f} on {num_ranks} ranks")
        assert errors[1] < 1.3 * errors[0] + 0.005


def time_engine(num_ranks: int, is_remote: bool = False) -> None:
    """Decode steps of the 8B shape: one process, and ranks that share the GPU. `is_remote`: the last one as of another host."""
    from bench.gpu_workloads import MODELS
    from tidemill.config import EngineOptions
    from tidemill.engine.load import load_core
    from tidemill.sampling import SamplingParams
    from tidemill.wire import Submit

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as workers:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS["llama8b"]))
        for ranks in [num_ranks] if is_remote else [1, num_ranks]:
            given = {"kv_memory_bytes": 2**32, "max_requests": 64, "max_context": 2048, "tensor_parallel": ranks}
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
                print(f"llama8b, {ranks} rank(s), batch {num}: {sorted(times)[len(times) // 2] * 1000:.2f} ms a step", flush=True)
            core.close()
            del core


SUMS = "sums"  # the collectives themselves
CHECKS: dict[str, Callable[[int], None]] = {
    "check": check_engine, "pipeline": check_pipeline, "experts": check_experts, "time": time_engine,
    "hosts": check_hosts, "hosts-experts": partial(check_hosts, kind="experts"), "hosts-ends": check_ends,
    "hosts-time": partial(time_engine, is_remote=True),
    **{kind: partial(check_quantized, kind) for kind in ("fp8", "int4", "int8")},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--run", nargs=2, metavar=("MODEL", "OPTIONS"), help="an engine that computes until it is killed")
    parser.add_argument("--engine", nargs="+", choices=[SUMS, *CHECKS], help="only these checks")
    parser.add_argument("--still", type=float, default=60.0, help="seconds without progress after which tracebacks are shown")
    given = parser.parse_args()
    if given.rank is not None:
        measure(given.path, given.rank, given.ranks)
        return
    if given.run:
        run_for_ever(given.run[0], given.ranks, json.loads(given.run[1]))
    if given.engine and _SERVICE in os.environ:
        os.environ["PYTHONFAULTHANDLER"] = "1"  # of workers
        faulthandler.enable()
        say.still_s = given.still
        for what in given.engine:
            CHECKS[what](given.ranks)
        say.end()
        return
    command, codes = [sys.executable, "-m", "bench.gpu_group", "--ranks", str(given.ranks), "--still", str(given.still)], {}
    with tempfile.TemporaryDirectory() as folder, sharing(Path(folder)):
        asked = given.engine or [SUMS, *CHECKS]
        if SUMS in asked:
            measure_all(command, Path(folder), given.ranks)
        for what in [one for one in asked if one != SUMS]:
            codes[what] = subprocess.run([*command, "--engine", what], timeout=240, check=False).returncode
    print("exit codes", codes, flush=True)
    sys.exit(any(codes.values()))


def measure_all(command: list[str], path: Path, num_ranks: int) -> None:
    """The collectives, each rank in a process."""
    ranks = [subprocess.Popen([*command, "--path", str(path), "--rank", str(rank)]) for rank in range(num_ranks)]
    try:
        print("exit codes", [rank.wait(timeout=60) for rank in ranks], flush=True)
    except subprocess.TimeoutExpired:
        print("a rank waits for another that has failed", flush=True)
    finally:
        for rank in ranks:
            rank.kill()


@contextlib.contextmanager
def sharing(folder: Path) -> Iterator[None]:
    """The multi-process service, if it can be started. It ends when no process uses it any more, so this one must not."""
    os.environ |= {_SERVICE: f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
    try:
        service = subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, text=True, check=False)
        print("multi-process service:", service.returncode, service.stdout.strip(), service.stderr.strip(), flush=True)
    except OSError as error:
        print("multi-process service: not there:", error, flush=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, capture_output=True)


if __name__ == "__main__":
    main()
