"""LLM.int8(), GOBO, low rank and ternary matrices on the GPU at hand: held against the CPU's values, bit for bit against
themselves at other numbers of rows, timed beside bfloat16; and small models of each in the engine.

    python -m bench.gpu_compressed [--only matrices,engine]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench.gpu_engine_checks import ask, random_llama
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.kernels.cuda.tuning import time_us
from tidemill.kernels.low_rank import Factors
from tidemill.kernels.quantized_linear import Activations, Codes, Outliers
from tidemill.layers.linear import Linear
from tidemill.quant.cuda import CudaWeight
from tidemill.quant.cuda_packed import CudaQuantized
from tidemill.sampling import SamplingParams

SHAPES = {"o": (4096, 4096), "gate_up": (28672, 4096)}
ROWS = (1, 16, 256, 2048)


def int8(num_out: int, num_in: int, threshold: float | None = 6.0) -> Codes:
    codes = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8)
    scales = torch.full((num_out, 1), 1 / 73 / num_in**0.5)
    activations = None if threshold is None else Activations(threshold=threshold)
    return Codes(8, codes, scales, None, group=num_in, activations=activations)


def gobo(num_out: int, num_in: int) -> Codes:
    codes = torch.randint(0, 8, (num_out, num_in), dtype=torch.int8)
    table = torch.zeros(16)
    table[:8] = torch.linspace(-2, 2, 8) / num_in**0.5
    places = torch.randperm(num_out * num_in)[: num_out * num_in // 1000].sort().values
    outliers = Outliers(places, torch.randn(places.numel()) * 5 / num_in**0.5)
    return Codes(4, codes, torch.ones(num_out, 1), None, group=num_in, table=table, outliers=outliers)


def ternary(num_out: int, num_in: int) -> Codes:
    """As TQ2_0."""
    codes = torch.randint(-1, 2, (num_out, num_in), dtype=torch.int8)
    scales = torch.full((num_out, num_in // 256), num_in**-0.5)
    return Codes(2, codes, scales, None, group=256, activations=Activations())


def low_rank(num_out: int, num_in: int) -> Factors:
    rank = num_out * num_in // (num_out + num_in) // 4 // 64 * 64
    b, a = torch.randn(num_out, rank) * rank**-0.5, torch.randn(rank, num_in) * num_in**-0.5
    return Factors(b.to("cuda", torch.bfloat16), a.to("cuda", torch.bfloat16))


KINDS: dict[str, Callable[[int, int], Any]] = {
    "LLM.int8()": int8, "int8, weight only": partial(int8, threshold=None), "GOBO": gobo, "ternary": ternary,
    "a quarter by rank": low_rank,
}  # fmt: skip


def check_matrix(name: str, kind: str) -> None:
    torch.manual_seed(0)
    num_out, num_in = SHAPES[name]
    part = KINDS[kind](num_out, num_in)
    values = (part.product() if isinstance(part, Factors) else part.dequantize()).to("cuda")
    weight = CudaQuantized().join([part], None)
    plain = CudaWeight(values.bfloat16(), None, False)
    x = torch.randn(2048, num_in, device="cuda")
    x[:, 77] *= 20
    x[5::7, 1000:1010] *= 15
    x = x.bfloat16()
    exact = x[:700].float() @ values.t()
    whole = weight(x[:700].clone())
    off = float((whole.float() - exact).norm() / exact.norm())
    wrong = [num for num in (1, 5, 16, 17, 33, 64, 100, 256, 513) if not torch.equal(weight(x[:num].clone()), whole[:num])]
    mark = "   <<< WRONG" if wrong or not off < 0.02 else ""
    print(f"{kind} {name}: {type(weight).__name__}, error {off:.5f}; other bits at rows {wrong or 'none'}{mark}", flush=True)
    for rows in ROWS:
        given = x[:rows].clone()
        took, other = (time_us([partial(one, given)] * 4, 5) for one in (weight, plain))
        print(f"    M={rows}: {took:.1f} us, bfloat16 {other:.1f} ({other / took:.2f}x)", flush=True)


def _as_int8(module: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    largest = values.abs().amax(1)
    return {f"{module}.weight": (values / largest[:, None] * 127).round().to(torch.int8), f"{module}.SCB": largest}


def _as_gobo(module: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    from tidemill.compress.layouts.base import pack

    table = torch.quantile(values.flatten()[:: max(1, values.numel() // 10**5)], torch.linspace(0.03, 0.97, 16))
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


LAYOUTS: dict[str, tuple[Callable[[str, torch.Tensor], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "LLM.int8()": (_as_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 2.0}),
    "GOBO": (_as_gobo, {"quant_method": "gobo", "bits": 4}),
    "low rank": (_as_factors, {"quant_method": "low_rank"}),
}


def check_engine(layout: str) -> None:
    """Alone as among others; and mostly the tokens of the CPU, which rounds differently."""
    convert, settings = LAYOUTS[layout]
    folder = Path(tempfile.mkdtemp())
    random_llama(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        is_matrix = name.endswith("_proj.weight")
        tensors |= convert(name.removesuffix(".weight"), values.float()) if is_matrix else {name: values}
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
    core = load_core(EngineOptions(model=str(folder), device="cuda", kv_memory_bytes=2**28, max_requests=64))
    seen = ask(core, requests)
    same = all(ask(core, {name: requests[name]})[name] == seen[name] for name in ("r0", "r4", "r9"))
    kinds = sorted({type(one.weight).__name__ for one in core.runner.model.modules() if isinstance(one, Linear)})  # type: ignore[attr-defined]
    other = ask(load_core(EngineOptions(model=str(folder), device="cpu", kv_memory_bytes=2**26, max_requests=64)), requests)
    equal = sum(a == b for name in requests for a, b in zip(seen[name][0], other[name][0], strict=True))
    total = sum(len(seen[name][0]) for name in requests)
    mark = "" if same else "   <<< WRONG"
    print(
        f"engine {layout}: weights {kinds}; alone as among others: {same}; {equal} of {total} tokens as a CPU's{mark}", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="matrices,engine")
    wanted = parser.parse_args().only.split(",")
    jobs = [partial(check_matrix, name, kind) for name in SHAPES for kind in KINDS] if "matrices" in wanted else []
    jobs += [partial(check_engine, layout) for layout in LAYOUTS] if "engine" in wanted else []
    for job in jobs:
        try:
            job()
        except Exception:
            traceback.print_exc()
            print("   <<< WRONG", flush=True)


if __name__ == "__main__":
    main()
