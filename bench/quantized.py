"""Decode speed of quantized checkpoints on this CPU, each layout beside llama.cpp's nearest type:
same shape, interleaved.

    python -m bench.quantized --llama VENV [--threads 2] [--rounds 5] [--layouts gptq,nf4]
    python -m bench.quantized --kernels [--rounds 60]      one matrix by one row, our formats among themselves

The models are random Llamas of one shape (4 layers of 2048, feed-forward 5632): their codes are
drawn, not quantized, as only speed is measured. Every model is a process of its own, as in
bench/peers.py; figures are medians over rounds of turns. With one thread, time is the process's
own, so that what else the machine does counts less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import peers

VOCABULARY, LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 1024, 4, 2048, 5632, 32, 8, 64
LINEARS = {
    "self_attn.q_proj": (HEADS * DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * DIM),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
GGUF_NAMES = dict(
    zip(
        LINEARS,
        ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
        strict=True,
    )
)
SCALE = 0.002
RNG = np.random.default_rng(0)
Parts = dict[str, np.ndarray]


def _words(*shape: int) -> np.ndarray:
    return RNG.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def _scales(*shape: int) -> np.ndarray:
    return np.full(shape, SCALE, np.float16)


def gptq(num_out: int, width: int, bits: int = 4, ordered: bool = False) -> Parts:
    per_word = 32 // bits
    groups = RNG.permutation(width) // 128 if ordered else np.arange(width) // 128
    zeros = np.full(
        (width // 128, num_out // per_word), 0x77777777 if bits == 4 else 0x7F7F7F7F, np.int32
    )
    return {
        "qweight": _words(width // per_word, num_out), "qzeros": zeros,
        "scales": _scales(width // 128, num_out) * np.float16(2.0 ** (4 - bits)), "g_idx": groups.astype(np.int32),
    }  # fmt: skip


def awq(num_out: int, width: int) -> Parts:
    return {
        "qweight": _words(width, num_out // 8), "qzeros": _words(width // 128, num_out // 8),
        "scales": _scales(width // 128, num_out),
    }  # fmt: skip


def w8a8(num_out: int, width: int) -> Parts:
    codes = RNG.integers(-127, 128, (num_out, width), dtype=np.int8)
    return {"weight": codes, "weight_scale": np.full((num_out, 1), SCALE / 16, np.float32)}


def nf4(num_out: int, width: int) -> Parts:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [num_out, width]}
    return {
        "weight": RNG.integers(0, 256, (num_out * width // 2, 1), dtype=np.uint8),
        "weight.absmax": np.full(num_out * width // 64, SCALE * 8, np.float32),
        "weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(
            json.dumps(state).encode(), np.uint8
        ).copy(),
    }


def ternary(num_out: int, width: int) -> Parts:
    codes = RNG.integers(0, 3, (4, num_out // 4, width), dtype=np.uint8)
    return {
        "weight": codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6,
        "weight_scale": np.array([1 / SCALE / 8], np.float32),
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
_INT8 = {"weights": {"num_bits": 8, "type": "int"}, "targets": ["Linear"]}
_W8A8 = {"group_0": _INT8 | {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True}}}
# Layouts of folders: how a matrix is drawn, quantization_config, and llama.cpp's nearest type.
LAYOUTS: dict[str, tuple[Callable[[int, int], Parts], dict[str, object], str]] = {
    "gptq int4 g128": (gptq, _GPTQ, "Q4_0"),
    "gptq int4 g128 act-order": (
        lambda n, k: gptq(n, k, ordered=True),
        _GPTQ | {"desc_act": True},
        "Q4_0",
    ),
    "awq uint4 g128": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
        "Q4_1",
    ),
    "gptq int8 g128": (lambda n, k: gptq(n, k, 8), _GPTQ | {"bits": 8}, "Q8_0"),
    "w8a8 int8": (
        w8a8,
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": _W8A8},
        "Q8_0",
    ),
    "nf4 g64": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "IQ4_NL"),
    "ternary (BitNet)": (ternary, {"quant_method": "bitnet", "linear_class": "bitlinear"}, "TQ2_0"),
}
TYPES = {
    "Q4_0": (32, 18, 0),
    "Q4_1": (32, 20, 0),
    "Q8_0": (32, 34, 0),
    "IQ4_NL": (32, 18, 0),
    "TQ2_0": (256, 66, 64),
}


def write_folder(folder: Path, layout: str) -> None:
    import torch
    from safetensors.torch import save_file

    draw, settings, _ = LAYOUTS[layout]
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        for name, shape in LINEARS.items():
            for part, values in draw(*shape).items():
                tensors[f"model.layers.{layer}.{name}.{part}"] = torch.from_numpy(
                    np.ascontiguousarray(values)
                )
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
        "rope_theta": 10000.0, "hidden_act": "silu", "quantization_config": settings,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def write_gguf(path: Path, kind: str) -> None:
    """Blocks of random codes with small scales."""
    import gguf

    block, block_bytes, at = TYPES[kind]
    writer = gguf.GGUFWriter(path, "llama")
    settings = {
        "block_count": LAYERS, "context_length": 2048, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "vocab_size": VOCABULARY, "rope.dimension_count": DIM,
    }  # fmt: skip
    for key, value in settings.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "none")

    def matrix(num_out: int, width: int) -> np.ndarray:
        blocks = RNG.integers(0, 170, (num_out * width // block, block_bytes), dtype=np.uint8)
        if kind == "TQ2_0":
            codes = RNG.integers(0, 3, (4, *blocks.shape), dtype=np.uint8)
            blocks = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
        scale = np.float16(SCALE / (16 if kind in ("Q8_0", "IQ4_NL") else 1))
        blocks[:, at : at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        if kind == "Q4_1":
            blocks[:, 2:4] = np.frombuffer(np.float16(-7.5 * SCALE).tobytes(), np.uint8)
        return blocks.reshape(num_out, -1)

    raw = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(
        "token_embd.weight",
        RNG.standard_normal((VOCABULARY, HIDDEN), np.float32).astype(np.float16),
    )
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
        for name, shape in LINEARS.items():
            writer.add_tensor(
                f"blk.{layer}.{GGUF_NAMES[name]}.weight", matrix(*shape), raw_dtype=raw
            )
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(arguments: argparse.Namespace) -> None:
    wanted = [
        name
        for name in LAYOUTS
        if not arguments.layouts or any(part in name for part in arguments.layouts.split(","))
    ]
    kinds = sorted({LAYOUTS[name][2] for name in wanted} | {"Q4_0", "Q4_1"})
    with tempfile.TemporaryDirectory(prefix="quantized-") as temporary:
        found: dict[tuple[str, str], peers.Peer] = {}
        try:
            for kind in kinds:
                path = Path(temporary) / f"{kind}.gguf"
                write_gguf(path, kind)
                if arguments.llama:
                    found["llama.cpp", kind] = start(
                        "llama.cpp", f"{arguments.llama}/bin/python", path, arguments.threads
                    )
                if kind in ("Q4_0", "Q4_1", "Q8_0"):
                    found["tidemill", kind] = start(
                        "tidemill", sys.executable, path, arguments.threads
                    )
            for name in wanted:
                folder = Path(temporary) / name.replace(" ", "-")
                folder.mkdir()
                write_folder(folder, name)
                found["tidemill", name] = start(
                    "tidemill", sys.executable, folder, arguments.threads
                )
            values: dict[tuple[str, str], list[float]] = {}
            for seed in range(arguments.rounds):
                for key, peer in found.items():
                    value = peer.ask("decode, batch 1", seed)
                    if value is not None:
                        values.setdefault(key, []).append(value)
        finally:
            for peer in found.values():
                peer.close()
    report(
        {key: statistics.median(seen) for key, seen in values.items()}, wanted, arguments.threads
    )


# matrices one below the other: more than the caches hold, as in a model, and a call's own time
# counts little
COPIES = 32


def kernels(rounds: int) -> None:
    """A matrix of the feed-forward by one row, formats taking turns, one thread's own time; bytes
    are random.

    The time that a tenth of the calls keeps within: other processes take caches and bandwidth,
    which only adds to it."""
    import torch

    from tidemill.kernels import native

    assert native.lib is not None, "the compiled kernels are not built"
    native.lib.set_threads(1)
    num_out = INNER * COPIES
    groups = num_out * HIDDEN // 32
    # of ternary matrices: activations have no scale of their own and no threshold
    head = np.zeros(8, np.float32)
    made: dict[str, tuple[str, int, np.ndarray]] = {
        "Q4_0": ("S4", 2, np.full(groups, SCALE, np.float32)),
        "Q4_1": ("Q4", 2, np.full(2 * groups, SCALE, np.float16)),
        "ternary": ("T2", 4, np.concatenate([head, np.full(num_out, SCALE, np.float32)])),
    }
    weights = {
        name: (
            native.KINDS[kind],
            RNG.integers(0, 256, num_out * HIDDEN // per_byte, dtype=np.uint8),
            scales,
        )
        for name, (kind, per_byte, scales) in made.items()
    }
    x_TK = torch.randn(1, HIDDEN)
    seen: dict[str, list[float]] = {name: [] for name in weights}
    out = torch.zeros(num_out)  # once: fresh memory would cost a fault a page
    for _ in range(rounds):
        for name, (kind, codes, scales) in weights.items():
            begin = time.thread_time()
            places = codes.ctypes.data, scales.ctypes.data, None, num_out, out.data_ptr()
            assert not native.lib._linear(kind, x_TK.data_ptr(), 1, HIDDEN, *places)
            seen[name].append((time.thread_time() - begin) / COPIES * 1e6)
    middle = {name: sorted(values)[len(values) // 10] for name, values in seen.items()}
    print(
        f"| {INNER} x {HIDDEN}, one row | us | bytes | GB/s | / Q4_0 | / Q4_1 |\n|---|---|---|---|---|---|"
    )
    for name, (_, codes, scales) in weights.items():
        num_bytes, us = (codes.nbytes + scales.nbytes) // COPIES, middle[name]
        beside = f"{middle['Q4_0'] / us:.2f} | {middle['Q4_1'] / us:.2f}"
        print(f"| {name} | {us:.0f} | {num_bytes:,} | {num_bytes / us / 1e3:.1f} | {beside} |")


def start(name: str, python: str, model: Path, threads: int) -> peers.Peer:
    return peers.Peer(name, python, str(model), "", threads, __file__)


def report(rates: dict[tuple[str, str], float], wanted: list[str], threads: int) -> None:
    ours = {name: LAYOUTS[name][2] for name in wanted} | {
        kind: kind for at, kind in rates if at == "tidemill" and kind in TYPES
    }
    print(
        f"| {threads} threads, tok/s | Tidemill | llama.cpp | ratio | / our Q4_0 | / our Q4_1 |\n|---|---|---|---|---|---|"
    )
    for name, kind in ours.items():
        own, other = rates["tidemill", name], rates.get(("llama.cpp", kind))
        beside = "– | –" if other is None else f"{other:.1f} ({kind}) | {own / other:.2f}"
        print(
            f"| {name} | {own:.1f} | {beside} | {own / rates['tidemill', 'Q4_0']:.2f} | {own / rates['tidemill', 'Q4_1']:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--llama", help="virtual environment with llama-cpp-python, built on this machine"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--kernels", action="store_true", help="one matrix by one row: no models, no llama.cpp"
    )
    parser.add_argument(
        "--layouts", help="only those that contain one of these words, separated by commas"
    )
    for hidden in ("--worker", "--gguf", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peers.VOCABULARY = VOCABULARY
    if arguments.worker:
        if arguments.threads == 1:
            peers.CLOCK = time.process_time
        peers.worker(arguments.worker, arguments.gguf, "", arguments.threads)
    elif arguments.kernels:
        kernels(arguments.rounds)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
