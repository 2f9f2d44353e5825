"""The ways in which a linear layer stores and applies its weight. A new way is one file and a line
in METHODS."""

from tidemill.quant.base import ExpertParts, ExpertStacks, Gated, LinearMethod, LinearRows
from tidemill.quant.plan import METHODS, PLAIN, SCHEMES, WeightPlan

__all__ = [
    "METHODS",
    "PLAIN",
    "SCHEMES",
    "ExpertParts",
    "ExpertStacks",
    "Gated",
    "LinearMethod",
    "LinearRows",
    "WeightPlan",
]
