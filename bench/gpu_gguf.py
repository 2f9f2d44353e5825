"""A GGUF in Q4_K with the shape of an 8B Llama on the GPU at hand, beside the same model in
bfloat16: `python -m bench.gpu_gguf`

The file has random blocks of Q4_K (the head: Q6_K) and is written here; the package `gguf` must be
there to read it. With few layers, which is quicker, the time of a token is given for 32 by the
difference of two numbers of layers.
"""

from __future__ import annotations

import argparse
import gc
import json
import struct
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from bench.gpu import run_workload
from bench.gpu_workloads import MODELS, workloads
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core

LLAMA = MODELS["llama8b"]
Q4_K, Q6_K, F32 = 12, 14, 0
_BLOCK = {Q4_K: 144, Q6_K: 210}
_U32, _FLOAT, _STRING = 4, 6, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def blocks(kind: int, num_out: int, num_in: int, draw: np.random.Generator) -> np.ndarray:
    """Random codes and scales, of values whose root mean square is about that of usual weights."""
    made = draw.integers(0, 256, (num_out * num_in // 256, _BLOCK[kind]), np.uint8)
    if kind == Q4_K:
        scale = 1.0 / (150 * num_in**0.5)
        made[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    else:
        made[:, -2:] = np.array([1.0 / (1300 * num_in**0.5)], np.float16).view(np.uint8)
    return made


def write(path: Path, num_layers: int) -> None:
    hidden, inner, vocabulary = (
        LLAMA[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv, dim = (
        LLAMA[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    numbers = {
        "block_count": num_layers, "context_length": 8192, "embedding_length": hidden, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": kv, "vocab_size": vocabulary, "rope.dimension_count": dim,
    }  # fmt: skip
    matrices = {
        "attn_q": (heads * dim, hidden), "attn_k": (kv * dim, hidden), "attn_v": (kv * dim, hidden),
        "attn_output": (hidden, heads * dim), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    tensors: list[tuple[str, int, tuple[int, ...]]] = [
        ("token_embd.weight", Q4_K, (vocabulary, hidden))
    ]
    for layer in range(num_layers):
        tensors += [
            (f"blk.{layer}.{name}.weight", F32, (hidden,)) for name in ("attn_norm", "ffn_norm")
        ]
        tensors += [(f"blk.{layer}.{name}.weight", Q4_K, shape) for name, shape in matrices.items()]
    tensors += [
        ("output_norm.weight", F32, (hidden,)),
        ("output.weight", Q6_K, (vocabulary, hidden)),
    ]
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(numbers) + 4))
        file.write(text("general.architecture") + struct.pack("<I", _STRING) + text("llama"))
        file.write(text("tokenizer.ggml.model") + struct.pack("<I", _STRING) + text("none"))
        for name, value in numbers.items():
            file.write(text(f"llama.{name}") + struct.pack("<II", _U32, value))
        for name, number in (
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("rope.freq_base", 500000.0),
        ):
            file.write(text(f"llama.{name}") + struct.pack("<If", _FLOAT, number))
        at = 0
        for name, kind, shape in tensors:
            file.write(
                text(name)
                + struct.pack("<I", len(shape))
                + struct.pack(f"<{len(shape)}Q", *shape[::-1])
            )
            file.write(struct.pack("<IQ", kind, at))
            at += -(-num_bytes(kind, shape) // 32) * 32
        fill_up(file)
        draw, cached = np.random.default_rng(0), dict[tuple[int, tuple[int, ...]], np.ndarray]()
        for _, kind, shape in tensors:  # matrices of a shape are the same in all layers
            if kind != F32 and (kind, shape) not in cached:
                cached[kind, shape] = blocks(kind, shape[0], shape[1], draw)
            file.write((np.ones(shape, np.float32) if kind == F32 else cached[kind, shape]).data)
            fill_up(file)


def num_bytes(kind: int, shape: tuple[int, ...]) -> int:
    return 4 * shape[0] if kind == F32 else shape[0] * shape[1] // 256 * _BLOCK[kind]


def fill_up(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % 32))


def measure(label: str, **options: Any) -> dict[str, float]:
    begin = time.perf_counter()
    core = load_core(
        EngineOptions(
            max_context=8192,
            max_waiting=10**6,
            speculate="off",
            kv_memory_bytes=40 * 2**30,
            **options,
        )
    )
    print(f"{label}: ready in {time.perf_counter() - begin:.1f} s", flush=True)
    run_workload(core, [([5] * 600, 8)] * 4)
    given, seen = workloads(100_000), {}
    for name in ("latency_b1", "prefill_4k", "decode_b256"):
        elapsed, _, rest = run_workload(core, given[name])
        seen[name] = rest / (given[name][0][1] - 1) * 1000 if name == "latency_b1" else elapsed
        print(
            f"{label} {name}: {seen[name]:.3f} {'ms a token' if name == 'latency_b1' else 's'}",
            flush=True,
        )
    core.close()
    del core
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", default="4,8", help="one number, or two, from which the time of 32 follows"
    )
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    seen: dict[str, list[dict[str, float]]] = {"Q4_K": [], "bf16": []}
    numbers = [int(one) for one in given.layers.split(",")]
    for num in numbers:
        folder = Path(tempfile.mkdtemp())
        begin = time.perf_counter()
        write(folder / "q4_k.gguf", num)
        print(f"{num} layers: written in {time.perf_counter() - begin:.1f} s", flush=True)
        seen["Q4_K"].append(measure(f"Q4_K, {num} layers", model=str(folder / "q4_k.gguf")))
        (folder / "q4_k.gguf").unlink()
        (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": num}))
        seen["bf16"].append(measure(f"bf16, {num} layers", model=str(folder), load_format="dummy"))
    for name in seen["bf16"][0]:
        ours, plain = ([one[name] for one in seen[kind]] for kind in ("Q4_K", "bf16"))
        whole = [one[0] + (32 - numbers[0]) / (numbers[1] - numbers[0]) * (one[1] - one[0]) if len(one) > 1 else one[0]
                 for one in (ours, plain)]  # fmt: skip
        print(
            f"{name}, of 32 layers: Q4_K {whole[0]:.3f}, bf16 {whole[1]:.3f} ({whole[1] / whole[0]:.2f}x)",
            flush=True,
        )


if __name__ == "__main__":
    main()
