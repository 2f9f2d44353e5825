"""LLM.int8(), GOBO, low rank and ternary matrices on the GPU at hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.gpu_compressed import KINDS, SHAPES
from tests.gpu.engines import ask, random_llama
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.kernels.low_rank import Factors
from tidemill.quant.cuda_packed import CudaQuantized
from tidemill.types.sampling import SamplingParams


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_matrix(name: str, kind: str) -> None:
    """Near float32; the same bits at any number of rows."""
    torch.manual_seed(0)
    num_out, num_in = SHAPES[name]
    part = KINDS[kind](num_out, num_in)
    values = (part.product() if isinstance(part, Factors) else part.dequantize()).to("cuda")
    weight = CudaQuantized().join([part], None)
    x = torch.randn(2048, num_in, device="cuda")
    x[:, 77] *= 20
    x[5::7, 1000:1010] *= 15
    x = x.bfloat16()
    exact = x[:700].float() @ values.t()
    whole = weight(x[:700].clone())
    off = float((whole.float() - exact).norm() / exact.norm())
    wrong = [
        num
        for num in (1, 5, 16, 17, 33, 64, 100, 256, 513)
        if not torch.equal(weight(x[:num].clone()), whole[:num])
    ]
    assert not wrong, "other bits"
    assert off < 0.02


def _as_int8(module: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    largest = values.abs().amax(1)
    return {
        f"{module}.weight": (values / largest[:, None] * 127).round().to(torch.int8),
        f"{module}.SCB": largest,
    }


def _as_gobo(module: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    from tidemill.compress.layouts.base import pack

    table = torch.quantile(
        values.flatten()[:: max(1, values.numel() // 10**5)], torch.linspace(0.03, 0.97, 16)
    )
    places = values.abs().flatten().topk(values.numel() // 500).indices.sort().values
    numbers = (values[..., None] - table).abs().argmin(-1)
    return {
        f"{module}.weight_packed": pack(numbers.to(torch.uint8), 4), f"{module}.weight_shape": torch.tensor(list(values.shape)),
        f"{module}.weight_centroids": table, f"{module}.weight_outliers": values.flatten()[places],
        f"{module}.weight_places": places.to(torch.int32),
    }  # fmt: skip


def _as_factors(module: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    u, sigma, v = torch.linalg.svd(values, full_matrices=False)
    rank = min(values.shape) // 3
    return {
        f"{module}.low_rank_b": (u * sigma)[:, :rank].bfloat16().contiguous(),
        f"{module}.low_rank_a": v[:rank].bfloat16().contiguous(),
    }


LAYOUTS: dict[
    str, tuple[Callable[[str, torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]
] = {
    "LLM.int8()": (
        _as_int8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 2.0},
    ),
    "GOBO": (_as_gobo, {"quant_method": "gobo", "bits": 4}),
    "low rank": (_as_factors, {"quant_method": "low_rank"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine(layout: str, tmp_path: Path) -> None:
    """Alone as among others; and mostly the tokens of the CPU, which rounds differently."""
    convert, settings = LAYOUTS[layout]
    folder = tmp_path
    random_llama(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        is_matrix = name.endswith("_proj.weight")
        tensors |= (
            convert(name.removesuffix(".weight"), values.float()) if is_matrix else {name: values}
        )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    requests = {
        f"r{i}": (
            [(7 * i + j) % 1900 + 2 for j in range(20 + 37 * i)],
            SamplingParams(max_tokens=16, logprobs=2, temperature=0.0, ignore_eos=True),
        )
        for i in range(10)
    }
    core = load_core(
        EngineOptions(model=str(folder), device="cuda", kv_memory_bytes=2**28, max_requests=64)
    )
    seen = ask(core, requests)
    for name in ("r0", "r4", "r9"):
        assert ask(core, {name: requests[name]})[name] == seen[name], name
    other = ask(
        load_core(
            EngineOptions(model=str(folder), device="cpu", kv_memory_bytes=2**26, max_requests=64)
        ),
        requests,
    )
    for name in requests:  # before answers part, at tokens that are nearly as likely
        first, theirs = seen[name][1][0], other[name][1][0]
        assert abs(first.logprob - theirs.logprob) < 0.1, f"{name}: a CPU's first token"
