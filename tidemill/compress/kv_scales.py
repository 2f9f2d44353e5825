"""Scales of 8-bit keys and values, one of each layer's, as vLLM reads them: `self_attn.k_scale` and
`v_scale`."""

from __future__ import annotations

from typing import Any

import torch

from tidemill.compress.walk import LayerJob
from tidemill.errors import CalibrationError, ConfigError

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_LARGEST = 448.0  # of E4M3


class _Seen:
    """In the place of a cache: what attention would keep."""

    def __init__(self) -> None:
        self.keys = self.values = 0.0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys = max(self.keys, float(keys.abs().max()))
        self.values = max(self.values, float(values.abs().max()))
        return keys, values


@torch.no_grad()
def kv_scales(job: LayerJob) -> dict[str, torch.Tensor]:
    """The KV scales of the layer as it is now, on the calibration text: keys as they are rotated.
    By stored name."""
    seen = _Seen()
    attention = next((child for child in job.layer.children() if hasattr(child, "layer_idx")), None)
    if attention is None:
        raise ConfigError(
            "Keys and values of this model cannot be observed.",
            fix="Leave --kv-scales out.",
            param="kv-scales",
        )
    hook = attention.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"past_key_values": seen}), with_kwargs=True
    )
    try:
        for batch in job.batches():
            job.run(batch)
    finally:
        hook.remove()
    found = {"k_scale": seen.keys / _LARGEST, "v_scale": seen.values / _LARGEST}
    if not all(0 < scale < float("inf") for scale in found.values()):
        why = "are all 0, or not finite" if seen.keys or seen.values else "were not seen"
        raise CalibrationError(
            f"Keys and values of layer {job.number} {why}.",
            fix="Leave --kv-scales out.",
            param="kv-scales",
        )
    full = job.decoder.name_of(attention)
    return {
        f"{full}.{part}": torch.tensor([scale], dtype=torch.float32)
        for part, scale in found.items()
    }
