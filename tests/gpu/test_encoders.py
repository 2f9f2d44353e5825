"""Encoders on the GPU at hand: near Transformers in float32, equal bits alone and among others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.gpu_encoders import _COMMON, MODELS, _text, ask, make_texts
from tests.encoders import make_encoder, reference_embedding
from tests.gpu.engines import nothing_compiles
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.runner.cuda_encoder import CudaEncoder

_COSINE, _SCORE = 0.999, 0.02  # at least; at most


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_embeddings_and_scores(name: str, tmp_path: Path) -> None:
    kind, shape = MODELS[name]
    with torch.inference_mode(False):
        reference = make_encoder(tmp_path, kind, **_COMMON | shape)
    core = load_core(EngineOptions(model=str(tmp_path), device="cuda"))
    how = core.model_config.own_pooling or "mean"
    lens = (1, 2, 5, 31, 63, 64, 65, 127, 128, 129, 300, 512)
    texts = [_text(length, i) for i, length in enumerate(lens)]
    pair_start = 1 if how == "score" else 0
    with nothing_compiles():
        together = ask(core, texts, how, pair_start)
        for i in range(len(texts)):
            assert ask(core, [texts[i]], how, pair_start) == [together[i]], (
                f"{name}: {lens[i]} tokens alone"
            )
        others = make_texts(300, 7)
        assert ask(core, [*others, *texts], how, pair_start)[len(others) :] == together, (
            f"{name}: among 300 others"
        )
    assert isinstance(core.runner, CudaEncoder)
    if how == "score":
        types = [torch.tensor([[int(at >= 1) for at in range(len(ids))]]) for ids in texts]
        expected = [
            reference(torch.tensor([ids]), token_type_ids=kind).logits.sigmoid()
            for ids, kind in zip(texts, types, strict=True)
        ]
        worst = max(abs(one.item() - mine[0]) for one, mine in zip(expected, together, strict=True))
        assert worst <= _SCORE, f"{name}: a score is off by {worst}"
        return
    cosines = [
        float(reference_embedding(reference, ids, how) @ torch.tensor(mine).double())
        for ids, mine in zip(texts, together, strict=True)
    ]
    assert min(cosines) >= _COSINE, f"{name}: cosines {cosines}"
