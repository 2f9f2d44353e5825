"""Speculative decoding on the GPU at hand: the tokens are those without it, and what it saves.

    python -m bench.gpu_spec [--json out.json] [--model llama8b]

First a drafter that is right with a given probability (it knows the answers from a run without it) for 1, 64 and 256 requests;
then prompt lookup on prompts of 40 random tokens repeated 12 times, 256 tokens out, for 1, 8 and 64 requests. In turns with the
same requests without drafts; every answer is compared.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.gpu_workloads import MODELS
from tidemill import events
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.drafting import Drafting
from tidemill.engine.load import load_core
from tidemill.runner.spec import SLOPES, Ask, Drafter
from tidemill.runner.spec.ngram import NgramDrafter
from tidemill.sampling import SamplingParams
from tidemill.weights.checkpoint import RandomTensor
from tidemill.wire import Submit

# vLLM 0.25.1 on an H200, llama8b, n-gram with 4 drafts: output tokens a second.
VLLM = {1: 1000 / 1.53, 8: 3655.0, 64: 10327.0}

Answers = dict[tuple[int, ...], list[int]]


def _chance(seed: int, at: int) -> float:
    return ((seed * 1_000_003 + at) * 2_654_435_761 % 2**32) / 2**32


class Oracle:
    """Right with probability `chance`, each draft by itself."""

    name = "oracle"
    is_free = True

    def __init__(self, answers: Answers, chance: float) -> None:
        self._answers, self._chance = answers, chance

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        made: list[Sequence[int]] = []
        for ask in asks:
            known = self._answers[tuple(ask.tokens[: ask.num_prompt])]
            first = len(ask.tokens) - ask.num_prompt
            right = enumerate(known[first : first + ask.most], first)
            made.append([token if _chance(ask.tokens[0], at) < self._chance else token ^ 1 for at, token in right])
        return made

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        pass


def run(core: EngineCore, prompts: list[list[int]], num_out: int, **params: Any) -> tuple[float, Answers, int, int, int]:
    """Seconds of decoding (from when the last prompt is done), answers, steps, drafts, drafts that were right."""
    core.scheduler.kv.clear_prefixes()
    made: Answers = {tuple(prompt): [] for prompt in prompts}
    for i, prompt in enumerate(prompts):
        core.submit(Submit(str(i), prompt, SamplingParams(max_tokens=num_out, ignore_eos=True, **params)))
    torch.cuda.synchronize()
    begin, num_steps, num_drafts, num_right = 0.0, 0, 0, 0
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        for delta in output.deltas:
            made[tuple(prompts[int(delta.request_id)])] += delta.token_ids
        if not begin and all(made.values()):
            begin, num_before = time.perf_counter(), sum(map(len, made.values()))
        for event in output.events:
            num_steps += isinstance(event, events.StepDone)
            if isinstance(event, events.DraftsVerified):
                num_drafts += sum(num for _, num, _ in event.of)
                num_right += sum(num for _, _, num in event.of)
    seconds = time.perf_counter() - begin
    return seconds * num_out * len(prompts) / (num_out * len(prompts) - num_before), made, num_steps, num_drafts, num_right


def compare(
    core: EngineCore, prompts: list[list[int]], num_out: int, drafter: Any, most: int, adaptive: bool, turns: int
) -> dict[str, Any]:
    """Without drafts and with, in turns."""
    times: dict[bool, list[float]] = {False: [], True: []}
    expected: Answers = {}
    line: dict[str, Any] = {}
    for _ in range(turns):
        core.drafting = None
        seconds, expected, _, _, _ = run(core, prompts, num_out, temperature=0.0)
        times[False].append(seconds)
        chosen: Drafter = drafter(expected)
        core.drafting = Drafting([chosen], most, SLOPES["cuda"], core._clock, core._events, adaptive)
        seconds, made, num_steps, num_drafts, num_right = run(core, prompts, num_out, temperature=0.0)
        assert made == expected, "drafts changed a token"
        times[True].append(seconds)
        line = {"steps": num_steps, "drafts": num_drafts, "right": num_right}
    core.drafting = None
    without, with_them, num = min(times[False]), min(times[True]), num_out * len(prompts)
    return line | {"without_tok_s": num / without, "with_tok_s": num / with_them, "gain": without / with_them}


def check_sampled(core: EngineCore) -> None:
    """Seeded, with penalties and logprobs."""
    draw = random.Random(1)
    prompts = [[draw.randrange(10, 1000) for _ in range(40)] * 3 for _ in range(6)]
    for params in (
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ):
        core.drafting = None
        _, expected, *_ = run(core, prompts, 64, **params)
        for chance in (0.0, 0.7):
            core.drafting = Drafting([Oracle(expected, chance)], 5, SLOPES["cuda"], core._clock, core._events, adaptive=False)
            _, made, _, num_drafts, num_right = run(core, prompts, 64, **params)
            assert made == expected, params
            assert num_drafts
            print(f"{params}: {num_right} of {num_drafts} drafts right, same tokens", flush=True)
    core.drafting = None


def check_draft_model() -> None:
    """A model drafts for another with other random weights: hardly a draft is right, and the tokens are those without drafts."""
    folder = Path(tempfile.mkdtemp())
    small = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    (folder / "config.json").write_text(json.dumps(MODELS["llama8b"] | small | {"num_key_value_heads": 2, "head_dim": 128}))
    options = {"load_format": "dummy", "max_context": 2048, "max_requests": 16, "kv_memory_bytes": 2**30}
    core = load_core(EngineOptions(model=str(folder), draft_model=str(folder), max_drafts=4, adaptive_drafts=False, **options))
    drafting, draw = core.drafting, random.Random(2)
    prompts = [[draw.randrange(10, 1000) for _ in range(20 + 150 * i)] for i in range(6)]
    for params in (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.2},
    ):
        core.drafting = None
        _, expected, *_ = run(core, prompts, 64, **params)
        core.drafting = drafting
        _, made, num_steps, num_drafts, num_right = run(core, prompts, 64, **params)
        assert made == expected, params
        assert num_drafts > 0
        print(f"draft model, {params}: {num_right} of {num_drafts} drafts right in {num_steps} steps, same tokens", flush=True)


def time_oracles(core: EngineCore, draw: random.Random, turns: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    prompts = [[draw.randrange(10, 120_000) for _ in range(128)] for _ in range(256)]
    for num, chances in ((1, (0.8, 0.3)), (8, (0.8,)), (64, (0.8, 0.6, 0.3)), (256, (0.8, 0.0))):
        for chance in chances:
            line = compare(core, prompts[:num], 512, lambda answers, a=chance: Oracle(answers, a), 4, True, turns)
            lines.append(line | {"drafter": f"right with {chance}", "adaptive": True, "requests": num})
            print(json.dumps(lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--model", default="llama8b", choices=MODELS)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--weights", default="normal", choices=("normal", "vllm"), help="vllm: as its dummy weights are")
    parser.add_argument("--only-ngram", action="store_true")
    given = parser.parse_args()
    if given.weights == "vllm":
        RandomTensor.read_into = lambda _, out: out.uniform_(-1e-3, 1e-3)  # type: ignore[method-assign,assignment,misc]
    if not given.only_ngram:
        check_draft_model()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[given.model]))
    begin = time.perf_counter()
    core = load_core(EngineOptions(model=str(folder), load_format="dummy", max_context=8192, max_waiting=10**6))
    print(f"{given.model}: ready in {time.perf_counter() - begin:.1f} s; {core.config.max_draws} draws a step", flush=True)
    draw, lines = random.Random(0), []
    if not given.only_ngram:
        check_sampled(core)
        lines += time_oracles(core, draw, given.turns)
    prompts = [[draw.randrange(10, 120_000) for _ in range(40)] * 12 for _ in range(64)]
    for num in (1, 8, 64):
        for adaptive in (True, False):
            line = compare(core, prompts[:num], 256, lambda _: NgramDrafter(), 4 if not adaptive else 8, adaptive, given.turns)
            line |= {"drafter": "ngram", "adaptive": adaptive, "requests": num, "of_vllm": line["with_tok_s"] / VLLM[num]}
            lines.append(line)
            print(json.dumps(lines[-1]), flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
