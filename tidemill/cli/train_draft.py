"""`tidemill train-draft`: heads that make a model's own drafts, trained on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.cli.text_options import SELF, Calibration, Samples, Seed, SeqLen, text_of
from tidemill.weights.locate import locate


@takes("model", "dtype", "threads")
def train_draft(
    settings: Settings,
    kind: Annotated[
        str,
        typer.Option(
            help="eagle: a layer that guesses the next hidden state, a chain of drafts. medusa: a head for each of the next "
            "tokens. exit: the model's own first layers."
        ),
    ] = "eagle",
    calibration: Calibration = SELF,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the result, and of what is needed to go on. Default: MODEL-KIND, here."
        ),
    ] = None,
    samples: Samples = 384,
    seq_len: SeqLen = 256,
    epochs: Annotated[int, typer.Option(help="How often the text is gone through.")] = 3,
    guesses: Annotated[int, typer.Option(help="eagle: how many drafts in a row are learned.")] = 2,
    vocab: Annotated[
        int, typer.Option(help="Tokens that drafts may be: the most frequent ones of the text.")
    ] = 8192,
    exit_layer: Annotated[
        int | None,
        typer.Option(
            help="exit: after this many layers. Default: the fastest of some, by measurement."
        ),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Train draft heads for speculative decoding. They are measured, too. Ctrl-C stops; the same
    command goes on from there."""
    from tidemill.compress.draft.run import Stopped, TrainOptions, train_draft  # brings torch
    from tidemill.engine.llm import LLM
    from tidemill.engine.load import inspect

    model = settings["model"]
    options = TrainOptions(
        model=model,
        kind=kind,
        out=(out or Path(f"{locate(model, fetch=True).stem}-{kind}")).expanduser(),
        num_epochs=epochs,
        num_guesses=guesses,
        vocab_size=vocab,
        exit_layer=exit_layer,
        **text_of(calibration, samples, seq_len, seed),
    )
    options.check()
    console = Console(stderr=True, highlight=False)
    raise_on_interrupt()
    sizes: dict[str, Any] = {
        "max_requests": 32,
        "max_context": min(1024, inspect(model)[2].max_context),
    }
    llm = LLM(progress=console.is_terminal, device="cpu", **sizes, **settings.engine)
    with Stages(console) as shown:
        try:
            measured = train_draft(options, llm, shown, shown.is_stopped)
        except (Stopped, KeyboardInterrupt):
            console.print(
                f"Stopped. The same command goes on from here; what it needs is in {options.out}.",
                markup=False,
            )
            raise typer.Exit(130) from None
    _tell(Console(highlight=False), options.out, measured)


def _tell(console: Console, out: Path, measured: dict[str, Any]) -> None:
    if speeds := measured.get("speed_by_exit_layer"):
        each = ", ".join(f"{layer}: {speed}x" for layer, speed in speeds.items())
        console.print(f"The exit was chosen by measurement. Speed by layer: {each}.", markup=False)
    shares = ", ".join(f"{share:.0%}" for share in measured["acceptance"])
    console.print(f"{out}: {measured['kind']} heads, {measured['settings']}", markup=False)
    console.print(
        f"On held-out text the first 1, 2, ... drafts are all right in {shares} of places."
    )
    console.print(
        f"Speed here, one request: {measured['speed']}x of no drafts, where drafts end under a probability of "
        f"{measured['least_probability']}. A draft costs {measured['draft_cost']} of a step; steps of 1, 2, ... tokens cost "
        f"{', '.join(map(str, measured['step_costs']))}."
    )
