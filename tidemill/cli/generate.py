"""`tidemill generate`: complete a text, streaming."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.sampling import SamplingParams

if TYPE_CHECKING:
    from tidemill.engine.llm import LLM


MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: always the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens that together have this probability.")]
TopK = Annotated[int, typer.Option(help="Sample among this many likeliest tokens; 0: all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same output.")]


@takes(*ENGINE_NAMES, model="option")
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    settings: Settings,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
) -> None:
    """Complete a text and print it as it is generated."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    from tidemill.engine.llm import LLM  # brings torch

    text = sys.stdin.read() if prompt == "-" else prompt
    console = Console(stderr=True, highlight=False)
    raise_on_interrupt()
    llm = LLM(progress=console.is_terminal, **settings.engine)
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
    """One line about the last completion: how many tokens, how fast, why it ended."""
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
