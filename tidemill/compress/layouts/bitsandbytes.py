"""The layout of bitsandbytes: NF4 with its table and scales, and rows of bytes for LLM.int8()."""

from __future__ import annotations

import json
from typing import Any

import torch

from tidemill.compress.layouts.base import Layout
from tidemill.compress.stored import IntWeight, Stored, TableWeight


class BitsAndBytes(Layout):
    name = "bitsandbytes"

    def __init__(self) -> None:
        self._config: dict[str, Any] = {}

    def tensors(self, name: str, stored: Stored) -> dict[str, torch.Tensor]:
        if isinstance(stored, TableWeight):
            return self._four_bits(name, stored)
        weight = self.integers(name, stored)
        if (
            weight.bits != 8
            or weight.zeros_NG is not None
            or weight.scales_NG.shape[1] > 1
            or weight.act_scale is not None
        ):
            raise self.refuse(
                name, "it is neither NF4 nor 8 bits per channel", "Choose --method llm-int8 or nf4."
            )
        self._config = {
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_threshold": weight.threshold or 0.0,
        }
        return _bytes(name, weight)

    def _four_bits(self, name: str, stored: TableWeight) -> dict[str, torch.Tensor]:
        codes = stored.codes_NK.reshape(-1)
        if codes.numel() % 2:
            codes = torch.cat([codes, codes.new_zeros(1)])
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": stored.block,
            "dtype": "float16",
            "shape": list(stored.codes_NK.shape),
        }
        tensors = {
            "weight": (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1),
            "weight.quant_map": stored.table,
            "weight.absmax": stored.nested_codes if stored.largest is None else stored.largest,
        }
        is_double = stored.nested_codes is not None
        if is_double:
            tensors |= {
                "weight.nested_absmax": stored.nested_largest,
                "weight.nested_quant_map": stored.nested_table,
            }
            state |= {
                "nested_blocksize": stored.nested_block,
                "nested_dtype": "float32",
                "nested_offset": stored.nested_offset,
            }
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        self._config = {
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": is_double,
            "bnb_4bit_compute_dtype": "float16",
            "bnb_4bit_quant_storage": "uint8",
        }
        return {f"{name}.{part}": value for part, value in tensors.items() if value is not None}

    def config(self) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "llm_int8_skip_modules": ["lm_head"],
            **self._config,
        }


def _bytes(name: str, stored: IntWeight) -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight": stored.codes_NK.to(torch.int8),
        f"{name}.SCB": (stored.scales_NG[:, 0] * 127).to(torch.float32),
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),  # row by row
    }
