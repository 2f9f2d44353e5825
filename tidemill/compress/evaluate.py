"""Evaluation of a model as it is served: perplexity, distance to the original, speed, small tasks."""

from __future__ import annotations

import hashlib
import math
import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tidemill.compress.draft.text import read_text
from tidemill.compress.evaluate_tasks import Score, Suite
from tidemill.compress.walk import Reporter
from tidemill.engine.llm import LLM
from tidemill.errors import ConfigError, ModelFailed
from tidemill.models.base import CausalLM
from tidemill.types.sampling import SamplingParams
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.locate import locate

WINDOW = 512  # tokens that are scored together
_LEAST_TOKENS = 64
_SPEED_TOKENS = 32  # generated to measure the speed
_ROWS = 64  # logits whose distance is computed at a time
Tick = Callable[[int], None]  # tokens done


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of a model on a text. Distances are to the original, None without one."""

    num_tokens: int
    perplexity: float
    kl: float | None = None  # mean of KL(original || model) over tokens, in nats
    top1: float | None = None  # the share of tokens at which both find the same token likeliest


@dataclass(frozen=True, slots=True)
class Evaluation:
    model: str
    num_bytes: int  # of the checkpoint
    kv_bytes_per_token: int
    tokens_per_s: float  # of one request that decodes
    quality: Quality | None
    scores: dict[str, Score] = field(default_factory=dict)  # of tasks, by name
    text_sha256: str | None = None  # of the text of which the quality is

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def default_text() -> str:
    """Python's documentation as its standard library has it."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def text_sha256(text: Path | None) -> str:
    """Perplexities of different texts cannot be compared, and the documentation differs between
    versions of Python."""
    return hashlib.sha256(
        default_text().encode() if text is None else text.read_bytes()
    ).hexdigest()


def text_windows(llm: LLM, text: Path | None, num_tokens: int, skip: int = 0) -> list[list[int]]:
    """Pieces of a text of at most WINDOW tokens, `num_tokens` in all. `skip`: tokens at its begin
    that are not used."""
    size = min(WINDOW, llm.config.max_context - 1)
    if text is not None:
        pieces = [example.ids for example in read_text(llm, text, num_tokens + skip, size)]
        ids = [token for piece in pieces for token in piece] if skip else []
    else:
        ids = llm.tokenizer.encode(default_text())
        pieces = []
    if ids:
        ids = ids[skip : skip + num_tokens]
        pieces = [ids[first : first + size] for first in range(0, len(ids), size)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    total = sum(map(len, pieces))
    if total < min(num_tokens, _LEAST_TOKENS):
        raise ConfigError(
            f"The text has {total} tokens; at least {_LEAST_TOKENS} are needed.",
            fix="Give more.",
            param="text",
        )
    return pieces


def measure_quality(
    llm: LLM,
    original: LLM | None,
    windows: list[list[int]],
    tick: Tick,
    of_original: Callable[[LLM, list[int]], torch.Tensor] | None = None,
) -> Quality:
    """Every token but the first of each window counts, given those before it. Logits are those that
    the engine computes. `of_original`: for a caller that keeps the original's."""
    if original is not None and original.model_config.vocab_size != llm.model_config.vocab_size:
        sizes = f"{llm.model_config.vocab_size} and {original.model_config.vocab_size}"
        raise ConfigError(
            f"The models' vocabularies differ: {sizes} tokens.",
            fix="Compare models of one tokenizer.",
        )
    nll = kl = same = 0.0
    count = done = 0
    for ids in windows:
        logits = prompt_logits(llm, ids)
        other = None if original is None else (of_original or prompt_logits)(original, ids)
        targets = torch.tensor(ids[1:], device=logits.device)
        for rows in torch.arange(len(targets), device=logits.device).split(_ROWS):
            logprobs = logits[rows].float().log_softmax(-1)
            nll -= logprobs.gather(1, targets[rows].unsqueeze(1)).double().sum().item()
            if other is not None:
                true = other[rows].float().log_softmax(-1)
                kl += (true.exp() * (true - logprobs)).double().sum().item()
                same += (true.argmax(-1) == logprobs.argmax(-1)).sum().item()
        count, done = count + len(targets), done + len(ids)
        tick(done)
    if not math.isfinite(nll):
        raise ModelFailed("The model's logits are not finite.", fix="Is the checkpoint whole?")
    perplexity = math.exp(min(nll / count, 700.0))
    if original is None:
        return Quality(count, perplexity)
    return Quality(count, perplexity, max(kl / count, 0.0), same / count)


@torch.inference_mode()
def prompt_logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    """The engine's logits after each token of a prompt but the last, [T - 1, V]."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with _seen_logits(llm) as parts:
        (output,) = llm.generate([ids], params, progress=False)
        output.outputs  # noqa: B018 - raises what went wrong
    return torch.cat(parts)[: len(ids) - 1]  # after these, the sampled token's


@contextmanager
def _seen_logits(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """Meanwhile, all logits that are computed outside of recorded steps, in order."""
    model = llm.core.runner.model  # type: ignore[attr-defined]
    if not isinstance(model, CausalLM):
        raise ConfigError("Only models that generate text can be evaluated.")
    parts: list[torch.Tensor] = []
    compute = model.logits

    def seen(hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = compute(hidden_TH, out)
        parts.append(logits.clone())
        return logits

    model.logits = seen  # type: ignore[method-assign]
    try:
        yield parts
    finally:
        del model.logits


def measure_speeds(llms: list[LLM]) -> list[float]:
    """Tokens a second of one request that decodes; the models take turns, and the best of three
    counts."""
    best = [0.0] * len(llms)
    for _ in range(3):
        for i, llm in enumerate(llms):
            best[i] = max(best[i], _decode_speed(llm))
    return best


def _decode_speed(llm: LLM) -> float:
    request_id, output = llm.submit(
        [2, 3, 4, 5], SamplingParams(max_tokens=_SPEED_TOKENS, temperature=0.0, ignore_eos=True)
    )
    try:
        llm.step()
        begin = time.perf_counter()
        while not output.finished:
            llm.step()
        return (_SPEED_TOKENS - 1) / (time.perf_counter() - begin)
    finally:
        llm.abandon(request_id)


def evaluate(
    models: dict[str, LLM],
    windows: list[list[int]],
    suites: list[Suite],
    report: Reporter,
    text_hash: str | None = None,
) -> list[Evaluation]:
    """Evaluates one model, or an original and others. `text_hash`: the hash of the text that the
    windows are of."""
    evaluations = []
    original = next(iter(models.values()))
    speeds = measure_speeds(list(models.values()))
    for (model, llm), speed in zip(models.items(), speeds, strict=True):
        name, quality = Path(model).name, None
        if windows:
            report.stage(f"Text: {name}", sum(map(len, windows)))
            quality = measure_quality(
                llm, None if llm is original else original, windows, report.at
            )
        scores: dict[str, Score] = {}
        for suite in suites:
            report.stage(f"{suite.name}: {name}", suite.num_items)
            scores |= suite.run(llm, report.at)
        num_bytes = open_checkpoint(locate(model)).num_bytes
        kv_bytes = llm.model_config.kv_bytes_per_token(llm.config.kv_dtype)
        evaluations.append(
            Evaluation(model, num_bytes, kv_bytes, speed, quality, scores, text_hash)
        )
    return evaluations
