"""The training loop: the same bits whether it runs through or is interrupted and resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tidemill.errors import ConfigError

# share of the steps in which the rate rises; what it falls to at the end, of its highest
_WARMUP, _LAST = 0.05, 0.05
_BETAS, _DECAY, _CLIP = (0.9, 0.95), 0.01, 1.0
_SAVE_EVERY = 25
Tick = Callable[[int, float], None]  # steps done, loss of the last


@dataclass(frozen=True, slots=True)
class Schedule:
    """`recipe`: what decides the bits of the result. `saved`: where the state is written every so
    often, and read from."""

    total: int
    rate: float
    recipe: dict[str, Any]
    saved: Path

    @property
    def said(self) -> dict[str, str]:
        return {"total": str(self.total), "recipe": json.dumps(self.recipe, sort_keys=True)}


def run_steps(
    module: nn.Module,
    loss_at: Callable[[int], torch.Tensor],
    schedule: Schedule,
    tick: Tick,
    is_stopped: Callable[[], bool],
) -> bool:
    """Runs the training steps; returns False if it was stopped. The module's parameters that take
    gradients are trained."""
    learned = {name: value for name, value in module.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(learned.values(), schedule.rate, _BETAS, weight_decay=_DECAY)
    total = schedule.total
    done = _restore(learned, optimizer, schedule)
    tick(done, math.nan)
    while done < total and not is_stopped():
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate * _share_of_rate(done / total)
        loss = loss_at(done)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned.values(), _CLIP)
        optimizer.step()
        done += 1
        tick(done, loss.item())
        if done % _SAVE_EVERY == 0 or done == total or is_stopped():
            _save(learned, optimizer, schedule, done)
    return done == total


def _share_of_rate(progress: float) -> float:
    if progress < _WARMUP:
        return (progress + 0.001) / (_WARMUP + 0.001)
    return _LAST + (1 - _LAST) * 0.5 * (
        1 + math.cos(math.pi * (progress - _WARMUP) / (1 - _WARMUP))
    )


def _save(
    learned: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    done: int,
) -> None:
    from safetensors.torch import save_file

    tensors = {f"head.{name}": value.detach().contiguous() for name, value in learned.items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {
            f"optimizer.{number}.{name}": value.contiguous() for name, value in state.items()
        }
    new = schedule.saved.with_suffix(".new")
    save_file(tensors, new, schedule.said | {"done": str(done)})
    os.replace(new, schedule.saved)


def _restore(
    learned: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, schedule: Schedule
) -> int:
    """Steps done before."""
    from safetensors import SafetensorError, safe_open

    path = schedule.saved
    if not path.exists():
        return 0
    again = f"Delete {path.parent}, or give another --out."
    try:
        with safe_open(path, framework="pt") as file:
            said = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is corrupt: {error}.", fix=again) from error
    if {name: said.get(name) for name in schedule.said} != schedule.said:
        raise ConfigError(f"{path} was begun with other options: {said.get('recipe')}.", fix=again)
    by_number: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith("optimizer."):
            _, number, part = name.split(".")
            by_number.setdefault(int(number), {})[part] = value
    with torch.no_grad():
        for name, parameter in learned.items():
            parameter.copy_(tensors[f"head.{name}"])
    optimizer.load_state_dict(
        {"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    return int(said["done"])
