"""Random numbers that are a function of (seed, position, token): they survive any schedule, batch,
chunking and preemption.

SplitMix64 over a counter: two multiplications and three shifts a number, the same on every device.
"""

from __future__ import annotations

import torch

from tidemill.kernels import native
from tidemill.kernels.argmax import argmax_reference

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as signed 64-bit, which is what torch multiplies
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of signed 64-bit values."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)).mul_(_MIX1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX2)
    return x.bitwise_xor_(_shift(x, 31))


def noise_keys(seeds_S: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
    return _mix(seeds_S ^ _mix(positions_S + 1))


def exponential_noise(
    keys_S: torch.Tensor, vocab_size: int, ids_V: torch.Tensor | None = None
) -> torch.Tensor:
    """Exp(1) noise [S, V]. `ids_V`: of these tokens alone."""
    tokens = (
        (torch.arange(vocab_size, device=keys_S.device) if ids_V is None else ids_V) + 1
    ) * _GOLDEN
    bits = _shift(_mix(keys_S.unsqueeze(1) + tokens), 1)
    # 63 bits rounded to 24: fine-grained near 0, where the winners are
    uniform = bits.to(torch.float32).mul_(2.0**-63)
    # never 0, and never infinite where u rounds to 1
    return uniform.neg_().log1p_().neg_().clamp_(1e-30, 64.0)


def gumbel_argmax_reference(logits_SV: torch.Tensor, keys_S: torch.Tensor) -> torch.Tensor:
    return argmax_reference(logits_SV - exponential_noise(keys_S, logits_SV.shape[1]).log_())


def gumbel_argmax_among(
    logits_SD: torch.Tensor, ids_D: torch.Tensor, seeds_S: torch.Tensor, positions_S: torch.Tensor
) -> torch.Tensor:
    """The same draw among some tokens alone, with the noise that they have among all. As an index
    of them."""
    noise = exponential_noise(noise_keys(seeds_S, positions_S), len(ids_D), ids_D)
    return argmax_reference(logits_SD - noise.log_())


def gumbel_argmax(
    logits_SV: torch.Tensor, seeds_S: torch.Tensor, positions_S: torch.Tensor
) -> torch.Tensor:
    """A draw from softmax(logits): the highest of logit plus Gumbel noise, which is minus the
    logarithm of Exp(1) noise."""
    keys = noise_keys(seeds_S, positions_S)
    if native.lib and not logits_SV.is_cuda:
        return native.lib.gumbel_argmax(logits_SV, keys)
    return gumbel_argmax_reference(logits_SV, keys)
