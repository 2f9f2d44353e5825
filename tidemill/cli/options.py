"""Options that several commands share, and what Ctrl-C is to them."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from tidemill.config import parse_bytes
from tidemill.sched.policies import POLICIES

Model = Annotated[
    str, typer.Argument(help="smollm2, a .gguf file, a folder with config.json and safetensors, or a hub id like org/name.")
]
ModelOption = Annotated[str, typer.Option("--model", "-m", help="smollm2, a .gguf file, a folder, or a hub id.")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")]
DType = Annotated[
    str,
    typer.Option(
        help="How weights are kept and multiplied: quantized (in their 4 or 8 bits), float32, bfloat16 (on a GPU), or auto."
    ),
]
PageSize = Annotated[int | None, typer.Option(help="Tokens per KV page: a power of two up to 64. Default: 16; 64 on a GPU.")]
MaxContext = Annotated[int | None, typer.Option(help="Longest prompt plus answer, in tokens. Default: the model's own.")]
MaxRequests = Annotated[int | None, typer.Option(help="Requests computed at the same time. Default: 64; 256 on a GPU.")]
TokenBudget = Annotated[int | None, typer.Option(help="Tokens computed in one step. Default: 256; 2048 on a GPU.")]
KVMemory = Annotated[str | None, typer.Option(help="Memory for the KV cache, like 512M or 4G.")]
PolicyName = Annotated[str, typer.Option(help=f"How requests are batched: {', '.join(POLICIES)}.")]
PrefixCaching = Annotated[bool, typer.Option(help="Compute equal beginnings once.")]
StructuredBackend = Annotated[
    str, typer.Option(help="What keeps answers to their form: llguidance, or xgrammar (slower, and only for trusted clients).")
]
FastMath = Annotated[
    bool,
    typer.Option(
        help="On a GPU: use the vendor's products and flash-attn-4 where they are faster. Tokens may then depend on the batch."
    ),
]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy: random weights of the shape in config.json, for measurements.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads. Default: the physical cores this process may use.")]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens that together have this probability.")]
TopK = Annotated[int, typer.Option(help="Sample among this many likeliest tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]


def memory_bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def heed_interrupts() -> None:
    """From here on Ctrl-C is an exception: what has been begun (a progress bar, an engine) is ended in order."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
