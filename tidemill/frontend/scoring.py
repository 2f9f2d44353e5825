"""Scores of pairs of texts: which pairs are meant, and the cosine of embeddings where the model has
no scores of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from tidemill.errors import InvalidRequest
from tidemill.types.model_config import ModelConfig

MAX_PAIRS = 2048


def pairs_of(
    first: Sequence[str], second: Sequence[str], names: tuple[str, str], most: int = MAX_PAIRS
) -> list[tuple[int, int]]:
    """Indices: one text with each of many, or the texts of two lists of the same length."""
    for texts, name in ((first, names[0]), (second, names[1])):
        if not texts:
            raise InvalidRequest(f"{name} is empty.", fix="Give at least one text.", param=name)
    if len(first) != 1 and len(first) != len(second):
        raise InvalidRequest(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}.",
            fix="Give one text and a list, or two lists of the same length.",
            param=names[1],
        )
    if len(second) > most:
        raise InvalidRequest(
            f"{len(second)} pairs; at most {most}.",
            fix="Send them in several requests.",
            param=names[1],
        )
    return [(0 if len(first) == 1 else i, i) for i in range(len(second))]


def check_scores(model: ModelConfig) -> bool:
    """Tells if the model is a cross-encoder. One with several labels has no single score."""
    if model.labels is None:
        return False
    if model.labels.num != 1:
        what = f"This model is a classifier of {model.labels.num} labels: it has no single score of a pair."
        raise InvalidRequest(
            what, fix="Serve a cross-encoder with one label, or an embedding model.", param="model"
        )
    return True


def without_activation(score: float, model: ModelConfig) -> float:
    """The score before the activation of a cross-encoder, in float64."""
    if model.labels is None or model.labels.activation != "sigmoid":
        return score
    score = min(max(score, 1e-300), 1 - 2**-53)  # where the logistic function is 0 or 1
    return math.log(score) - math.log1p(-score)


def label_probs(scores: Sequence[float], model: ModelConfig) -> list[float]:
    """Probabilities of a classifier's labels: of several that exclude each other, the softmax of
    their scores."""
    if len(scores) == 1 or (model.labels is not None and model.labels.activation == "sigmoid"):
        return list(scores)
    highest = max(scores)
    powers = [math.exp(score - highest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    return _dot(first, second) / max(math.sqrt(_dot(first, first) * _dot(second, second)), 1e-12)


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(map(mul, first, second))
