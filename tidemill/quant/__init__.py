"""How a linear layer stores and applies its weight. A new way is one file and a line in METHODS."""

from tidemill.quant.base import LinearMethod
from tidemill.quant.dense import Dense

METHODS: dict[str, type[LinearMethod]] = {"float32": Dense}

__all__ = ["METHODS", "LinearMethod"]
