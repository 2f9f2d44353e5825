"""Draft heads on disk: a folder with draft.json (what they are, and what was measured) and
draft.safetensors. Not trusted: sizes are bounded by the model's, and what does not fit is refused
by the name of its key or tensor."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.errors import CheckpointError, DraftError
from tidemill.models.base import CausalLM
from tidemill.runner.spec.heads import KINDS, DraftHead, Target, new_head
from tidemill.types.model_config import ModelConfig
from tidemill.version import __version__
from tidemill.weights.locate import read_json

SETTINGS, WEIGHTS = "draft.json", "draft.safetensors"
EXITS = "exit-"  # a folder in that of early exits, and its layer
_FORMAT = 1
_MOST_EXITS = 8
_IDS = "draft_ids"
_FLOATS, _INTS = ("F32", "F16", "BF16"), ("I32", "I64")
_MOST = {
    "num_heads": 128,
    "intermediate_size": 2**18,
    "window": 4096,
    "layer": 10_000,
    "rank": 2**15,
}
_ROWS = 64  # of the embedding, that a model is known by


@dataclass(frozen=True, slots=True)
class StoredDraft:
    path: Path
    head: DraftHead
    ids_D: torch.Tensor  # the draft vocabulary
    # the share of places of a held-out text where the first 1, 2, ... drafts were all right
    acceptance: list[float]
    least: float  # the probability of a chain of drafts under which it is best ended
    note: str  # why it may be less here, or empty
    draft_cost: float  # of one draft, in steps of one token
    step_costs: list[float]  # of a step of 1, 2, ... tokens, in the same unit


def shape_of(config: ModelConfig) -> dict[str, int | str]:
    return {
        "architecture": config.architecture,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
    }


@torch.inference_mode()
def digest_of(model: CausalLM) -> str:
    """A digest of some rows of the embedding, in the form that this quantization has."""
    ids = torch.arange(_ROWS) * max(1, model.config.vocab_size // _ROWS) % model.config.vocab_size
    ids = ids.to(model.weight_plan.device)
    rows = model.embed_tokens(ids, torch.zeros_like(ids))
    return hashlib.sha256(rows.float().cpu().contiguous().numpy().tobytes()).hexdigest()


def save_draft(path: Path, head: DraftHead, target: Target, about: dict[str, Any]) -> None:
    """`about`: what was measured, and on what. The json comes last: a folder that has it is whole."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / SETTINGS).unlink(missing_ok=True)
    tensors = {
        name: value.detach().half().contiguous() for name, value in head.state_dict().items()
    }
    save_file(tensors | {_IDS: target.ids_D.to(torch.int32)}, path / f"{WEIGHTS}.new")
    os.replace(path / f"{WEIGHTS}.new", path / WEIGHTS)
    said = {
        "format": _FORMAT,
        "kind": head.kind,
        "settings": head.settings,
        "model": shape_of(target.model.config) | {"digest": digest_of(target.model)},
        **about,
        "version": __version__,
    }
    (path / f"{SETTINGS}.new").write_text(json.dumps(said, indent=2) + "\n")
    os.replace(path / f"{SETTINGS}.new", path / SETTINGS)


def load_draft(path: Path, model: CausalLM, kind: str = "") -> StoredDraft:
    """`kind`: what they must be; empty: any."""
    path = path.expanduser()
    for name in (SETTINGS, WEIGHTS):
        if not (path / name).is_file():
            raise DraftError(
                f"The draft heads {path} hold no {name}.",
                fix="Give a folder that tidemill train-draft has written.",
            )
    try:
        said = read_json(path / SETTINGS)
    except CheckpointError as error:
        raise DraftError(error.message, fix=error.fix) from error
    settings = _settings(path / SETTINGS, said, kind)
    _check_model(path, said, model.config)
    with torch.device("meta"):
        head = new_head(said["kind"], model.config.hidden_size, settings)
    if settings.get("layer", 0) >= model.config.num_layers:
        raise DraftError(
            f"{path / SETTINGS}: layer {settings['layer']} of {model.config.num_layers} is no early exit."
        )
    tensors = _read(path / WEIGHTS)
    ids_D = _ids(path / WEIGHTS, tensors, model.config.vocab_size)
    head.load_state_dict(_fitting(path / WEIGHTS, tensors, head), assign=True)
    for name, buffer in new_head(said["kind"], model.config.hidden_size, settings).named_buffers():
        setattr(head, name, buffer)
    note = (
        ""
        if said["model"].get("digest") == digest_of(model)
        else "trained on other weights of this shape: fewer may be accepted"
    )
    shares, least = _acceptance(path / SETTINGS, said)
    costs = _costs(path / SETTINGS, said)
    return StoredDraft(path, head.eval().requires_grad_(False), ids_D, shares, least, note, *costs)


def load_exits(path: Path, model: CausalLM) -> list[StoredDraft]:
    """All exits of a folder, from the first to the deepest: each has a folder of its own in it."""
    path = path.expanduser()
    folders = [
        found.parent for found in sorted(path.glob(f"{EXITS}*/{SETTINGS}"))[: _MOST_EXITS + 1]
    ]
    if not 2 <= len(folders) <= _MOST_EXITS:
        raise DraftError(
            f"The draft heads {path} have {len(folders)} exits to choose from; there must be 2 to {_MOST_EXITS}.",
            fix="Train them with tidemill train-draft MODEL --kind exit, without --exit-layer; or use --speculate exit.",
        )
    exits = sorted(
        (load_draft(folder, model, "exit") for folder in folders),
        key=lambda one: one.head.settings["layer"],
    )
    for one in exits[1:]:
        if not torch.equal(one.ids_D, exits[0].ids_D):
            raise DraftError(
                f"{one.path}: the draft vocabulary is another than that of {exits[0].path}."
            )
    return exits


def _settings(source: Path, said: dict[str, Any], kind: str) -> dict[str, int]:
    if said.get("format") != _FORMAT:
        raise DraftError(
            f"{source}: format {str(said.get('format'))[:50]!r} is not known.",
            fix="Train the heads again.",
        )
    found = said.get("kind")
    if not isinstance(found, str) or found not in KINDS:
        raise DraftError(
            f"{source}: kind {str(found)[:50]!r} is not known.", fix=f"{', '.join(KINDS)} are."
        )
    if kind and found != kind:
        raise DraftError(
            f"{source}: the heads are of the kind {found}.",
            fix=f"--speculate {found} uses them; {kind} does not.",
        )
    settings = said.get("settings")
    if not isinstance(settings, dict):
        raise DraftError(f"{source}: key settings must be an object.")
    with torch.device("meta"):
        known = new_head(found, 64).settings
    for name in settings.keys() | known.keys():
        value = settings.get(name)
        if name not in known or type(value) is not int or not 1 <= value <= _MOST[name]:
            most = f"1 to {_MOST[name]}" if name in known else "absent"
            raise DraftError(
                f"{source}: setting {name[:50]} is {str(value)[:50]!r}; it must be {most}."
            )
    return settings


def _check_model(path: Path, said: dict[str, Any], config: ModelConfig) -> None:
    given = said.get("model")
    if not isinstance(given, dict):
        raise DraftError(f"{path / SETTINGS}: key model must be an object.")
    for name, value in shape_of(config).items():
        if name != "architecture" and given.get(name) != value:
            raise DraftError(
                f"{path}: the heads are for a model with {name} {str(given.get(name))[:50]}; this one has {value}.",
                fix="Train heads for this model: tidemill train-draft MODEL.",
            )


def _acceptance(source: Path, said: dict[str, Any]) -> tuple[list[float], float]:
    given, least = said.get("acceptance", []), said.get("least_probability", 0.5)
    if not isinstance(given, list) or not all(
        isinstance(one, int | float) and 0 <= one <= 1 for one in given
    ):
        raise DraftError(f"{source}: key acceptance must be a list of shares.")
    if not isinstance(least, int | float) or not 0 <= least <= 1:
        raise DraftError(
            f"{source}: key least_probability is {str(least)[:50]!r}; it must be from 0 to 1."
        )
    return [float(one) for one in given[:64]], float(least)


def _costs(source: Path, said: dict[str, Any]) -> tuple[float, list[float]]:
    draft, steps = said.get("draft_cost", 0.5), said.get("step_costs", [1.0])
    if not _is_cost(draft):
        raise DraftError(
            f"{source}: key draft_cost is {str(draft)[:50]!r}; it must be a number above 0."
        )
    if not isinstance(steps, list) or not steps or not all(map(_is_cost, steps)):
        raise DraftError(f"{source}: key step_costs must be a list of numbers above 0.")
    return float(draft), [float(one) for one in steps[:64]]


def _is_cost(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < 1e6


def _read(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 - not a dict
                kind, allowed = (
                    str(file.get_slice(name).get_dtype()),
                    _INTS if name == _IDS else _FLOATS,
                )
                if kind not in allowed:
                    raise DraftError(
                        f"{path}: tensor {name[:200]} has type {kind}.",
                        fix=f"It must be {' or '.join(allowed)}.",
                    )
                tensors[name] = file.get_tensor(name)
            return tensors
    except (SafetensorError, OSError) as error:
        raise DraftError(
            f"{path} is corrupt or truncated: {error}.",
            fix="Copy it again, or train the heads again.",
        ) from error


def _ids(path: Path, tensors: dict[str, torch.Tensor], vocab_size: int) -> torch.Tensor:
    ids = tensors.pop(_IDS, None)
    if ids is None:
        raise DraftError(f"{path}: tensor {_IDS} is missing.", fix="Is it the whole file?")
    ids = ids.long()
    is_right = ids.dim() == 1 and len(ids) > 0 and bool((ids.diff() > 0).all())
    if not is_right or ids[0] < 0 or ids[-1] >= vocab_size:
        raise DraftError(f"{path}: tensor {_IDS} must hold ascending tokens below {vocab_size}.")
    return ids


def _fitting(
    path: Path, tensors: dict[str, torch.Tensor], head: DraftHead
) -> dict[str, torch.Tensor]:
    expected = {name: value.shape for name, value in head.state_dict().items()}
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in expected:
            raise DraftError(
                f"{path}: tensor {name[:200]} has no place in heads of the kind {head.kind}."
            )
        if name not in tensors:
            raise DraftError(f"{path}: tensor {name} is missing.", fix="Is it the whole file?")
        if tensors[name].shape != expected[name]:
            raise DraftError(
                f"{path}: tensor {name} has shape {list(tensors[name].shape)}; the model asks for {list(expected[name])}.",
                fix="Are they heads for this model?",
            )
        if not tensors[name].isfinite().all():
            raise DraftError(f"{path}: tensor {name} holds values that are not finite.")
    return {name: value.float() for name, value in tensors.items()}
