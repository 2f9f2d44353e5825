"""A GGUF of a small mixture of experts with random weights, to measure with (bench/peers.py --model
FILE):

    python -m tools.make_moe moe.gguf [Q4_0]

Qwen3-MoE's architecture: 12 layers of 1024, 16 query and 4 KV heads of 64, 32 experts of 512, 4 a
token. The type is one that the `gguf` package quantizes to: Q4_0, Q4_1, Q8_0. The file has no
tokenizer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

VOCABULARY, LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS, CHOSEN, SIZE = (
    49_152,
    12,
    1024,
    16,
    4,
    64,
    32,
    4,
    512,
)


def write(path: Path, kind: gguf.GGMLQuantizationType) -> None:
    writer, rng, arch = gguf.GGUFWriter(path, "qwen3moe"), np.random.default_rng(0), "qwen3moe"
    settings = {
        "block_count": LAYERS, "context_length": 8192, "embedding_length": HIDDEN, "feed_forward_length": SIZE,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
        "attention.value_length": DIM, "expert_count": EXPERTS, "expert_used_count": CHOSEN, "expert_feed_forward_length": SIZE,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    for key, value in settings.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 1e6)
    writer.add_string("tokenizer.ggml.model", "none")

    def matrix(*shape: int) -> np.ndarray:
        values = rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        return gguf.quants.quantize(values, kind)

    quantized = {
        "attn_q": matrix(HEADS * DIM, HIDDEN), "attn_k": matrix(KV_HEADS * DIM, HIDDEN), "attn_v": matrix(KV_HEADS * DIM, HIDDEN),
        "attn_output": matrix(HIDDEN, HEADS * DIM), "ffn_gate_exps": matrix(EXPERTS, SIZE, HIDDEN),
        "ffn_up_exps": matrix(EXPERTS, SIZE, HIDDEN), "ffn_down_exps": matrix(EXPERTS, HIDDEN, SIZE),
    }  # fmt: skip
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": DIM, "attn_k_norm": DIM}
    writer.add_tensor("token_embd.weight", matrix(VOCABULARY, HIDDEN), raw_dtype=kind)
    for layer in range(LAYERS):
        for name, width in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
        router = rng.standard_normal((EXPERTS, HIDDEN), np.float32) * np.float32(HIDDEN**-0.5)
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
        for name, values in quantized.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", values, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("type", nargs="?", default="Q4_0", choices=("Q4_0", "Q4_1", "Q8_0"))
    given = parser.parse_args()
    write(given.file, gguf.GGMLQuantizationType[given.type])
