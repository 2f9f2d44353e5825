"""The storage of keys and values in the KV cache: bits of a value, and whether each token and head
has a scale. Ints only.

A page in a format with scales is one piece of bytes: values [layers of a page, 2, KV heads,
page_size, head_dim], then scales [layers of a page, 2, KV heads, page_size] in bfloat16, rounded up
so that no value saturates; in int4 each with an offset."""

from __future__ import annotations

from dataclasses import dataclass

MOST_COPIED_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class KVFormat:
    name: str
    bits: int  # of a value
    scale_bytes: int = 0  # of a token and head
    # KVQuant: levels and channels' ranges are fitted to a model (kernels/kvquant.py)
    is_calibrated: bool = False

    @property
    def has_scales(self) -> bool:
        return self.scale_bytes > 0

    def row_bytes(self, head_dim: int) -> int:
        """The values of a token and head; in four bits, two of a byte."""
        return head_dim * self.bits // 8

    def head_bytes(self, head_dim: int) -> int:
        """A token and head, with its scale."""
        return self.row_bytes(head_dim) + self.scale_bytes


def num_copied_pages(
    kv_dtype: str, context: int, num_kv_heads: int, page_size: int, head_dim: int
) -> int:
    """On GPUs: of how many pages there may be copies in bfloat16, of one layer, for the prompts of
    a step. Those of the longest context, up to a limit."""
    num_bytes = 2 * num_kv_heads * page_size * head_dim * 2
    return (
        min(-(-context // page_size), MOST_COPIED_BYTES // num_bytes)
        if kv_dtype in ("fp8", "int8")
        else 0
    )


FORMATS = {
    kv_format.name: kv_format
    for kv_format in (
        KVFormat("float32", 32),
        KVFormat("bfloat16", 16),
        KVFormat("float16", 16),
        KVFormat("fp8", 8, 2),
        KVFormat("int8", 8, 2),
        KVFormat("int4", 4, 4),
        KVFormat("kvquant4", 4, 8, is_calibrated=True),
        KVFormat("kvquant3", 3, 8, is_calibrated=True),
    )
}
SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "fp8"}
ON_DEVICE = {  # what the kernels read and write
    "cpu": ("float32", "bfloat16", "float16", "int8", "int4", "kvquant4", "kvquant3"),
    "cuda": ("bfloat16", "fp8", "int8", "int4"),
}
