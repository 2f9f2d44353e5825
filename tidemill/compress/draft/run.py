"""From a model to a folder of draft heads: text, hidden states, training, measurement. Every part
goes on where it ended."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tidemill.compress.draft.cost import (
    Costs,
    acceptance,
    best_threshold,
    draft_seconds,
    step_seconds,
)
from tidemill.compress.draft.states import StatesFile
from tidemill.compress.draft.text import Example, TextFile, text_for
from tidemill.compress.draft.train import RATES, Corpus, Recipe, draft_held_out, num_steps, train
from tidemill.engine.llm import LLM
from tidemill.errors import ConfigError
from tidemill.models.base import CausalLM
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.spec.heads import KINDS, DraftHead, Target, draft_vocabulary, new_head
from tidemill.runner.spec.stored import EXITS, SETTINGS, digest_of, save_draft

TEXT, WORK = "text.jsonl", "work"
_EXITS = (6, 4, 3)  # candidates: after so much of the layers
_LEAST_TOKENS = 64
_MEASURED = 6  # drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    model: str
    kind: str
    out: Path
    data: Path | None = None
    num_tokens: int = 98_304
    length: int = 256  # of a sequence
    num_epochs: int = 3
    num_guesses: int = 2
    vocab_size: int = 8192
    exit_layer: int | None = None
    seed: int = 0

    def check(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"--kind {self.kind} is not known.", fix=f"Choose {', '.join(KINDS)}.", param="kind"
            )
        if self.num_tokens < _LEAST_TOKENS:
            why = f"--samples of --seq-len tokens are {self.num_tokens} tokens."
            raise ConfigError(why, fix=f"They must be at least {_LEAST_TOKENS}.", param="samples")
        least = {"epochs": (self.num_epochs, 1), "guesses": (self.num_guesses, 1)}
        for name, (value, low) in (least | {"vocab": (self.vocab_size, 16)}).items():
            if not low <= value < 2**31:
                raise ConfigError(f"--{name} is {value}; it must be at least {low}.", param=name)
        if self.num_guesses > 8:
            raise ConfigError(
                f"--guesses is {self.num_guesses}; it must be at most 8.", param="guesses"
            )


class Reporter(Protocol):
    """The receiver of a run's progress: a stage with its total, how far it is, and a note."""

    def stage(self, name: str, total: int) -> None: ...
    def at(self, done: int, note: str = "") -> None: ...


class Stopped(Exception):
    """By the user: the same command goes on from there."""


def train_draft(
    options: TrainOptions, llm: LLM, report: Reporter, is_stopped: Callable[[], bool]
) -> dict[str, Any]:
    """Trains a draft head; returns the measurements that are written to the json."""
    options.check()
    runner, model = llm.core.runner, llm.core.runner.model  # type: ignore[attr-defined]
    if not isinstance(runner, CpuRunner) or not isinstance(model, CausalLM):
        raise ConfigError(
            "Draft heads are trained on a CPU, for a model that generates text.",
            fix="Give --device cpu.",
        )
    layers = _exit_layers(options, model.config.num_layers)
    work = options.out / WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"The folder {options.out} cannot be written: {error.strerror}."
        raise ConfigError(why, fix="Give another folder with --out.", param="out") from error
    sequences = _text(options, llm, report)
    digest = _digest(model, sequences)
    target = Target(model, _vocabulary(options, llm, sequences))
    states = _states(runner, work / digest, sequences, model.config.num_layers, report)
    steps_s = step_seconds(runner, _MEASURED + 1)
    results: list[tuple[float, DraftHead, dict[str, Any]]] = []
    for layer in layers:
        inputs = (
            states if layer is None else _states(runner, work / digest, sequences, layer, report)
        )
        corpus = Corpus(sequences, states, inputs)
        head, recipe = _new(options, target, layer, digest)
        name = options.kind if layer is None else f"{options.kind}-{layer}"
        report.stage(f"Training {name}", num_steps(corpus, recipe))
        tick = lambda done, loss: report.at(done, f"loss {loss:.3f}")  # noqa: E731
        with _threads(llm.config.threads):
            is_done = train(
                head, target, corpus, recipe, work / f"{name}.safetensors", tick, is_stopped
            )
        if not is_done:
            raise Stopped
        _round(head)
        costs = Costs(steps_s, *draft_seconds(runner, head, target))
        drafted = draft_held_out(head, target, corpus, _MEASURED)
        least, speed = best_threshold(drafted, costs)
        measured = {
            "acceptance": acceptance(drafted),
            "least_probability": least,
            "speed": speed,
            "step_costs": [round(step_s / steps_s[0], 3) for step_s in steps_s],
            "draft_cost": round(costs.draft_s / steps_s[0], 3),
            "held_out_tokens": sum(len(part.probs) for part in drafted),
        }
        results.append((speed, head, measured))
    learned = sum(example.num_learned for example in sequences)
    text = {
        "text": "its own" if options.data is None else options.data.name,
        "text_tokens": learned,
    }
    if len(layers) > 1:
        _save_exits(options.out, results, target, text)
    _, head, measured = max(results, key=lambda result: result[0])
    about = measured | text
    save_draft(options.out, head, target, about)
    shutil.rmtree(work)
    return {"kind": head.kind, "settings": head.settings} | about


def _save_exits(
    out: Path,
    results: list[tuple[float, DraftHead, dict[str, Any]]],
    target: Target,
    text: dict[str, Any],
) -> None:
    """Each in a folder of its own, for a drafter that chooses among them. All are said to have been
    measured."""
    speeds = {str(head.settings["layer"]): speed for speed, head, _ in results}
    for settings in out.glob(f"{EXITS}*/{SETTINGS}"):
        shutil.rmtree(settings.parent)  # of another run
    for _, head, measured in results:
        measured["speed_by_exit_layer"] = speeds
        save_draft(out / f"{EXITS}{head.settings['layer']}", head, target, measured | text)


def _exit_layers(options: TrainOptions, num_layers: int) -> list[int | None]:
    if options.kind != "exit":
        if options.exit_layer is not None:
            raise ConfigError("--exit-layer is of --kind exit.", param="exit_layer")
        return [None]
    if options.exit_layer is not None and not 1 <= options.exit_layer < num_layers:
        what = f"--exit-layer is {options.exit_layer}; the model has {num_layers} layers."
        raise ConfigError(what, fix=f"Give 1 to {num_layers - 1}.", param="exit_layer")
    if num_layers < 2:
        raise ConfigError("A model of one layer has no early exit.", param="kind")
    chosen = (
        {options.exit_layer}
        if options.exit_layer
        else {max(1, num_layers // part) for part in _EXITS}
    )
    return [*sorted(chosen)]


def _text(options: TrainOptions, llm: LLM, report: Reporter) -> list[Example]:
    file = TextFile(options.out / TEXT, digest_of(llm.core.runner.model))  # type: ignore[attr-defined]
    return text_for(
        llm, options.data, options.num_tokens, options.length, options.seed, file, report
    )


def _digest(model: CausalLM, sequences: list[Example]) -> str:
    """A digest of everything that hidden states depend on."""
    digest = hashlib.sha256(digest_of(model).encode())
    for example in sequences:
        digest.update(json.dumps([example.start, *example.ids]).encode())
    return digest.hexdigest()[:16]


def _vocabulary(options: TrainOptions, llm: LLM, sequences: list[Example]) -> torch.Tensor:
    tokens = torch.tensor([token for example in sequences for token in example.ids])
    counts_V = torch.bincount(tokens, minlength=llm.model_config.vocab_size)
    return draft_vocabulary(counts_V, options.vocab_size, llm.tokenizer.eos_token_ids)


def _states(
    runner: CpuRunner, work: Path, sequences: list[Example], num_layers: int, report: Reporter
) -> Any:
    work.mkdir(exist_ok=True)
    name = (
        "Hidden states"
        if num_layers == runner.model.config.num_layers
        else f"States after layer {num_layers}"
    )
    report.stage(name, sum(len(example.ids) for example in sequences))
    return StatesFile(
        work / f"states-{num_layers}.f16", runner.model.config.hidden_size, num_layers
    ).fill(runner, sequences, report.at)


def _new(
    options: TrainOptions, target: Target, layer: int | None, digest: str
) -> tuple[DraftHead, Recipe]:
    torch.manual_seed(options.seed)
    head = new_head(options.kind, target.hidden_size, None if layer is None else {"layer": layer})
    recipe = Recipe(
        kind=options.kind,
        settings=head.settings | {"vocab_size": len(target.ids_D)},
        num_epochs=options.num_epochs,
        num_guesses=options.num_guesses,
        rate=RATES[options.kind],
        seed=options.seed,
        text=digest,
    )
    return head, recipe


@contextmanager
def _threads(num: int) -> Iterator[None]:
    """Gives torch so many threads for a while. It has one in the engine: the compiled kernels are
    idle now."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _round(head: DraftHead) -> None:
    """To the values that are stored."""
    for value in head.parameters():
        value.copy_(value.half().float())
