"""The end of a decoder after its last norm: whether the head is the embeddings' table, and scores
of labels."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import torch

from tidemill.errors import CheckpointError
from tidemill.layers.linear import Linear
from tidemill.models.settings import optional
from tidemill.quant import WeightPlan
from tidemill.types.model_config import LabelHead, ModelConfig
from tidemill.weights.checkpoint import Checkpoint, WeightTensor

_VALUES_AT_ONCE = 2**24
_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}  # of scores, classes of torch.nn
_MAX_LABELS = 4096
_MAX_LABEL_CHARS = 256


def ties_head(
    checkpoint: Checkpoint, is_tied: bool, tables: Collection[str], heads: Collection[str]
) -> bool:
    """True if logits are those of the embeddings' table. A stored head with other values is used,
    whatever the configuration says (`is_tied`), as in Transformers. `tables`, `heads`: their
    stored names."""
    if not is_tied or not checkpoint.has_weights:
        return is_tied
    found = {tensor.name: tensor.shape for tensor in checkpoint.tensors()}
    head, table = (
        next((name for name in names if name in found), None) for names in (heads, tables)
    )
    if head is None or table is None:
        return True
    if found[head] != found[table]:
        return False
    digests = {
        tensor.name: _digest(tensor)
        for tensor in checkpoint.tensors()
        if tensor.name in (head, table)
    }
    return digests[head] == digests[table]


def _digest(tensor: WeightTensor) -> bytes:
    """By its values, whatever type they are stored in."""
    digest, (num_rows, width) = hashlib.blake2b(), tensor.shape
    step = max(_VALUES_AT_ONCE // width, 1)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        values = torch.empty((last - first, width), dtype=torch.float32, device="cpu")
        tensor.rows(first, last).read_into(values)
        digest.update(values.numpy().data)
    return digest.digest()


class Labels(Linear):
    """Scores of labels, from a hidden state."""

    def __init__(self, config: ModelConfig, weights: WeightPlan, *, bias: bool = False) -> None:
        assert config.labels is not None
        super().__init__(
            config.hidden_size, {"labels": config.labels.num}, bias=bias, weights=weights.of_tables
        )
        self._activation = config.labels.activation

    def scores(self, x_SH: torch.Tensor) -> torch.Tensor:
        """[S, labels] in float64."""
        scores = self.weight.logits(x_SH).double()
        return scores.sigmoid() if self._activation == "sigmoid" else scores

    @staticmethod
    def read(checkpoint: Checkpoint) -> LabelHead | None:
        """The label head of a model for the classification of sequences; None: it is another."""
        if not checkpoint.architecture.endswith("ForSequenceClassification"):
            return None
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        labels = optional(data, "id2label", dict, None, source)
        num = optional(data, "num_labels", int, 2, source) if labels is None else len(labels)
        if not 1 <= num <= _MAX_LABELS:
            raise CheckpointError(
                f"{source}: the model has {num} labels; 1 to {_MAX_LABELS} are supported."
            )
        names = tuple(
            str((labels or {}).get(str(i), f"LABEL_{i}"))[:_MAX_LABEL_CHARS] for i in range(num)
        )
        return LabelHead(num=num, names=names, activation=_activation(data, num, source))


def _activation(data: dict[str, Any], num_labels: int, source: object) -> str:
    """The activation, read like sentence-transformers and vLLM read it: named in the configuration,
    else the logistic function of a single label, or of labels that do not exclude each other."""
    newer = optional(data, "sentence_transformers", dict, {}, source)
    named = newer.get("activation_fn") or data.get("sbert_ce_default_activation_function")
    if named is None:
        is_independent = num_labels == 1 or data.get("problem_type") == "multi_label_classification"
        return "sigmoid" if is_independent else "identity"
    kind = str(named).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise CheckpointError(
            f"{source}: scores with the activation {str(named)[:100]!r} are not supported."
        )
    return _ACTIVATIONS[kind]
