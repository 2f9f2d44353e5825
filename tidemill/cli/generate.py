"""`tidemill generate`: complete a text, streaming."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidemill.cli import options as opt
from tidemill.sampling import SamplingParams

if TYPE_CHECKING:
    from tidemill.engine.llm import LLM


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: opt.ModelOption = "smollm2",
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = 0.7,
    top_p: opt.TopP = 0.95,
    top_k: opt.TopK = 0,
    seed: opt.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
    threads: opt.Threads = None,
) -> None:
    """Complete a text and print it as it comes."""
    from tidemill.engine.llm import LLM

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    console = Console(stderr=True, highlight=False)
    opt.heed_interrupts()
    llm = LLM(model, progress=console.is_terminal, threads=threads)
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        llm.interrupt()

    signal.signal(signal.SIGINT, on_interrupt)
    pieces = llm.stream_chat([{"role": "user", "content": text}], params) if chat else llm.stream(text, params)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)
    console.print(summary(llm), style="dim", soft_wrap=True)
    if interrupted:
        raise typer.Exit(130)


def summary(llm: LLM) -> str:
    """One line about the last answer: how many tokens, how fast, why it ended."""
    output = llm.last
    assert output is not None
    sample = output.outputs[0]
    words = [f"{len(output.prompt_token_ids)} prompt tokens"]
    if output.num_cached:
        words.append(f"{output.num_cached} of them cached")
    words.append(f"{len(sample.token_ids)} generated")
    if sample.timings:
        timings = sample.timings
        words.append(f"first after {timings.queue_s + timings.prefill_s:.2f} s")
        if timings.decode_s > 0 and len(sample.token_ids) > 1:
            words.append(f"then {(len(sample.token_ids) - 1) / timings.decode_s:.1f} tokens/s")
    words.append(f"ended by {sample.finish_reason or 'you'}")
    return ", ".join(words)
