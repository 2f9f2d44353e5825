"""Speculative decoding on the GPU at hand: what it saves.

    python -m bench.gpu_spec [--json out.json] [--model llama8b] [--weights uniform] [--only-ngram]

First a drafter that is right with a given probability (it knows the answers from a run without it)
for 1, 64 and 256 requests; then prompt lookup on prompts of 40 random tokens repeated 12 times, 256
tokens out, for 1, 8 and 64 requests. In turns with the same requests without drafts; every answer
is compared. With `--weights uniform` the weights are those of vLLM's `load_format="dummy"`, so that
outputs repeat themselves as they do there, and its figures can be set beside ours.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu_workloads import MODELS
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.drafting import Drafting
from tidemill.runner.spec import SLOPES, Ask, Drafter
from tidemill.runner.spec.ngram import NgramDrafter
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.checkpoint import RandomTensor

# vLLM 0.25.1 on an H200, llama8b with dummy weights, n-gram with 4 drafts: output tokens a second,
# prompts included; and for one request, milliseconds from one token to the next.
VLLM, VLLM_MS = {1: 631.0, 8: 3655.0, 64: 10327.0}, {1: 1.53}

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
            made.append(
                [
                    token if _chance(ask.tokens[0], at) < self._chance else token ^ 1
                    for at, token in right
                ]
            )
        return made

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        pass


def uniform(_: RandomTensor, out: torch.Tensor) -> torch.Tensor:
    """A parameter as vLLM's dummy weights have it, norms included: from one seed, so that all of
    one shape are the same. The embedding and the head are, and a greedy answer soon goes to and fro
    between two tokens."""
    return out.uniform_(-1e-3, 1e-3, generator=torch.Generator(out.device).manual_seed(1234))


@dataclass(slots=True)
class Run:
    """`decoding_s`: from when the last prompt is done, scaled to all tokens. `whole_s`: from the
    first request on."""

    answers: Answers
    whole_s: float = 0.0
    decoding_s: float = 0.0
    num_steps: int = 0
    num_drafts: int = 0
    num_right: int = 0
    num_lost: int = 0  # tokens of steps that followed drafts which were wrong


def run(core: EngineCore, prompts: list[list[int]], num_out: int, **params: Any) -> Run:
    core.scheduler.kv.clear_prefixes()
    made = Run({tuple(prompt): [] for prompt in prompts})
    torch.cuda.synchronize()
    began, begin = time.perf_counter(), 0.0
    for i, prompt in enumerate(prompts):
        core.submit(
            Submit(str(i), prompt, SamplingParams(max_tokens=num_out, ignore_eos=True, **params))
        )
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        for delta in output.deltas:
            made.answers[tuple(prompts[int(delta.request_id)])] += delta.token_ids
        if not begin and all(made.answers.values()):
            begin, num_before = time.perf_counter(), sum(map(len, made.answers.values()))
        for event in output.events:
            made.num_steps += isinstance(event, events.StepDone)
            if isinstance(event, events.DraftsVerified):
                made.num_drafts += sum(num for _, num, _ in event.of)
                made.num_right += sum(num for _, _, num in event.of)
            if isinstance(event, events.StepLost):
                made.num_lost += event.num_tokens
    end, num = time.perf_counter(), num_out * len(prompts)
    made.whole_s, made.decoding_s = end - began, (end - begin) * num / (num - num_before)
    return made


def compare(
    core: EngineCore,
    prompts: list[list[int]],
    num_out: int,
    drafter: Any,
    most: int,
    adaptive: bool,
    turns: int,
) -> dict[str, Any]:
    """Without drafts and with, in turns. What is learned of steps' times in the first serves the
    next."""
    best: dict[bool, Run] = {}
    drafting: Drafting | None = None
    for _ in range(turns):
        core.use(*core.parts_but(Drafting))
        without = run(core, prompts, num_out, temperature=0.0)
        if drafting is None:
            chosen: Drafter = drafter(without.answers)
            drafting = Drafting([chosen], most, SLOPES["cuda"], adaptive)
        core.use(*core.parts_but(Drafting), drafting)
        drafted = run(core, prompts, num_out, temperature=0.0)
        assert drafted.answers == without.answers, "drafts changed a token"
        for is_drafted, one in ((False, without), (True, drafted)):
            best[is_drafted] = min(best.get(is_drafted, one), one, key=lambda made: made.decoding_s)
    core.use(*core.parts_but(Drafting))
    without, drafted, num = best[False], best[True], num_out * len(prompts)
    return {
        "steps": drafted.num_steps, "drafts": drafted.num_drafts, "right": drafted.num_right, "lost": drafted.num_lost,
        "without_tok_s": num / without.decoding_s, "with_tok_s": num / drafted.decoding_s,
        "gain": without.decoding_s / drafted.decoding_s, "whole_tok_s": num / drafted.whole_s,
        "ms_a_token": drafted.decoding_s / num_out * 1000,
    }  # fmt: skip


def time_oracles(core: EngineCore, draw: random.Random, turns: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    prompts = [[draw.randrange(10, 120_000) for _ in range(128)] for _ in range(256)]
    for num, chances in ((1, (0.8, 0.3)), (8, (0.8,)), (64, (0.8, 0.6, 0.3)), (256, (0.8, 0.0))):
        for chance in chances:
            line = compare(
                core,
                prompts[:num],
                512,
                lambda answers, a=chance: Oracle(answers, a),
                4,
                True,
                turns,
            )
            lines.append(
                line | {"drafter": f"right with {chance}", "adaptive": True, "requests": num}
            )
            print(json.dumps(lines[-1]), flush=True)
    return lines


def time_ngram(
    core: EngineCore, draw: random.Random, turns: int, nums: Sequence[int] = (1, 8, 64)
) -> list[dict[str, Any]]:
    """Beside vLLM's figures: as an engine drafts by default, with twice as many drafts, and as vLLM
    does, 4 whenever something is found."""
    lines: list[dict[str, Any]] = []
    prompts = [[draw.randrange(10, 120_000) for _ in range(40)] * 12 for _ in range(64)]
    for num in nums:
        for most, adaptive in (
            (core.config.max_drafts, True),
            (2 * core.config.max_drafts, True),
            (4, False),
        ):
            line = compare(
                core, prompts[:num], 256, lambda _: NgramDrafter(), most, adaptive, turns
            )
            line |= {"drafter": "ngram", "most": most, "adaptive": adaptive, "requests": num}
            line["of_vllm"] = line["whole_tok_s"] / VLLM[num]
            if num in VLLM_MS:
                line["ms_of_vllm"] = VLLM_MS[num] / line["ms_a_token"]
            lines.append(line)
            print(json.dumps(line), flush=True)
    return lines


def time_waiting(core: EngineCore, draw: random.Random) -> list[dict[str, Any]]:
    """How long the device has nothing to do between two steps: without drafts; with drafts, where
    each is planned when the last one's tokens are known; and with drafts that are taken to be right
    meanwhile."""
    lines: list[dict[str, Any]] = []
    prompts = [[draw.randrange(10, 120_000) for _ in range(128)] for _ in range(64)]
    for num in (1, 8, 64):
        answers = run(core, prompts[:num], 128, temperature=0.0).answers
        for how, sure in (("none", None), ("waited for", 1.0), ("followed", 0.9)):
            if sure is not None:
                core.use(
                    *core.parts_but(Drafting),
                    Drafting([Oracle(answers, 1.0)], 4, SLOPES["cuda"], False),
                )
                core.part(Drafting).sure = sure
            lines.append({"requests": num, "drafts": how, **_idle(core, prompts[:num])})
            print(json.dumps(lines[-1]), flush=True)
            core.use(*core.parts_but(Drafting))
    return lines


def _idle(core: EngineCore, prompts: list[list[int]], num_steps: int = 12) -> dict[str, float]:
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    core.scheduler.kv.clear_prefixes()
    for i, prompt in enumerate(prompts):
        core.submit(
            Submit(str(i), prompt, SamplingParams(max_tokens=128, ignore_eos=True, temperature=0.0))
        )
    while len(core.scheduler.waiting) or any(
        request.num_output < 8 for request in core.scheduler.running
    ):
        core.step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            core.step()
    while core.has_work:
        core.step()
    found = [
        event.time_range for event in profiler.events() if event.device_type == DeviceType.CUDA
    ]
    spans = sorted((one.start, one.end) for one in found)
    idle, until = list[float](), spans[0][1]
    for start, end in spans:
        idle.append(start - until)
        until = max(until, end)
    wall = (until - spans[0][0]) / num_steps
    return {
        "step_us": wall,
        "idle_us": sum(max(gap, 0.0) for gap in idle) / num_steps,
        "longest_us": max(idle),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    parser.add_argument("--model", default="llama8b", choices=MODELS)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument(
        "--weights",
        default="normal",
        choices=("normal", "uniform"),
        help="uniform: as vLLM's dummy weights",
    )
    parser.add_argument(
        "--only-ngram", action="store_true", help="prompt lookup, and what waiting costs"
    )
    given = parser.parse_args()
    if given.weights == "uniform":
        RandomTensor.read_into = uniform  # type: ignore[method-assign, assignment]
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[given.model]))
    begin = time.perf_counter()
    core = load_core(
        EngineOptions(model=str(folder), load_format="dummy", max_context=8192, max_waiting=10**6)
    )
    print(
        f"{given.model}: ready in {time.perf_counter() - begin:.1f} s; {core.config.max_draws} draws a step",
        flush=True,
    )
    draw, lines = random.Random(0), []
    if not given.only_ngram:
        lines += time_oracles(core, draw, given.turns)
    lines += time_ngram(core, draw, given.turns)
    lines += time_waiting(core, draw)
    if given.json:
        Path(given.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
