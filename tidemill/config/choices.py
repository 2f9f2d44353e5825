"""The values that options may have."""

from tidemill.capabilities import HEADS
from tidemill.config import extensions

DTYPES = {
    "cpu": ("float32", "quantized"),
    "cuda": ("bfloat16",),
}  # quantized: weights are multiplied in their 4 or 8 bits
STORED_FORMATS = (
    "gguf",
    "awq",
    "gptq",
    "compressed-tensors",
    "bitsandbytes",
    "mxfp4",
)  # a checkpoint says so by itself
QUANTIZATIONS = {  # of weights as they are read
    "fp8": "in 8-bit floats, rounded as they are read",
    "int8": "in 8 bits, rounded as they are read",
    "int4": "in 4 bits, rounded as they are read",
    "sparse24": "with two zeros among four values on sparse tensor cores",
}
MAX_LORA_RANK = 256
TREES = ("medusa", "eagle-tree")  # drafts of these may be trees
SPECULATE: dict[str, tuple[str, ...]] = {  # drafters, by the option's value
    "auto": ("forced", "ngram"),
    "off": (),
    **{name: (name,) for name in ("forced", "ngram", "suffix", *HEADS)},
    "draft-model": ("forced", "draft-model"),
}
for _name in extensions.names_of(extensions.DRAFTERS):
    SPECULATE.setdefault(_name, (_name,))
ACCEPTANCE = ("exact", "rejection")
LAYOUTS = ("paged", "virtual")
MAX_RANKS = 64
TENSOR_LAYOUTS = ("1d", "2d", "gathered", "phased", "auto")
COLLECTIVES = ("auto", "ipc", "nccl")
POLICIES: tuple[str, ...] = (
    "continuous",
    "splitfuse",
    "prefill-first",
    "static",
    "dynamic",
    "none",
)  # of scheduling
POLICIES += tuple(name for name in extensions.names_of(extensions.POLICIES) if name not in POLICIES)
INDEXES = ("hash", "radix")  # of prefixes
ORDERS = ("arrival", "prefix")  # of the queue
