"""`tidemill generate`: complete a text, streaming."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.errors import ConfigError
from tidemill.types.sampling import SamplingParams

if TYPE_CHECKING:
    from tidemill.engine.llm import LLM


_NOISY_ABOVE = 2.0  # the API of OpenAI ends there; others, and this one, do not

# Without a value: the model's default (tidemill models MODEL shows it).
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", "-n", help="Most tokens to generate. Default: --default-max-tokens."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        help="0: always the likeliest token; up to 100, as in the API, though above 2 text is mostly noise. "
        "Default: the model's.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample among the likeliest tokens that together have this probability. Default: the model's."
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(help="Sample among this many likeliest tokens; 0: all. Default: the model's."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 1: tokens that occurred before become less likely. Default: the model's."
    ),
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same output.")]


@takes(*ENGINE_NAMES, "lora", "max-lora-rank", model="option")
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    settings: Settings,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End at this text; may be given several times.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Wrap the prompt in the model's chat template.")
    ] = False,
) -> None:
    """Complete a text and print it as it is generated."""
    params = given_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    from tidemill.engine.llm import LLM  # brings torch

    text = sys.stdin.read() if prompt == "-" else prompt
    console = Console(stderr=True, highlight=False)
    warn_if_noisy(temperature, console)
    raise_on_interrupt()
    lora = only_lora(settings)
    llm = LLM(progress=console.is_terminal, **settings.engine)
    interrupted = False

    def on_interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        llm.interrupt()

    signal.signal(signal.SIGINT, on_interrupt)
    messages = [{"role": "user", "content": text}]
    pieces = (
        llm.stream_chat(messages, params, lora=lora)
        if chat
        else llm.stream(text, params, lora=lora)
    )
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)
    console.print(summary(llm), style="dim", soft_wrap=True)
    if interrupted:
        raise typer.Exit(130)


def only_lora(settings: Settings) -> str | None:
    """The name of the adapter, if one is given."""
    names = list(settings.engine_options().lora_paths)
    if len(names) > 1:
        raise ConfigError("Several adapters are given.", fix="Give one --lora.", param="loras")
    return names[0] if names else None


def given_params(**params: Any) -> SamplingParams:
    """The parameters given as options. None stands for one that was not given: the model's default
    counts."""
    return SamplingParams(**{name: value for name, value in params.items() if value is not None})


def warn_if_noisy(temperature: float | None, console: Console) -> None:
    if temperature is not None and temperature > _NOISY_ABOVE:
        console.print(
            f"warning: above a temperature of {_NOISY_ABOVE:g}, text is mostly noise.",
            style="yellow",
        )


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
