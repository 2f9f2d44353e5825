"""Options that several commands share, and how they become EngineOptions."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.config import EngineOptions, parse_bytes
from tidemill.sched.policies import POLICIES

Model = Annotated[
    str, typer.Argument(help="smollm2, a .gguf file, a folder with config.json and safetensors, or a hub id like org/name.")
]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="smollm2, a .gguf file, a folder, or a hub id.")]
DType = Annotated[str, typer.Option(help="Compute type: auto or float32.")]
PageSize = Annotated[int, typer.Option(help="Tokens per KV page: a power of two up to 64.")]
MaxContext = Annotated[int | None, typer.Option(help="Longest prompt plus answer, in tokens. Default: the model's own.")]
MaxRequests = Annotated[int | None, typer.Option(help="Requests computed at the same time. Default: 64.")]
TokenBudget = Annotated[int | None, typer.Option(help="Tokens computed in one step. Default: 256.")]
KVMemory = Annotated[str | None, typer.Option(help="Memory for the KV cache, like 512M or 4G.")]
PolicyName = Annotated[str, typer.Option(help=f"How requests are batched: {', '.join(POLICIES)}.")]
PrefixCaching = Annotated[bool, typer.Option(help="Compute equal beginnings once.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: the physical cores this process may use.")]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens that together have this probability.")]
TopK = Annotated[int, typer.Option(help="Sample among this many likeliest tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]


def engine_options(
    model: str,
    *,
    dtype: str = "auto",
    page_size: int = 16,
    max_context: int | None = None,
    max_requests: int | None = None,
    token_budget: int | None = None,
    kv_memory: str | None = None,
    policy: str = "continuous",
    prefix_caching: bool = True,
    threads: int | None = None,
    served_name: str | None = None,
) -> EngineOptions:
    return EngineOptions(
        model=model,
        served_name=served_name,
        dtype=dtype,
        page_size=page_size,
        max_context=max_context,
        max_requests=max_requests,
        token_budget=token_budget,
        kv_memory_bytes=parse_bytes(kv_memory) if kv_memory is not None else None,
        policy=policy,
        prefix_caching=prefix_caching,
        threads=threads,
    )
