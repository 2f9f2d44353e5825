"""The layouts of compressed matrices in files that others read, too: one file a layout, and a line
here."""

from __future__ import annotations

import importlib

from tidemill.compress.layouts.base import Layout
from tidemill.errors import ConfigError

LAYOUTS = {
    "compressed-tensors": "compressed_tensors:CompressedTensors",
    "gptq": "gptq:GPTQLayout",
    "awq": "gptq:AWQLayout",
    "bitsandbytes": "bitsandbytes:BitsAndBytes",
    "fp8": "fp8:FP8Layout",
    "bitnet": "bitnet:BitNet",
    "gobo": "gobo:GOBOLayout",
}
WITH_KV_SCALES = "compressed-tensors"
GGUF = "gguf"  # a file, not a folder: see gguf.py


def layout_class(name: str) -> type[Layout]:
    if name not in LAYOUTS:
        known = ", ".join([*LAYOUTS, GGUF])
        raise ConfigError(f"--format {name} is not known.", fix=f"Choose {known}.", param="format")
    module, _, cls = LAYOUTS[name].partition(":")
    found: type[Layout] = getattr(
        importlib.import_module(f"tidemill.compress.layouts.{module}"), cls
    )
    return found
