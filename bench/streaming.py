"""A model twice as large as the memory for its weights: how much of the disk's read rate streaming
reaches, and what it costs.

    python -m bench.streaming [--gigabytes 2] [--share 0.5] [--kind layers|experts|neurons] [--folder FOLDER] [--rounds 3]

Random weights of a Llama (or of a mixture of experts) are written to FOLDER and streamed from
there; each engine is a process of its own. Rates are measured in turns: the disk alone, read past
the page cache (O_DIRECT) by as many threads and in such pieces as streaming uses and by more, the
best of them; then decode steps of one request and of 32. Memory is the anonymous memory of the
process, less what it had before the model was loaded. The tokens of both engines are compared. With
neurons: a Llama with ReLU whose gates have a bias, so that about a tenth of its neurons is not
zero; streamed by neuron, and for comparison by layer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_LAYERS, _VOCABULARY = 24, 8192
_TOKENS = 5


def settings(gigabytes: float, kind: str) -> dict[str, Any]:
    """Of a model of bfloat16 weights with about so many bytes."""
    # a layer has about 11 width² values
    width = int((gigabytes * 1e9 / 2 / _LAYERS / 11) ** 0.5) // 64 * 64
    common = {
        "vocab_size": _VOCABULARY, "hidden_size": width, "num_hidden_layers": _LAYERS, "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "bos_token_id": 0,
        "eos_token_id": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    if kind == "neurons":
        return common | {
            "architectures": ["LlamaForCausalLM"], "intermediate_size": int(2.33 * width) // 64 * 64, "hidden_act": "relu",
            "mlp_bias": True,
        }  # fmt: skip
    if kind == "layers":
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "intermediate_size": int(2.33 * width) // 64 * 64,
        }
    return common | {
        "architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": width, "moe_intermediate_size": width // 8 // 8 * 8,
        "num_experts": 32, "num_experts_per_tok": 4, "head_dim": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "hidden_act": "silu",
    }  # fmt: skip


def write_relu(folder: Path, config: dict[str, Any]) -> None:
    """Weights of such a model, in bfloat16."""
    import torch
    from safetensors.torch import save_file

    width, inner = config["hidden_size"], config["intermediate_size"]
    source = torch.Generator().manual_seed(0)

    def matrix(num_out: int, num_in: int) -> torch.Tensor:
        return torch.randn(num_out, num_in, generator=source).mul_(num_in**-0.5).bfloat16()

    tensors = {
        "model.embed_tokens.weight": matrix(_VOCABULARY, width) * width**0.5,
        "model.norm.weight": torch.ones(width),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        for part in "qkvo":
            tensors[f"{name}.self_attn.{part}_proj.weight"] = matrix(width, width)
        for part, shape in {
            "gate": (inner, width),
            "up": (inner, width),
            "down": (width, inner),
        }.items():
            tensors[f"{name}.mlp.{part}_proj.weight"] = matrix(*shape)
            tensors[f"{name}.mlp.{part}_proj.bias"] = torch.full(
                (shape[0],), -1.28 if part == "gate" else 0.0
            )
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{part}.weight"] = torch.ones(width)
    save_file(tensors, folder / "model.safetensors")


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def disk_rate(path: Path, num_readers: int, piece: int, most: int = 2**31) -> float:
    """Bytes a second of reads past the page cache, one piece after the other."""
    import mmap

    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = min(most, os.fstat(fd).st_size) // piece * piece
    offsets, buffers = (
        iter(range(0, size, piece)),
        [mmap.mmap(-1, piece) for _ in range(num_readers)],
    )

    def work(buffer: mmap.mmap) -> None:
        for offset in offsets:  # of which each thread takes the next
            assert os.preadv(fd, [buffer], offset) == piece

    began = time.perf_counter()
    with ThreadPoolExecutor(num_readers) as threads:
        list(threads.map(work, buffers))
    took = time.perf_counter() - began
    os.close(fd)
    return size / took


class Engine:
    def __init__(self, folder: Path, budget: int | None, by_layer: bool) -> None:
        from tidemill.config import EngineOptions
        from tidemill.engine.load import load_core

        before = anonymous_bytes()
        has_weights = any(folder.glob("*.safetensors"))
        options = EngineOptions(
            model=str(folder), load_format="auto" if has_weights else "dummy", weight_memory_bytes=budget,
            weight_cache=f"{folder}/cache", max_context=256, max_requests=32, kv_memory_bytes=2**27, speculate="off",
            max_loras=1 if by_layer else None, max_lora_rank=8 if by_layer else None,
        )  # fmt: skip
        began = time.perf_counter()
        self.core = load_core(options)
        self.load_s = time.perf_counter() - began
        self.tokens(1)
        self.held = anonymous_bytes() - before

    def tokens(self, num_requests: int, steps: int = _TOKENS) -> tuple[list[list[int]], float, int]:
        """Greedy tokens of some requests, seconds of a decode step, and bytes that were read in all
        of those steps."""
        from tidemill.types.sampling import SamplingParams
        from tidemill.types.wire import Submit

        found: dict[str, list[int]] = {}
        for number in range(num_requests):
            name = f"{num_requests}.{number}"
            found[name] = []
            params = SamplingParams(max_tokens=steps, temperature=0.0, ignore_eos=True)
            self.core.submit(Submit(name, [2 + number, 3, 5, 7], params))
        took, first = [], 0
        while self.core.has_work:
            began = time.perf_counter()
            output, failed = self.core.step()
            assert not failed, failed
            took.append(time.perf_counter() - began)
            if len(took) == 1:
                first = self.bytes_read
            for delta in output.deltas:
                found[delta.request_id] += delta.token_ids
        return list(found.values()), sum(took[1:]), self.bytes_read - first

    @property
    def bytes_read(self) -> int:
        streaming = self.core.runner.model.streaming  # type: ignore[attr-defined]
        return (
            0
            if streaming is None or streaming.stream is None
            else int(streaming.stream.figures.num_bytes)
        )


def child(folder: Path, budget: int | None, rounds: int, by_layer: bool) -> dict[str, Any]:
    """What an engine of this process measures; the disk in turns with it."""
    from tidemill.layers.streamed import resident_bytes

    engine = Engine(folder, budget, by_layer)
    model, result = engine.core.runner.model, dict[str, Any]()  # type: ignore[attr-defined]
    result |= {
        "load_s": engine.load_s,
        "held": engine.held,
        "tokens": [engine.tokens(1)[0], engine.tokens(32)[0]],
    }
    result |= {
        "weights": resident_bytes(model),
        "speed": {1: [], 32: []},
        "rate": {1: [], 32: []},
        "disk": [],
    }
    result["step"] = {}
    if model.streaming is not None:
        stream = model.streaming
        result |= {
            "counted": stream.held_bytes,
            "streamed": stream.streamed_bytes,
            "fixed": stream.fixed_bytes,
        }
    for _ in range(rounds):
        if model.streaming is not None:
            time.sleep(0.3)  # until what was read ahead is there
            path = model.streaming.store.file.path
            result["disk"].append(
                max(disk_rate(path, *how) for how in ((4, 2**20), (8, 2**20), (4, 2**22)))
            )
        for num in (1, 32):
            _, seconds, num_bytes = engine.tokens(num)
            result["speed"][num].append(num * (_TOKENS - 1) / seconds)
            result["rate"][num].append(num_bytes / seconds)
            result["step"][num] = num_bytes / (_TOKENS - 1)
    if model.streaming is not None:
        figures = model.streaming.stream.figures
        result |= {"asked": figures.num_asked, "read": figures.num_read}
        result |= {"missed": figures.num_missed, "foreseen": figures.num_foreseen}
    return result


def apart(folder: Path, budget: int | None, rounds: int, by_layer: bool = False) -> dict[str, Any]:
    """In a process of its own."""
    command = [
        sys.executable,
        "-m",
        "bench.streaming",
        "--child",
        str(folder),
        "--budget",
        str(budget or 0),
        "--rounds",
        str(rounds),
    ]
    command += ["--by-layer"] if by_layer else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(whole: dict[str, Any], half: dict[str, Any], again: dict[str, Any], budget: int) -> None:
    gb, mid = 1e9, statistics.median
    print(
        f"weights {whole['weights'] / gb:.2f} GB; allowed {budget / gb:.2f} GB; tokens equal: {whole['tokens'] == half['tokens']}"
    )
    extra = (half["held"] - half["counted"]) / 2**20
    print(
        f"memory: {half['counted'] / gb:.2f} GB of weights held; the process grew by {half['held'] / gb:.2f} GB, of which"
    )
    print(
        f"  {extra:.0f} MiB are KV cache, activations and the rest; with all weights in memory by {whole['held'] / gb:.2f} GB"
    )
    print(
        f"start: {whole['load_s']:.1f} s in memory, {half['load_s']:.1f} s with a new file, {again['load_s']:.1f} s with it there"
    )
    print("requests  disk GB/s  streamed GB/s  share  tok/s streamed  tok/s in memory")
    for num in ("1", "32"):
        shares = [rate / disk for rate, disk in zip(again["rate"][num], again["disk"], strict=True)]
        print(
            f"{num:>8}  {mid(again['disk']) / gb:9.2f}  {mid(again['rate'][num]) / gb:13.2f}  {mid(shares):5.0%}  "
            f"{mid(again['speed'][num]):14.2f}  {mid(whole['speed'][num]):15.2f}"
        )
    print(
        f"read in a step: {again['step']['1'] / 1e6:.1f} MB with 1 request, {again['step']['32'] / 1e6:.1f} MB with 32"
    )
    print(
        f"units asked for {again['asked']}, read {again['read']}; in no slot {again['missed']}, foreseen {again['foreseen']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--kind", choices=("layers", "experts", "neurons"), default="layers")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--by-layer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(child(given.child, given.budget or None, given.rounds, given.by_layer)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        config = settings(given.gigabytes, given.kind)
        (folder / "config.json").write_text(json.dumps(config))
        if given.kind == "neurons":
            write_relu(folder, config)
        whole = apart(folder, None, given.rounds)
        budget = int(given.share * whole["weights"])
        half = apart(folder, budget, 1)
        report(whole, half, apart(folder, budget, given.rounds), budget)
        if given.kind == "neurons":
            print("by layer, with the same memory:")
            report(
                whole,
                apart(folder, budget, 1, True),
                apart(folder, budget, given.rounds, True),
                budget,
            )


if __name__ == "__main__":
    main()
