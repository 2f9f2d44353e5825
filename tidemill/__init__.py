"""Tidemill: an LLM inference and serving engine.

from tidemill import LLM, SamplingParams
LLM("smollm2").generate(["The tide"], SamplingParams(max_tokens=32))
"""

from typing import TYPE_CHECKING, Any

from tidemill.sampling import BeamSearchParams, SamplingParams
from tidemill.version import __version__

if TYPE_CHECKING:
    from tidemill.engine.llm import LLM

__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # imported on first use: it loads torch, which the server process does without
        from tidemill.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
