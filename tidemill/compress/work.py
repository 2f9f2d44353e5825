"""The state of a run in OUT.partial: results of finished layers and the activations the next one
starts from, so that an interrupted run goes on and ends with the same bytes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tidemill.errors import ConfigError, TidemillError

_STATE = "state.json"


class Work:
    """`settings`: everything the result depends on. A folder of other settings is refused."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        if out.name in ("", ".."):
            raise ConfigError(f"--out is {out}.", fix="Give the name of a new folder.", param="out")
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(
                f"{out} is there already.", fix="Delete it, or give another --out.", param="out"
            )
        if not out.parent.is_dir():
            raise ConfigError(
                f"There is no folder {out.parent}.",
                fix="Make it, or give another --out.",
                param="out",
            )
        self.out, self.folder = out, out.with_name(out.name + ".partial")
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be made: {error}.", fix="Give another --out.", param="out"
            ) from error
        state = self.folder / _STATE
        text = json.dumps(settings, indent=2, sort_keys=True)
        if not state.exists():
            _write(state, text.encode())
        elif state.read_text() != text:
            raise ConfigError(
                f"{self.folder} is of an interrupted run with other settings.",
                fix="Delete it, give the same settings, or another --out.",
                param="out",
            )

    @contextmanager
    def begins(self) -> Iterator[None]:
        """The work before the first layer. Settings that turn out wrong leave no folder, unless
        layers are finished."""
        try:
            yield
        except TidemillError:
            if self.num_finished == 0:
                shutil.rmtree(self.folder)
            raise

    @property
    def num_finished(self) -> int:
        """Layers, from the first on."""
        number = 0
        while self._layer(number).exists():
            number += 1
        return number

    def _layer(self, number: int) -> Path:
        return self.folder / f"layer-{number:05}.safetensors"

    def _states(self, stream: str, number: int) -> Path:
        return self.folder / f"{stream}-{number:05}.npy"

    def has_states(self, stream: str, number: int) -> bool:
        return self._states(stream, number).exists()

    def states(self, stream: str, number: int) -> torch.Tensor:
        """The states that layer `number` starts from, [sequences, length, H], a view of the file."""
        return torch.from_numpy(np.load(self._states(stream, number), mmap_mode="r+"))

    def new_states(self, stream: str, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The same, to be written."""
        path = self._states(stream, number)
        return torch.from_numpy(
            np.lib.format.open_memmap(path.with_suffix(".new"), "w+", np.float32, shape)
        )

    def keep_states(self, stream: str, number: int) -> None:
        """All of them are written."""
        path = self._states(stream, number)
        os.replace(path.with_suffix(".new"), path)

    def finish(
        self, number: int, tensors: dict[str, torch.Tensor], notes: dict[str, str] | None = None
    ) -> None:
        """A layer's results; from now on it is not computed again. States that it started from are
        deleted."""
        path = self._layer(number)
        made = {
            name: tensor.detach().to("cpu", copy=True).contiguous()
            for name, tensor in tensors.items()
        }
        save_file(made, path.with_suffix(".new"), metadata=notes)
        os.replace(path.with_suffix(".new"), path)
        for old in self.folder.glob(f"*-{number:05}.npy"):
            old.unlink()

    def tensors(self, number: int) -> dict[str, torch.Tensor]:
        with self._open(number) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict

    def notes(self, number: int) -> dict[str, str]:
        with self._open(number) as file:
            return file.metadata() or {}

    def _open(self, number: int) -> Any:
        try:
            return safe_open(self._layer(number), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{self._layer(number)} is corrupt: {error}.", fix="Delete it, and start again."
            ) from error

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Something that belongs to no layer, like the calibration text's tokens."""
        path = self.folder / f"{name}.safetensors"
        save_file(tensors, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def saved(self, name: str) -> dict[str, torch.Tensor] | None:
        path = self.folder / f"{name}.safetensors"
        if not path.exists():
            return None
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict

    @property
    def result(self) -> Path:
        """The path where the output is written before it gets its name."""
        return self.folder / "result"

    def publish(self) -> None:
        """The result is whole: it gets its name, and the state is deleted."""
        if self.out.is_dir():
            self.out.rmdir()
        os.replace(self.result, self.out)
        shutil.rmtree(self.folder)


def _write(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)
