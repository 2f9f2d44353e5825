"""`tidemill evaluate`: how good a model is as it is served, beside its original."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.cli.stages import Stages
from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.compress.evaluate import Evaluation
    from tidemill.compress.evaluate_tasks import Suite

_MAX_ITEMS = 10_000


@takes("model", "dtype", "device", "threads", "max-context")
def evaluate(
    settings: Settings,
    against: Annotated[
        str | None,
        typer.Option(help="The original: its figures stand beside, and distances to it."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help=".txt, or .jsonl with an object of text, messages or ids a line. Default: Python's documentation."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text; 0: none.")] = 4096,
    tasks: Annotated[
        str,
        typer.Option(
            help="Separated by commas: arithmetic, passkey, json, questions; files .jsonl of multiple choice, an object of "
            "question (or context), choices and answer a line; all; none."
        ),
    ] = "all",
    items: Annotated[int, typer.Option(help="Of each generated task.")] = 20,
    lengths: Annotated[
        str, typer.Option(help="Of passkey prompts, in tokens. Default: 256,512,1024.")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of generated tasks.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--json", help="Also write what was measured to this file.")
    ] = None,
) -> None:
    """Measure a model's quality and speed, as it is served. Figures are perplexity, KL divergence
    and top-1 agreement with the original, speed, and small tasks."""
    from tidemill.compress.evaluate import evaluate, text_sha256, text_windows  # brings torch
    from tidemill.engine.llm import LLM

    if not 0 <= tokens < 2**31 or not 1 <= items <= _MAX_ITEMS:
        raise ConfigError(
            f"--tokens is {tokens}, --items {items}.",
            fix=f"They must be 0 or more, and 1 to {_MAX_ITEMS}.",
        )
    if output is not None:
        _check_output(output)
    suites = _suites(tasks, items, lengths, seed)
    console = Console(stderr=True, highlight=False)
    raise_on_interrupt()
    names = [settings["model"]] if against is None else [against, settings["model"]]
    if len(set(names)) < len(names):
        raise ConfigError(
            "The model is its own original.", fix="Give another with --against.", param="against"
        )
    engine = {"max_requests": 32} | settings.engine
    models = {name: LLM(progress=console.is_terminal, **engine | {"model": name}) for name in names}
    windows = text_windows(models[settings["model"]], text, tokens) if tokens else []
    with Stages(console) as shown:
        evaluations = evaluate(
            models, windows, suites, shown, text_sha256(text) if windows else None
        )
    print_table(Console(highlight=False), evaluations)
    if output is not None:
        output.write_text(
            json.dumps([evaluation.to_json() for evaluation in evaluations], indent=2) + "\n"
        )


def _check_output(path: Path) -> None:
    """Before anything is measured."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(
            f"--json {path} cannot be written.",
            fix="Give a file in a folder that is there.",
            param="json",
        )


def _suites(tasks: str, num: int, lengths: str, seed: int) -> list[Suite]:
    from tidemill.compress.evaluate_tasks import SUITES, passkey, read_choices

    names = [name.strip() for name in tasks.split(",") if name.strip() and name.strip() != "none"]
    names = [suite for name in names for suite in (SUITES if name == "all" else [name])]
    try:
        sizes = tuple(int(part) for part in lengths.split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            f"--lengths is {lengths!r}.", fix="Write numbers like 256,512.", param="lengths"
        ) from None
    if any(size < 1 for size in sizes):
        raise ConfigError(
            f"--lengths is {lengths!r}.", fix="They must be positive.", param="lengths"
        )
    suites: list[Suite] = []
    for name in names:
        if name == "passkey":
            suites.append(passkey(num, seed, sizes))
        elif name in SUITES:
            suites.append(SUITES[name](num, seed))
        elif name.endswith(".jsonl"):
            suites.append(read_choices(Path(name).expanduser()))
        else:
            known = ", ".join(SUITES)
            raise ConfigError(
                f"There is no task {name!r}.",
                fix=f"Give some of {known}, or a .jsonl file.",
                param="tasks",
            )
    return suites


def print_table(console: Console, evaluations: list[Evaluation]) -> None:
    """A column for each model."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for evaluation in evaluations:
        table.add_column(Path(evaluation.model).name, justify="right")
    for name, values in _rows(evaluations).items():
        table.add_row(name, *values)
    console.print(table)


def _rows(evaluations: list[Evaluation]) -> dict[str, list[str]]:
    rows: dict[str, list[str]] = {
        "bytes": [f"{evaluation.num_bytes:,}" for evaluation in evaluations],
        "KV bytes a token": [f"{evaluation.kv_bytes_per_token:,}" for evaluation in evaluations],
        "decode, tokens/s": [f"{evaluation.tokens_per_s:.1f}" for evaluation in evaluations],
    }
    if all(evaluation.quality is not None for evaluation in evaluations):
        qualities: list[Any] = [evaluation.quality for evaluation in evaluations]
        rows["text, SHA-256"] = [(evaluation.text_sha256 or "")[:12] for evaluation in evaluations]
        rows["perplexity"] = [f"{quality.perplexity:.4f}" for quality in qualities]
        if len(evaluations) > 1:
            rows["KL to the original"] = [
                "" if quality.kl is None else f"{quality.kl:.5f}" for quality in qualities
            ]
            rows["top-1 agreement"] = [
                "" if quality.top1 is None else f"{quality.top1:.2%}" for quality in qualities
            ]
    for name in evaluations[0].scores:
        scores = [evaluation.scores[name] for evaluation in evaluations]
        if scores[0].acc_norm is None:
            rows[f"{name} ({scores[0].num_items})"] = [f"{score.acc:.1%}" for score in scores]
        else:
            label = f"{name} ({scores[0].num_items}), acc / acc_norm"
            rows[label] = [f"{score.acc:.1%} / {score.acc_norm:.1%}" for score in scores]
    return rows
