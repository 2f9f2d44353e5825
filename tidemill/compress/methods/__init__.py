"""The methods by which matrices are quantized: one file a method, and a line here."""

from __future__ import annotations

import importlib

from tidemill.compress.methods.base import Method
from tidemill.errors import ConfigError

# name: "module:class", imported when first needed
METHODS = {
    "rtn": "rtn:RoundToNearest",
    "gptq": "gptq:GPTQ",
    "awq": "awq:AWQ",
    "smoothquant": "smoothquant:SmoothQuant",
    "llm-int8": "rtn:LLMInt8",
    "zeroquant": "zeroquant:ZeroQuant",
    "gobo": "gobo:GOBO",
    "fp8": "fp8:FP8",
    "nf4": "nf4:NF4",
    "ternary": "ternary:Ternary",
}


def method_class(name: str) -> type[Method]:
    if name not in METHODS:
        raise ConfigError(
            f"--method {name} is not known.", fix=f"Choose {', '.join(METHODS)}.", param="method"
        )
    module, _, cls = METHODS[name].partition(":")
    found: type[Method] = getattr(
        importlib.import_module(f"tidemill.compress.methods.{module}"), cls
    )
    return found
