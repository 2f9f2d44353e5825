"""LoRA adapters as PEFT stores them: a folder with adapter_config.json and
adapter_model.safetensors.

An adapter adds scale · B A x to the output of a linear layer. A folder is not trusted: sizes are
bounded by the model's, and what would change the output and is not supported is refused by its
name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.config import MAX_LORA_RANK
from tidemill.errors import AdapterError
from tidemill.weights.locate import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DTYPES = {"F32", "F16", "BF16"}
# Keys of adapter_config.json that change the output if they are set, and what they are.
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "biases of B",
    "modules_to_save": "modules trained as a whole",
    "trainable_token_indices": "trained rows of the embedding",
    "target_parameters": "adapted parameters that are not linear layers",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "activated LoRA",
    "megatron_config": "Megatron layers",
}
# Ways to initialize that also change the base model's weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The factors for one stored matrix [N, K] of the model: what is added to its output is scale ·
    up (down x)."""

    down_RK: torch.Tensor
    up_NR: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down_RK.shape[0]


@dataclass(frozen=True, slots=True)
class LoraWeights:
    path: Path
    digest: str  # of settings and tensors: adapters of the same content are the same adapter
    pairs: dict[str, LoraPair]  # by the name of the stored matrix, as Hugging Face has it

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())

    @property
    def num_bytes(self) -> int:
        return sum(
            tensor.nbytes for pair in self.pairs.values() for tensor in (pair.down_RK, pair.up_NR)
        )


def read_lora(
    path: Path, places: Mapping[str, tuple[int, int]], max_rank: int = MAX_LORA_RANK
) -> LoraWeights:
    """`places`: the matrices of the model that an adapter may change, with their shapes [N, K]."""
    path = path.expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise AdapterError(
                f"The adapter {path} holds no {name}.",
                fix="It must be a folder that PEFT has saved.",
            )
    stated = read_json(path / CONFIG)
    settings = _Settings(stated, path / CONFIG)
    tensors = _read_tensors(path / WEIGHTS)
    pairs: dict[str, LoraPair] = {}
    for name in sorted(tensors):
        module, half = _parse(name)
        if module not in places:
            fix = f"An adapter may change {_shown(places)}. {_MERGE}"
            raise AdapterError(f"{path}: {_why_no_place(name, module)}", fix=fix)
        if module in pairs:
            continue
        other = f"{name.removesuffix(half)}{'lora_B.weight' if half == 'lora_A.weight' else 'lora_A.weight'}"
        if other not in tensors:
            raise AdapterError(
                f"{path}: tensor {other} is missing.", fix="Is it the whole adapter?"
            )
        down, up = (name, other) if half == "lora_A.weight" else (other, name)
        pairs[module] = _pair(
            path, settings, module, {down: tensors[down], up: tensors[up]}, places[module], max_rank
        )
    if not pairs:
        raise AdapterError(f"{path / WEIGHTS} holds no tensors.")
    return LoraWeights(path, _digest(stated, tensors), pairs)


def _pair(
    path: Path,
    settings: _Settings,
    module: str,
    stored: dict[str, torch.Tensor],
    shape: tuple[int, int],
    max_rank: int,
) -> LoraPair:
    """`stored`: its two tensors by name, that of A first."""
    rank, (num_out, num_in) = settings.rank(module), shape
    if not 1 <= rank <= max_rank:
        fix = (
            f"Serve with --max-lora-rank {rank}."
            if rank <= MAX_LORA_RANK
            else f"At most {MAX_LORA_RANK} is supported."
        )
        raise AdapterError(
            f"{path}: the rank of {module} is {rank}; ranks are 1 to {max_rank} here.", fix=fix
        )
    for (name, tensor), expected in zip(
        stored.items(), ((rank, num_in), (num_out, rank)), strict=True
    ):
        if tuple(tensor.shape) != expected:
            raise AdapterError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}; the model and rank {rank} ask for {list(expected)}.",
                fix="Is it an adapter for this model?",
            )
        # as a GPU holds it, where rows of others are multiplied by zero
        if not tensor.to(torch.bfloat16).isfinite().all():
            raise AdapterError(f"{path}: tensor {name} holds values that are not finite.")
    down_RK, up_NR = stored.values()
    return LoraPair(down_RK, up_NR, settings.scale(module, rank))


class _Settings:
    """adapter_config.json, as far as it changes the output."""

    def __init__(self, data: dict[str, Any], source: Path) -> None:
        self._data, self._source = data, source
        if data.get("peft_type") != "LORA":
            raise AdapterError(
                f"{source}: peft_type is {str(data.get('peft_type'))[:50]!r}.",
                fix="Only LORA is supported.",
            )
        for key, what in _REFUSED.items():
            if data.get(key):
                raise AdapterError(f"{source}: {key} is set; {what} cannot be served.", fix=_MERGE)
        for key, value in data.items():
            if key.startswith("use_") and key != "use_rslora" and value:
                raise AdapterError(f"{source}: {key} is set, which is not supported.", fix=_MERGE)
        if data.get("bias", "none") != "none":
            raise AdapterError(
                f"{source}: bias is {str(data['bias'])[:50]!r}; trained biases cannot be served.",
                fix=_MERGE,
            )
        started = data.get("init_lora_weights", True)
        if isinstance(started, str) and started.startswith(_CHANGES_BASE):
            fix = "Save it with path_initial_model_for_weight_conversion, or merge it."
            raise AdapterError(
                f"{source}: init_lora_weights is {started[:50]!r}, which changes the base model.",
                fix=fix,
            )
        self._ranks, self._alphas = self._pattern("rank_pattern"), self._pattern("alpha_pattern")
        self._rank, self._alpha = (
            self._number("r", data.get("r")),
            self._number("lora_alpha", data.get("lora_alpha")),
        )

    def rank(self, module: str) -> int:
        rank = _matching(self._ranks, module, self._rank)
        if rank != int(rank):
            raise AdapterError(
                f"{self._source}: the rank of {module} is {rank:g}.", fix="It must be an integer."
            )
        return int(rank)

    def scale(self, module: str, rank: int) -> float:
        alpha = _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._data.get("use_rslora") else rank)

    def _pattern(self, key: str) -> dict[str, float]:
        """Names of modules, or ends of them, as PEFT writes them. It takes regular expressions,
        too; here they are refused."""
        pattern = self._data.get(key) or {}
        if not isinstance(pattern, dict):
            raise AdapterError(f"{self._source}: {key} must map names of modules to numbers.")
        for name in pattern:
            if not re.fullmatch(r"\^?[\w.]{1,500}", name):
                raise AdapterError(
                    f"{self._source}: {key} has the regular expression {name[:100]!r}.",
                    fix="Name modules in full.",
                )
        return {
            name.removeprefix("^"): self._number(f"{key} of {name}", value)
            for name, value in pattern.items()
        }

    def _number(self, key: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -1e9 < value < 1e9:
            raise AdapterError(
                f"{self._source}: {key} is {str(value)[:50]!r}; it must be a number."
            )
        return float(value)


_MERGE = "Merge it into the model with PEFT's merge_and_unload."


def _matching(pattern: dict[str, float], module: str, otherwise: float) -> float:
    return next(
        (value for name, value in pattern.items() if module == name or module.endswith(f".{name}")),
        otherwise,
    )


def _parse(name: str) -> tuple[str, str]:
    """base_model.model.MODULE.lora_A.weight: the module and the rest."""
    module = name.removeprefix(_PREFIX)
    for half in ("lora_A.weight", "lora_B.weight"):
        if module.endswith(f".{half}"):
            return module.removesuffix(f".{half}"), half
    return module, ""


def _why_no_place(name: str, module: str) -> str:
    if "lora_embedding_" in name or "embed_tokens" in module:
        return f"tensor {name} adapts the embedding, which is not supported."
    if re.search(r"\.experts?(\.|$)|\.shared_expert", module):
        return f"tensor {name} adapts an expert, which is not supported."
    if re.search(r"\.(gate|router|shared_expert_gate)$", module):
        return f"tensor {name} adapts a router, which is not supported."
    if ".modules_to_save." in name or module.endswith(("norm.weight", "norm")):
        return f"tensor {name} is a whole module, which is not supported."
    if module.rpartition(".")[2] == "lm_head":
        return f"tensor {name} adapts the head, which is not supported."
    if "lora_magnitude_vector" in name:
        return f"tensor {name} belongs to DoRA, which is not supported."
    return f"tensor {name} has no place in this model."


def _shown(places: Mapping[str, tuple[int, int]]) -> str:
    ends = sorted({place.rpartition(".")[2] for place in places})
    numbers = [int(found[1]) for place in places if (found := re.search(r"\.(\d+)\.", place))]
    return f"{', '.join(ends)} of layers 0 to {max(numbers, default=0)}"


def _digest(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 - not a dict
                kind = str(file.get_slice(name).get_dtype())
                if kind not in _DTYPES:
                    fix = f"Only {', '.join(sorted(_DTYPES))} can be read."
                    raise AdapterError(f"{path}: tensor {name[:200]} has type {kind}.", fix=fix)
                tensors[name] = file.get_tensor(name)
            return tensors
    except (SafetensorError, OSError) as error:
        raise AdapterError(
            f"{path} is corrupt or truncated: {error}.", fix="Copy it again."
        ) from error
