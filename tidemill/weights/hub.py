"""Models of the Hugging Face hub: what the cache has is taken from there, the rest is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NoReturn

from tidemill.errors import ModelNotFound
from tidemill.weights.choose import GGUFSet, choose, gguf_sets

_HUB_ID = re.compile(
    r"(?:https://)?(?:(?:hf\.co|huggingface\.co)/)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?::([\w.-]+))?/?"
)
_FOLDER_FILES = ["*.json", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt", "*.jinja"]
_NOT_NEEDED = ["consolidated*.safetensors"]  # the same weights in Mistral's own format
_ANSWERS_WITHIN_S = 6.0  # the hub, before anything is downloaded
# in names of errors
_NO_CONNECTION = ("Connect", "Timeout", "Network", "Proxy", "SSL", "NewConnection", "MaxRetry")
DEFAULT_QUANTIZATION = "Q4_K_M"


def parse_id(model: str) -> tuple[str, str] | None:
    """Repository and quantization ("" if none is given) of `org/name` or `org/name:Q4_K_M`."""
    found = _HUB_ID.fullmatch(model)
    return (found[1], found[2] or "") if found else None


def from_hub(repo: str, quantization: str, complete: Any) -> Path:
    """A folder of safetensors (`complete` says whether all is there) or a GGUF file. What is in the
    cache needs no network."""
    try:
        import huggingface_hub
    except ImportError:
        raise ModelNotFound(
            f"{repo} looks like a hub id, and huggingface_hub is not installed.",
            fix="Run: pip install 'tidemill[hub]', or give a folder.",
        ) from None
    cached = _cached_folder(huggingface_hub, repo)
    if cached is not None:
        if not quantization and complete(cached):
            return cached
        if path := _cached_gguf(cached, quantization or DEFAULT_QUANTIZATION):
            return path
    try:
        names = _names(huggingface_hub, repo)
    except Exception as error:  # the library raises a dozen kinds
        if cached is not None and not quantization and len(kept := _complete_sets(cached)) == 1:
            return cached / kept[0].files[0]  # without a network, what there is
        _refuse(repo, error)
    has_weights = (
        any(name.endswith(".safetensors") and "/" not in name for name in names)
        and "config.json" in names
    )
    try:
        if has_weights and not quantization:
            folder = Path(
                huggingface_hub.snapshot_download(
                    repo, allow_patterns=_FOLDER_FILES, ignore_patterns=_NOT_NEEDED
                )
            )
            if complete(folder):
                return folder
            raise FileNotFoundError("config.json, the tokenizer or safetensors are missing")
        if not gguf_sets(names):
            fix = (
                f"Give {repo}, for its safetensors."
                if has_weights
                else "Files that need unpickling (.bin, .pth) are not read."
            )
            raise ModelNotFound(
                f"{repo} has no GGUF files" + ("." if has_weights else " and no safetensors."),
                fix=fix,
            )
        chosen = choose(names, quantization, repo)
        if not chosen.is_complete:
            raise ModelNotFound(
                f"{repo} has {len(chosen.files)} of the {chosen.num_parts} parts of {chosen.stem}."
            )
        paths = [Path(huggingface_hub.hf_hub_download(repo, name)) for name in chosen.files]
        return paths[0]
    except ModelNotFound:
        raise
    except Exception as error:
        _refuse(repo, error)


def _names(hub: Any, repo: str) -> list[str]:
    """The repository's files, by one request: of those that list files, the library repeats each
    for half a minute, with a warning every time, where there is no network."""
    info = hub.HfApi().model_info(repo, timeout=_ANSWERS_WITHIN_S)
    return [each.rfilename for each in info.siblings or ()]


def cached_models() -> list[str]:
    """Repositories in the local cache that hold models."""
    root = Path(
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    ).expanduser()
    found = root.glob("models--*--*/snapshots") if root.is_dir() else []
    return sorted(path.parent.name.removeprefix("models--").replace("--", "/", 1) for path in found)


def _cached_folder(hub: Any, repo: str) -> Path | None:
    try:
        return Path(hub.snapshot_download(repo, local_files_only=True))
    except Exception:  # not there
        return None


def _complete_sets(folder: Path) -> list[GGUFSet]:
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf") if path.is_file()]
    return [each for each in gguf_sets(names) if each.is_complete]


def _cached_gguf(folder: Path, quantization: str) -> Path | None:
    fits = [each for each in _complete_sets(folder) if each.quantization == quantization.upper()]
    return folder / fits[0].files[0] if len(fits) == 1 else None


def _refuse(repo: str, error: Exception) -> NoReturn:
    kind = type(error).__name__
    if "Gated" in kind:
        fix = "Its authors must grant access: ask for it on the hub, then log in with `hf auth login` or set HF_TOKEN."
    elif "RepositoryNotFound" in kind:
        fix = "The hub has no such model, or it is private: check the name, or log in with `hf auth login`."
    elif any(word in kind for word in _NO_CONNECTION):
        where = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
        raise ModelNotFound(
            f"{repo} is not in the local hub cache, and the hub cannot be reached at {where} ({kind}).",
            fix="Check the network, or give a mirror with HF_ENDPOINT. On a machine without a network, copy the model there and "
            "give its file or folder.",
        ) from error
    else:
        fix = "If this machine is offline, copy the model here and give its folder."
    said = " ".join(str(error).split())[:200]
    what = f"{repo} is not in the local hub cache and could not be fetched ({kind}: {said})."
    raise ModelNotFound(what, fix=fix) from error
