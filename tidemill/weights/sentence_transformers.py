"""The settings of an embedding model beside its weights, in the files of sentence-transformers: how
hidden states become an embedding, and how long an input may be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.errors import CheckpointError
from tidemill.weights.locate import read_file, read_json

_MODES = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last", "lasttoken": "last"
}  # fmt: skip


@dataclass(frozen=True)
class Modules:
    """Without files: the mean, of length 1."""

    pooling: str = "mean"  # or cls; of a decoder: mean or last
    is_normalized: bool = True
    max_length: int | None = None  # in tokens

    @classmethod
    def read(cls, folder: Path, poolings: tuple[str, str] = ("mean", "cls")) -> Modules:
        """`poolings`: that the model can do."""
        listed = folder / "modules.json"
        if not listed.is_file():
            return cls(max_length=_max_length(folder))
        kinds = _modules(listed)
        other = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
        if other:
            raise CheckpointError(
                f"{listed}: the module {other[0][:100]!r} is not supported.",
                fix="Transformer, Pooling and Normalize are.",
            )
        settings = (
            _checked_path(folder, kinds["Pooling"]) / "config.json" if "Pooling" in kinds else None
        )
        pooling = "mean" if settings is None else _pooling(settings, poolings)
        return cls(pooling, "Normalize" in kinds, _max_length(folder))


def decoder_pooling(folder: Path) -> str | None:
    """The way that a decoder's hidden states become an embedding, if its folder says: mean or last."""
    return (
        Modules.read(folder, ("mean", "last")).pooling
        if (folder / "modules.json").is_file()
        else None
    )


def _modules(path: Path) -> dict[str, str]:
    """The folder of each module, by the last part of its class's name."""
    try:
        listed = json.loads(read_file(path))
        return {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in listed}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path} does not list modules with type and path: {error}."
        ) from error


def _checked_path(folder: Path, name: str) -> Path:
    if Path(name).name != name:
        raise CheckpointError(
            f"{folder / 'modules.json'}: the path {name[:100]!r} is not a folder beside it."
        )
    return folder / name


def _pooling(path: Path, poolings: tuple[str, str]) -> str:
    settings = read_json(path)
    newer = settings.get("pooling_mode")  # newer files name it
    names = [newer] if isinstance(newer, str) else newer if isinstance(newer, list) else None
    chosen = [
        name
        for name, value in settings.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    found: list[Any] = [
        _MODES.get(name, name) for name in (chosen if names is None else map(str, names))
    ]
    if len(found) != 1 or found[0] not in poolings:
        raise CheckpointError(
            f"{path}: the pooling {', '.join(str(one)[:50] for one in found[:4]) or 'none'} is not supported.",
            fix=f"{' and '.join(poolings).capitalize()} are.",
        )
    return str(found[0])


def _max_length(folder: Path) -> int | None:
    path = folder / "sentence_bert_config.json"
    value = read_json(path).get("max_seq_length") if path.is_file() else None
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{path}: max_seq_length is {str(value)[:100]!r}.",
            fix="It must be a whole number from 1 on.",
        )
    return value
