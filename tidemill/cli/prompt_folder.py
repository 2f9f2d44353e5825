"""Prompt caches in a folder: their KV pages, in the file that --kv-disk has there, and beside it
what each of them is."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings
from tidemill.config import parse_bytes
from tidemill.errors import ConfigError, TidemillError
from tidemill.types.kv_policy import KVPolicy
from tidemill.types.sampling import SamplingParams

_KIND, _VERSION = "tidemill prompt cache", 1
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_BYTES = 64 * 2**20
SUFFIX = ".prompt.json"
_PAGES = "*.tidemill-kv"


@dataclass(frozen=True)
class Saved:
    """The parts of a prompt cache in a folder."""

    name: str
    model: str
    token_ids: list[int]
    content: dict[str, Any]  # messages and tools, or a prompt
    created_s: int = field(default_factory=lambda: int(time.time()))

    def body(self) -> dict[str, Any]:
        """The body for a server: tokens are exact, messages are rendered by its template."""
        return self.content if "messages" in self.content else {"prompt": self.token_ids}


def save(
    folder: Path, name: str, model: str | None, content: dict[str, Any], size: str
) -> tuple[Saved, int]:
    """Compute it in this process and write its pages. Returns it, and how many of its tokens the
    folder had already."""
    path = _path(folder, name)
    if path.exists():
        raise ConfigError(
            f"{folder} has a prompt cache {name!r}.",
            fix="Remove it first, or choose another name.",
            param="name",
        )
    parse_bytes(size)
    # an engine goes on without a folder that it cannot write to
    folder.mkdir(parents=True, exist_ok=True)
    from tidemill.engine.llm import LLM  # brings torch

    options = Settings.read(ENGINE_NAMES, {"model": model}).engine | {
        "kv_disk": f"{folder.resolve()}:{size}"
    }
    llm = LLM(**options, progress=False)
    # whatever requests with it keep
    params = SamplingParams(max_tokens=1, temperature=0.0, kv_policy=KVPolicy("full"))
    try:
        if "messages" in content:
            template_options: Any = {"tools": content.get("tools"), "add_generation_prompt": False}
            (output,) = llm.chat(content["messages"], params, progress=False, **template_options)
        else:
            (output,) = llm.generate(content["prompt"], params, progress=False)
    finally:
        llm.close()  # what was computed goes to disk
    saved = Saved(name, options["model"], list(output.prompt_token_ids), content)
    inner = asdict(saved)
    text = json.dumps(
        {"kind": _KIND, "version": _VERSION, "sha256": _digest(inner), "cache": inner}
    )
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)  # whole, or not at all
    return saved, output.num_cached


def read(folder: Path, name: str) -> Saved:
    return _read(_existing(folder, name))


def all_in(folder: Path) -> Iterator[Saved]:
    if not folder.is_dir():
        raise TidemillError(f"There is no folder {folder}.")
    return (_read(path) for path in sorted(folder.glob(f"*{SUFFIX}")))


def remove(folder: Path, name: str) -> None:
    """Its pages stay until the folder's quota is reached, unless it was the last."""
    _existing(folder, name).unlink()
    if not any(folder.glob(f"*{SUFFIX}")):
        for path in folder.glob(_PAGES):
            path.unlink()


def _path(folder: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        fix = "Use letters, digits, dots, hyphens and underscores, 128 at most."
        raise ConfigError(f"A prompt cache is named {name[:100]!r}.", fix=fix, param="name")
    return folder / f"{name}{SUFFIX}"


def _existing(folder: Path, name: str) -> Path:
    path = _path(folder, name)
    if not path.is_file():
        fix = f"tidemill prompt-cache list --folder {folder} shows those it has."
        raise TidemillError(f"{folder} has no prompt cache {name!r}.", fix=fix)
    return path


def _digest(inner: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(inner, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> Saved:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise TidemillError(f"{path} is larger than {_MAX_BYTES} bytes.")
        stored = json.loads(path.read_text())
        if stored["kind"] != _KIND or stored["version"] != _VERSION:
            raise TidemillError(
                f"{path} is not a prompt cache of this version.", fix="Save it again."
            )
        if stored["sha256"] != _digest(stored["cache"]):
            raise TidemillError(f"{path} was changed after it was saved.", fix="Save it again.")
        return Saved(**stored["cache"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TidemillError(
            f"{path} cannot be read: {type(error).__name__}.", fix="Save it again."
        ) from error
