"""Commands that users of Ollama and llama.cpp know: `pull` is ours, too; others do what ours do, or
say which to use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

from tidemill.config import fmt_bytes
from tidemill.errors import ConfigError
from tidemill.weights.choose import parts
from tidemill.weights.locate import locate

HINTS = {
    "ps": "`tidemill serve` is one process in the foreground. Its address in a browser shows the model and what it does.",
    "stop": "Ctrl-C in its terminal, or SIGTERM, stops a server.",
    "rm": "Models of the hub are in its cache: `hf cache rm`. Files that you downloaded yourself are yours to delete.",
    "create": "Set the system prompt in requests or with `tidemill chat --system`, the template with --chat-template.",
    "cp": "Give a model another name with `tidemill serve MODEL --served-name NAME`.",
    "push": "Models are published with `hf upload`.",
}


def pull(
    model: Annotated[
        str,
        typer.Argument(
            help="org/name, or org/name:Q4_K_M for one quantization of a GGUF repository."
        ),
    ],
) -> None:
    """Download a model of the Hugging Face hub. Later it is used without a network."""
    path = locate(model, fetch=True)
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else parts(path)
    Console(highlight=False).print(
        f"{model}: {fmt_bytes(sum(file.stat().st_size for file in files))} in {path}",
        markup=False,
        soft_wrap=True,
    )


def add_hints(app: typer.Typer) -> None:
    for name, words in HINTS.items():
        app.command(name, hidden=True, context_settings=_ANYTHING)(_hint(name, words))


_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}


def _hint(name: str, words: str) -> Callable[[], None]:
    def hint() -> None:
        raise ConfigError(f"There is no command {name}.", fix=words)

    return hint
