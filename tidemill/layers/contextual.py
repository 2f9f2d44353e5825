"""Contextual sparsity (Deja Vu): predictors say for each token which neurons and heads of a layer
are computed."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from torch import nn

from tidemill.errors import ConfigError
from tidemill.layers.attention import Attention
from tidemill.layers.mlp import GatedMLP
from tidemill.quant.predicted import PredictedNeurons, scores_of
from tidemill.types.model_config import ModelConfig
from tidemill.weights.predictors import HEADS, NEURONS, read_predictors

M = TypeVar("M", bound=nn.Module)


class ContextualSparsity:
    """The contextual sparsity of one model. `attach` before its tensors are read, `finish` when all
    are."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        units = {NEURONS: config.intermediate_size, HEADS: config.num_kv_heads}
        self._predictors = read_predictors(folder, config.num_layers, config.hidden_size, units)
        self._neurons: list[tuple[GatedMLP, PredictedNeurons]] = []

    def attach(self, blocks: nn.ModuleList) -> None:
        for number, block in enumerate(blocks):
            if NEURONS in self._predictors:
                module = _only(block, GatedMLP, "a plain gated feed-forward")
                made = PredictedNeurons(
                    module.gate_up.method, module.down.method, self._predictors[NEURONS][number]
                )
                module.gate_up.method, module.down.method = made.gate_up, made.down
                self._neurons.append((module, made))
            if HEADS in self._predictors:
                _only(block, Attention, "plain attention").head_scores = scores_of(
                    self._predictors[HEADS][number]
                )

    def finish(self) -> None:
        for module, made in self._neurons:
            module.neurons = made.weights()


def _only(block: nn.Module, kind: type[M], what: str) -> M:
    found = [module for module in block.modules() if type(module) is kind]
    if len(found) != 1:
        raise ConfigError(
            f"contextual_sparsity needs layers with {what}.", fix="Leave --contextual-sparsity out."
        )
    return found[0]
