"""Sentences a second of encoders on the GPU at hand.

    python -m bench.gpu_encoders [--json out.json] [--texts 8192] [--only bert]

Models have random weights in the shapes of published ones. A text is a list of random tokens, of 3
to 256, about 30 on average.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.encoders import make_encoder
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.runner.cuda_encoder import CudaEncoder
from tidemill.types.inputs import second_text
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

_VOCABULARY = 30000
_COSINE, _SCORE = 0.999, 0.02  # at least; at most
_COMMON = {"vocab_size": _VOCABULARY, "max_position_embeddings": 514, "initializer_range": 0.05}
_MINILM = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
}
_BASE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _MINILM),  # all-MiniLM-L6-v2
    "roberta": ("RobertaModel", _BASE),
    "mpnet": ("MPNetModel", _BASE),  # all-mpnet-base-v2
    "bert, heads of 26": (
        "BertModel",
        {**_MINILM, "hidden_size": 312, "intermediate_size": 1200, "num_hidden_layers": 4},
    ),
    "cross-encoder": (
        "BertForSequenceClassification",
        {**_MINILM, "num_labels": 1, "type_vocab_size": 2},
    ),
}


def make_texts(num: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    lens = [max(3, min(int(draw.lognormvariate(3.2, 0.6)), 256)) for _ in range(num)]
    return [[draw.randrange(4, _VOCABULARY) for _ in range(length)] for length in lens]


def ask(
    core: EngineCore, texts: list[list[int]], how: str, pair_start: int = 0
) -> list[list[float]]:
    params = SamplingParams(max_tokens=1, temperature=0.0, pooling=how)
    made: dict[str, list[float]] = {}
    waiting = [(str(i), ids) for i, ids in enumerate(texts)]
    waiting.reverse()
    while waiting or core.has_work:
        while waiting and len(core.scheduler.waiting) < 1024:
            name, ids = waiting.pop()
            core.submit(Submit(name, ids, params, segments=second_text(pair_start, len(ids))))
        output, failed = core.step()
        assert not failed, failed[0]
        made |= {
            delta.request_id: delta.embedding
            for delta in output.deltas
            if delta.embedding is not None
        }
    return [made[str(i)] for i in range(len(texts))]


def _text(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4, _VOCABULARY) for _ in range(length)]


def step_ms(core: EngineCore, how: str) -> tuple[int, float]:
    """Of the largest graph: its tokens, and the time of a replay on the device, of texts of one
    length."""
    runner = core.runner
    assert isinstance(runner, CudaEncoder)
    graph, num = runner.graphs[max(runner.graphs)], core.config.max_requests
    ask(core, [_text(graph.size // num, i) for i in range(num)], how)  # its words stay
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return graph.size, begin.elapsed_time(end) / 20


def measure(core: EngineCore, texts: list[list[int]], how: str, rounds: int = 3) -> float:
    """Sentences a second, the median."""
    ask(core, texts[:512], how)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        ask(core, texts, how)
        times.append(time.perf_counter() - began)
    return len(texts) / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--only", default="", help="models whose names begin so")
    given = parser.parse_args()
    texts, results = make_texts(given.texts, 0), {}
    print(f"{len(texts)} texts, {np.mean([len(ids) for ids in texts]):.1f} tokens each")
    for name, (kind, shape) in MODELS.items():
        if not name.startswith(given.only):
            continue
        folder = Path(tempfile.mkdtemp())
        make_encoder(folder, kind, **_COMMON | shape)
        began = time.perf_counter()
        core = load_core(EngineOptions(model=str(folder), device="cuda"))
        start_s, how = time.perf_counter() - began, core.model_config.own_pooling or "mean"
        rate, (tokens, ms) = measure(core, texts, how), step_ms(core, how)
        results[name] = {"per_s": rate, "step_tokens": tokens, "step_ms": ms, "start_s": start_s}
        print(
            f"  {name}: {rate:,.0f} texts/s; "
            f"a graph of {tokens} tokens {ms:.2f} ms; start {start_s:.1f} s; {core.runner.fallback or 'our kernels'}"
        )
        del core
        torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
