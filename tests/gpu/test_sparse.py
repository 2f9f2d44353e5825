"""2:4 sparse weights on the GPU at hand: the same bits alone and among others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.gpu.engines import ask, random_llama
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.layers.linear import Linear
from tidemill.types.sampling import SamplingParams


def test_engine(tmp_path: Path) -> None:
    """A small Llama, pruned to 2:4: the same bits alone and among others; sparse weights are served
    as such."""
    folder = tmp_path
    random_llama(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, values in tensors.items():
        if name.endswith("_proj.weight"):
            groups = values.float().unflatten(1, (-1, 4))
            keep = torch.zeros_like(groups).scatter_(2, groups.abs().topk(2, 2).indices, 1)
            tensors[name] = (groups * keep).flatten(1).to(values.dtype)
    save_file(tensors, path, {"format": "pt"})
    requests = {
        f"r{i}": (
            [(7 * i + j) % 1900 + 2 for j in range(20 + 37 * i)],
            SamplingParams(max_tokens=24, logprobs=2, seed=i, temperature=0.5, ignore_eos=True),
        )
        for i in range(12)
    }
    core = load_core(
        EngineOptions(
            model=str(folder), kv_memory_bytes=2**28, max_requests=64, quantization="sparse24"
        )
    )
    seen = ask(core, requests)
    for name in ("r0", "r5", "r11"):
        assert ask(core, {name: requests[name]})[name] == seen[name], name
    model: Any = core.runner.model  # type: ignore[attr-defined]
    kinds = {
        type(module.weight).__name__ for module in model.modules() if isinstance(module, Linear)
    }
    assert any("Sparse" in kind for kind in kinds), kinds
