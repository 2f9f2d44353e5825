"""The options of an engine, and one resolve() that settles every value and records why."""

from tidemill.capabilities import HEADS
from tidemill.config.cache import decide_kv_dtype, decide_layout, sequence_bytes
from tidemill.config.choices import (
    ACCEPTANCE,
    DTYPES,
    LAYOUTS,
    MAX_LORA_RANK,
    QUANTIZATIONS,
    SPECULATE,
    STORED_FORMATS,
    TREES,
)
from tidemill.config.compute import decide_device, decide_dtype
from tidemill.config.options import EngineOptions
from tidemill.config.resolve import EngineConfig, resolve, settled
from tidemill.config.sizes import fmt_bytes, parse_bytes
from tidemill.config.tiers import decide_disk

__all__ = [
    "ACCEPTANCE",
    "DTYPES",
    "HEADS",
    "LAYOUTS",
    "MAX_LORA_RANK",
    "QUANTIZATIONS",
    "SPECULATE",
    "STORED_FORMATS",
    "TREES",
    "EngineConfig",
    "EngineOptions",
    "decide_device",
    "decide_disk",
    "decide_dtype",
    "decide_kv_dtype",
    "decide_layout",
    "fmt_bytes",
    "parse_bytes",
    "resolve",
    "sequence_bytes",
    "settled",
]
