"""Tidemill: an LLM inference and serving engine.

from tidemill import LLM, SamplingParams
LLM("smollm2").generate(["The tide"], SamplingParams(max_tokens=32))
"""

from typing import TYPE_CHECKING, Any

from tidemill.types.sampling import BeamSearchParams, Grammar, RequestOutputKind, SamplingParams
from tidemill.version import __version__

if TYPE_CHECKING:
    from tidemill.engine.async_llm import AsyncLLM
    from tidemill.engine.llm import LLM
    from tidemill.programs import assistant, fork, gen, join, program, select, system, user

__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "Grammar", "RequestOutputKind", "SamplingParams", "__version__", "assistant", "fork",
    "gen", "join", "program", "select", "system", "user",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # imported on first use: it loads torch, which the server process does without
    if name == "LLM":
        from tidemill.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from tidemill.engine.async_llm import AsyncLLM

        return AsyncLLM
    if name in __all__:
        from tidemill import programs

        return getattr(programs, name)
    raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
