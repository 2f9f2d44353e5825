"""Sentences per second of an embedding model beside sentence-transformers, in turns, and the cosine
of both's vectors.

python -m bench.encoders MODEL [--texts 512] [--rounds 5] [--threads 2]     (pip install sentence-transformers)
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tidemill import LLM
from tidemill.types.model_config import ModelConfig


def make_texts(num: int, seed: int = 0) -> list[str]:
    """Pieces of our own documentation, from 3 to 150 words, most of them a sentence."""
    words = " ".join(
        path.read_text() for path in sorted(Path(__file__).parent.parent.glob("docs/*.md"))
    ).split()
    chosen = random.Random(seed)
    made = []
    for _ in range(num):
        length = max(3, min(int(chosen.lognormvariate(2.9, 0.6)), 150))
        start = chosen.randrange(len(words) - length)
        made.append(" ".join(words[start : start + length]))
    return made


def flops_per_token(model: ModelConfig) -> int:
    """Of the matmuls with weights."""
    return (
        2
        * model.num_layers
        * (4 * model.hidden_size**2 + 2 * model.hidden_size * model.intermediate_size)
    )


def matmul_rate(threads: int, clock: Callable[[], float]) -> float:
    """Floating-point operations a second of torch's float32 matmul, the best of ten: what the floor
    is computed from."""
    torch.set_num_threads(threads)
    a, b = torch.randn(1024, 1536), torch.randn(1536, 1536)
    return 2 * 1024 * 1536 * 1536 / min(timed(lambda: a @ b, clock) for _ in range(10))


def timed(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="for a busy machine: CPU time instead, with one thread",
    )
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    if given.cpu_time:
        given.threads = 1
    from sentence_transformers import SentenceTransformer

    texts = make_texts(given.texts)
    theirs, ours = (
        SentenceTransformer(given.model, device="cpu"),
        LLM(given.model, threads=given.threads, progress=False),
    )
    torch.set_num_threads(given.threads)

    def embed() -> list[Any]:
        return ours.embed(texts, truncate_prompt_tokens=-1)

    def encode() -> torch.Tensor:
        return theirs.encode(texts, convert_to_tensor=True)

    made = embed()
    vectors, num_tokens = (
        torch.tensor([one.embedding for one in made]),
        sum(len(one.prompt_token_ids) for one in made),
    )
    print(
        f"cosine: at least {torch.nn.functional.cosine_similarity(vectors, encode(), dim=1).min():.7f}"
    )
    print(f"{len(texts)} texts, {num_tokens / len(texts):.1f} tokens each, {given.threads} threads")
    times = [(timed(embed, clock), timed(encode, clock)) for _ in range(given.rounds)]
    for name, column in zip(
        ("tidemill", "sentence-transformers"), zip(*times, strict=True), strict=True
    ):
        best, middle = min(column), statistics.median(column)
        print(
            f"{name}: {len(texts) / middle:.1f} sentences/s (median), {len(texts) / best:.1f} (best)"
        )
    ratios = sorted(slow / fast for fast, slow in times)
    print(
        f"ratio: {statistics.median(ratios):.2f} (median of {given.rounds} pairs; {ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    rate = matmul_rate(given.threads, clock)
    floor = num_tokens * flops_per_token(ours.model_config) / rate
    print(
        f"floor: {floor:.2f} s = matmuls at torch's {rate / 1e9:.0f} GFLOP/s; tidemill's best {min(t for t, _ in times):.2f} s"
    )


if __name__ == "__main__":
    main()
