"""The distance of a compressed model from its original on a text: dequantized weights in float32,
walked layer by layer, activations rounded as they are when the model is served."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tidemill.compress.decoder import Decoder
from tidemill.compress.methods.base import activations_of
from tidemill.compress.stored import Stored, from_state
from tidemill.compress.walk import LayerJob
from tidemill.compress.work import Work

_ROWS = 256  # whose logits are there at a time


@dataclass(slots=True)
class Quality:
    """Sums over tokens."""

    count: int = 0
    nll: float = 0.0
    kl: float = 0.0  # from the original
    same: int = 0  # tokens at which both find the same one likeliest

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll / self.count, 700.0))

    @property
    def mean_kl(self) -> float:
        return self.kl / self.count

    @property
    def top1(self) -> float:
        return self.same / self.count


# compressed matrices, and other tensors that were changed
Layer = tuple[dict[str, Stored], dict[str, torch.Tensor]]


def layer_of(work: Work) -> Callable[[int], Layer]:
    return lambda number: from_state(work.tensors(number))


def filled(decoder: Decoder, number: int, layer: Layer) -> dict[str, torch.Tensor]:
    """Stored tensors of a layer in float32."""
    stored, changed = layer
    tensors = dict(changed)
    for name, module in decoder.linears(number).items():
        if name in stored:
            matrix = stored[name].dequantize()
            tensors[f"{name}.weight"] = (
                matrix if isinstance(module, torch.nn.Linear) else matrix.t().contiguous()
            )
    return tensors


@torch.no_grad()
def hidden_states(
    decoder: Decoder,
    ids_BL: torch.Tensor,
    layer_at: Callable[[int], Layer] | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> torch.Tensor:
    """After the last layer, [sequences, length, H]. Without `layer_at`: the original's."""
    states = torch.cat([decoder.embed(ids_BL[i : i + 1]).cpu() for i in range(ids_BL.shape[0])])
    for number in range(decoder.num_layers):
        layer = layer_at(number) if layer_at is not None else ({}, {})
        with decoder.layer(number, filled(decoder, number, layer)) as module:
            act = {
                name: own
                for name, weight in layer[0].items()
                if (own := activations_of(weight)) is not None
            }
            job = LayerJob(decoder, number, module, states, act=act)
            job.outputs(states)
        tick(number + 1)
    return states


@torch.no_grad()
def compare(
    decoder: Decoder,
    ids_BL: torch.Tensor,
    own: torch.Tensor,
    original: torch.Tensor | None = None,
    head: Decoder | None = None,
) -> Quality:
    """Every token but the first of a sequence counts, given those before it. `own`, `original`:
    hidden states after the last layer. `head`: the original's decoder, if what comes after the
    layers was changed, too."""
    quality, head = Quality(), head or decoder
    for ids, hidden, true in zip(ids_BL, own, own if original is None else original, strict=True):
        for first in range(0, len(ids) - 1, _ROWS):
            rows = slice(first, min(first + _ROWS, len(ids) - 1))
            logprobs = decoder.logits(hidden[None, rows])[0].float().log_softmax(-1)
            targets = ids[rows.start + 1 : rows.stop + 1].to(logprobs.device)
            quality.nll -= float(logprobs.gather(1, targets[:, None]).double().sum())
            quality.count += len(targets)
            if original is not None:
                truth = head.logits(true[None, rows])[0].float().log_softmax(-1)
                quality.kl += float((truth.exp() * (truth - logprobs)).double().sum())
                quality.same += int((truth.argmax(-1) == logprobs.argmax(-1)).sum())
    return quality
