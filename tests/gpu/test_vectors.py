"""Rows of embeddings in the place of tokens: what Transformers computes, with the same bits alone,
among others, in chunks and from the prefix cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu.engines import random_llama
from tests.helpers import greedy, run
from tests.vectors import with_vectors
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.models.registry import ARCHITECTURES
from tidemill.types.inputs import EMBEDDINGS

PLACES = [(20, 100), (150, 7), (300, 250)]


def request(seed, num=600):
    draw = np.random.default_rng(seed)
    prompt = draw.integers(2, 2000, num).tolist()
    made = with_vectors(prompt, PLACES, 512, EMBEDDINGS, seed, scale=0.05)
    return made[0], greedy(12, logprobs=2), *made[1:]


def test_vectors(tmp_path, monkeypatch):
    reference = random_llama(tmp_path)
    monkeypatch.setitem(ARCHITECTURES, ("hf", "LlamaForCausalLM"), "tests.vectors:VectorLlama")

    def core(**options):
        return load_core(EngineOptions(model=str(tmp_path), device="cuda", **options))

    alone = run(core(), {"x": request(0)})["x"]
    crowded = core(token_budget=512, max_requests=16)
    assert (
        run(crowded, {f"o{i}": request(i) for i in range(1, 9)} | {"x": request(0)})["x"] == alone
    )
    assert run(crowded, {"x": request(0)})["x"] == alone  # from the prefix cache
    prompt, _, segments, contents = request(0)
    embedded = reference.model.embed_tokens(torch.tensor([prompt], device="cuda")).detach().clone()
    for each in segments:
        rows = np.frombuffer(contents[each.key], np.float32).reshape(each.length, -1).copy()
        embedded[0, each.start : each.end] = torch.tensor(rows, device="cuda")
    with torch.inference_mode():
        logprobs = reference(inputs_embeds=embedded).logits[0, -1].log_softmax(0)
    first = alone.logprobs[0]
    assert logprobs[first.token_id].item() == pytest.approx(first.logprob, abs=0.1)
