"""Scales of a linear's input features, folded into what comes before it: a norm, or a linear
without a nonlinearity between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tidemill.compress.decoder import is_linear, matrix_of, set_matrix
from tidemill.compress.walk import LayerJob

_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
_OF_MLP = ("gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "c_fc")


@dataclass(slots=True)
class Fold:
    """`before` gives the inputs of `linears`. Where several heads of the inputs come from one of
    `before` (grouped-query attention), their scales must be alike: `shared` averages them."""

    before: nn.Module
    linears: list[str]
    rows: slice  # of `before`
    repeats: int = 1  # heads of the inputs for each of `before`
    head_dim: int = 0

    def shared(self, values_K: torch.Tensor) -> torch.Tensor:
        """The values of input features, alike for those that one row of `before` gives."""
        if self.repeats == 1:
            return values_K
        heads = values_K.view(-1, self.repeats, self.head_dim)
        return heads.mean(1, keepdim=True).expand_as(heads).reshape(-1)

    def apply(self, job: LayerJob, scales_K: torch.Tensor) -> dict[str, torch.Tensor]:
        """Columns times the scales, rows before divided by them. What was changed besides matrices,
        by stored name."""
        for name in self.linears:
            module = job.linears[name]
            set_matrix(module, matrix_of(module) * scales_K)
        own = scales_K
        if self.repeats > 1:
            own = scales_K.view(-1, self.repeats, self.head_dim)[:, 0].reshape(-1)
        name = job.decoder.name_of(self.before)
        weight = self.before.weight
        assert isinstance(weight, torch.Tensor)
        changed = {}
        if is_linear(self.before):
            matrix = matrix_of(self.before).clone()
            matrix[self.rows] /= own[:, None]
            set_matrix(self.before, matrix)
        else:
            offset = 1.0 if _adds_one(self.before) else 0.0
            weight.data.copy_((weight.data + offset) / own - offset)
            changed[f"{name}.weight"] = weight.data
        bias = getattr(self.before, "bias", None)
        if isinstance(bias, torch.Tensor):
            bias.data[self.rows] /= own
            changed[f"{name}.bias"] = bias.data
        return changed


def _adds_one(norm: nn.Module) -> bool:
    """Gemma's norms hold what is added to 1."""
    return "Gemma" in type(norm).__name__ and "RMSNorm" in type(norm).__name__


def folds(job: LayerJob) -> Iterator[Fold]:
    """The folds of a decoder layer, in the order of computation."""
    children = dict(job.layer.named_children())
    linears = {name.rpartition(".")[2]: name for name in job.linears}
    first = children.get("input_layernorm", children.get("ln_1"))
    second = children.get("pre_feedforward_layernorm") or (
        first and children.get("post_attention_layernorm", children.get("ln_2"))
    )
    attention = [linears[name] for name in _OF_ATTENTION if name in linears]
    mlp = [linears[name] for name in _OF_MLP if name in linears]
    if any("expert" in name for name in job.linears):
        mlp = []  # a router has the same inputs
    if first is not None and attention:
        yield Fold(first, attention, slice(None))
    if "v_proj" in linears and "o_proj" in linears and not _is_gated(job, linears):
        value, out = job.linears[linears["v_proj"]], job.linears[linears["o_proj"]]
        num_value, num_in = matrix_of(value).shape[0], matrix_of(out).shape[1]
        head_dim = num_in // job.decoder.model.config.num_attention_heads
        if num_in == num_value:
            yield Fold(value, [linears["o_proj"]], slice(None))
        elif num_in % num_value == 0:
            yield Fold(value, [linears["o_proj"]], slice(None), num_in // num_value, head_dim)
    if second is not None and mlp:
        yield Fold(second, mlp, slice(None))
    if "down_proj" in linears and mlp:
        for name in ("up_proj", "gate_up_proj"):
            if name in linears:
                width = matrix_of(job.linears[linears["down_proj"]]).shape[1]
                rows = slice(width, None) if name == "gate_up_proj" else slice(None)
                yield Fold(job.linears[linears[name]], [linears["down_proj"]], rows)


def _is_gated(job: LayerJob, linears: dict[str, str]) -> bool:
    """Something between the values and the output projection that is not attention."""
    return (
        matrix_of(job.linears[linears["q_proj"]]).shape[0]
        != matrix_of(job.linears[linears["o_proj"]]).shape[1]
    )
