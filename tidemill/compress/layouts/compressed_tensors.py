"""compressed-tensors: what llm-compressor writes, and vLLM and Transformers read."""

from __future__ import annotations

from typing import Any

import torch

from tidemill.compress.layouts.base import Layout, pack, unsigned
from tidemill.compress.stored import Fp8Weight, IntWeight, Stored

_DYNAMIC = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


class CompressedTensors(Layout):
    """Codes packed into words; with 8 bits for activations, a byte each; or 8-bit floats."""

    name = "compressed-tensors"

    def __init__(self) -> None:
        # schemes, and the matrices of each
        self._groups: dict[str, tuple[dict[str, Any], list[str]]] = {}

    def tensors(self, name: str, stored: Stored) -> dict[str, torch.Tensor]:
        if isinstance(stored, Fp8Weight):
            tensors, scheme = self._floats(name, stored)
        else:
            tensors, scheme = self._integers(name, self.integers(name, stored))
        if (act := getattr(stored, "act_scale", None)) is not None:
            tensors["input_scale"] = torch.tensor([act], dtype=torch.float32)
        self._groups.setdefault(repr(scheme), (scheme, []))[1].append(name)
        return {f"{name}.{part}": value for part, value in tensors.items()}

    def check(self, name: str, stored: IntWeight) -> None:
        if stored.threshold is not None:
            raise self.refuse(
                name, "activations above a threshold stay floats", "Choose --format bitsandbytes."
            )
        if stored.groups_K is not None:
            raise self.refuse(
                name,
                "its groups are of columns in another order",
                "Choose --act-order static or --format gptq.",
            )
        width = stored.codes_NK.shape[1]
        if stored.group < width and width % stored.group:
            fix = f"Choose a --group that divides {width}, or --format gptq."
            raise self.refuse(
                name, f"its {width} columns are no whole groups of {stored.group}", fix
            )

    def _integers(
        self, name: str, stored: IntWeight
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        self.check(name, stored)
        num_out, width = stored.codes_NK.shape
        is_grouped = stored.group < width
        weights: dict[str, Any] = {
            "num_bits": stored.bits,
            "type": "int",
            "symmetric": stored.zeros_NG is None,
            "strategy": "group" if is_grouped else "channel",
            "group_size": stored.group if is_grouped else None,
            "dynamic": False,
        }
        scales = {"weight_scale": stored.scales_NG.to(torch.float16)}
        is_bytes = stored.bits == 8 and stored.act_per is not None and stored.zeros_NG is None
        scheme = {"weights": weights, "input_activations": _activations(stored, "int")}
        if is_bytes:
            return {"weight": stored.codes_NK.to(torch.int8), **scales}, scheme | {
                "format": "int-quantized"
            }
        codes, zeros = unsigned(stored)
        tensors = {
            "weight_packed": pack(codes, stored.bits),
            "weight_shape": torch.tensor([num_out, width]),
            **scales,
        }
        if stored.zeros_NG is not None:
            tensors["weight_zero_point"] = (
                pack(zeros.t().contiguous(), stored.bits).t().contiguous()
            )
        return tensors, scheme | {"format": "pack-quantized"}

    def _floats(
        self, name: str, stored: Fp8Weight
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        per = (
            "channel"
            if stored.block_rows == 1
            else "tensor"
            if stored.scales.numel() == 1
            else "block"
        )
        weights: dict[str, Any] = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": per,
            "dynamic": False,
        }
        if per == "block":
            weights["block_structure"] = [stored.block_rows, stored.block_columns]
        scales = stored.scales.reshape(1) if per == "tensor" else stored.scales
        scheme = {
            "weights": weights,
            "input_activations": _activations(stored, "float"),
            "format": "float-quantized",
        }
        return {"weight": stored.values_NK, "weight_scale": scales.to(torch.float32)}, scheme

    def config(self) -> dict[str, Any]:
        groups = list(self._groups.values())
        names = {scheme["format"] for scheme, _ in groups}
        made: dict[str, Any] = {}
        for number, (scheme, matrices) in enumerate(groups):
            targets = ["Linear"] if len(groups) == 1 else matrices
            made[f"group_{number}"] = {"targets": targets, "output_activations": None, **scheme}
        return {
            "quant_method": "compressed-tensors",
            "format": names.pop() if len(names) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": made,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


def _activations(stored: IntWeight | Fp8Weight, kind: str) -> dict[str, Any] | None:
    if stored.act_per is None:
        return None
    if stored.act_scale is not None:
        return {
            "num_bits": 8,
            "type": kind,
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
        }
    per = "token" if stored.act_per else "tensor"
    return _DYNAMIC | {"type": kind, "strategy": per}
