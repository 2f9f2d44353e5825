"""Weights that stream from pinned host memory to the GPU at hand: the same tokens, and the share of
the link's rate.

    python -m bench.gpu_streaming [--only layers,experts] [--layers 8] [--width 4096] [--share 0.5]
        [--quantization auto|fp8|int8|int4] [--rounds 3]

Models with random weights, once with all of them in GPU memory and once with a part: the tokens of
both are compared. layers: a Llama of gigabytes. Its rates are measured in turns: copies of a
layer's size from pinned host memory, then decode steps of one request and of 32; every step copies
all streamed layers once. experts: a mixture of experts with routers at random, and with some
experts that are chosen often; how many experts were there in time, with and without guesses. Each
part is a process of its own: if one fails, the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels.memory import memory
from tidemill.layers.host_memory import pin
from tidemill.layers.host_streamed import HostStreaming
from tidemill.layers.moe import MoE
from tidemill.layers.streamed import resident_bytes
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

_REQUESTS, _TOKENS = (1, 7, 32), 24


def settings(layers: int, width: int, vocabulary: int = 32_000) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers,
        "intermediate_size": 7 * width // 2, "num_attention_heads": width // 128, "num_key_value_heads": max(1, width // 512),
        "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip


def core_of(
    config: dict[str, Any], budget: int | None, quantization: str = "auto", **more: Any
) -> EngineCore:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineOptions(**{
        "model": str(folder), "load_format": "dummy", "device": "cuda", "quantization": quantization,
        "weight_memory_bytes": budget, "max_context": 512, "max_requests": 32, "token_budget": 256, "kv_memory_bytes": 2**30,
        "speculate": "off", "prefix_caching": False,
    } | more)  # fmt: skip
    began = time.perf_counter()
    core = load_core(options)
    print(f"  started in {time.perf_counter() - began:.1f} s", flush=True)
    return core


def let_go(core: EngineCore) -> None:
    core.close()
    core.runner = None  # type: ignore[assignment]
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def answers(
    core: EngineCore, num_requests: int, num_tokens: int = _TOKENS
) -> tuple[list[list[Any]], float]:
    """Greedy tokens with their log probabilities, and seconds of a decode step."""
    found: dict[str, list[Any]] = {}
    for number in range(num_requests):
        found[str(number)] = []
        prompt = [(7 * number + 13 * i) % 2000 + 2 for i in range(16 + number)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        core.submit(Submit(str(number), prompt, params))
    began, num_steps = 0.0, 0
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        for delta in output.deltas:
            found[delta.request_id] += [
                *delta.token_ids,
                *(one.logprob for one in delta.logprobs or ()),
            ]
        if began:
            num_steps += bool(output.deltas)
        elif all(found.values()):  # all prompts are computed
            began = time.perf_counter()
    return list(found.values()), (time.perf_counter() - began) / max(1, num_steps)


def link_rate(num_bytes: int, times: int = 8) -> float:
    """Bytes a second from pinned host memory, one copy after the other."""
    device = torch.device("cuda")
    host = torch.from_numpy(memory(num_bytes))[:num_bytes].fill_(1)
    pin(host, device)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return times * num_bytes / (time.perf_counter() - began)


def streaming_of(core: EngineCore) -> HostStreaming:
    streaming = core.runner.model.streaming  # type: ignore[attr-defined]
    assert isinstance(streaming, HostStreaming)
    return streaming


Expected = tuple[dict[int, list[list[Any]]], dict[int, float]]


def expected_of(whole: EngineCore) -> Expected:
    """Of a model with all weights in memory: answers, and tokens a second."""
    found = {num: answers(whole, num)[0] for num in _REQUESTS}
    return found, {num: num / answers(whole, num)[1] for num in (1, 32)}


def expected_and_bytes(
    config: dict[str, Any], *changes: Callable[[EngineCore], None], **more: Any
) -> tuple[list[Expected], int]:
    """Of the model with all weights in memory, then after each of the changes. And bytes of its
    weights."""
    whole = core_of(config, None, **more)
    total, found = resident_bytes(whole.runner.model), [expected_of(whole)]  # type: ignore[attr-defined]
    for change in changes:
        change(whole)
        found.append(expected_of(whole))
    let_go(whole)
    return found, total


def compare(core: EngineCore, expected: dict[int, list[list[Any]]]) -> None:
    for num, tokens in expected.items():
        for _ in range(2):
            assert answers(core, num)[0] == tokens, f"tokens of {num} requests differ"
    print(
        f"  tokens and log probabilities are equal: {', '.join(map(str, expected))} requests",
        flush=True,
    )


def show_memory(core: EngineCore, total: int, budget: int) -> None:
    streaming = streaming_of(core)
    print(
        f"  weights {total / 1e9:.3f} GB; allowed {budget / 1e9:.3f} GB; held {streaming.held_bytes / 1e9:.3f} GB; "
        f"streamed {streaming.streamed_bytes / 1e9:.3f} GB; allocated besides the KV cache: "
        f"{(torch.cuda.memory_allocated() - core.config.kv_bytes) / 1e9:.3f} GB",
        flush=True,
    )
    assert streaming.held_bytes <= budget


def measure_layers(given: argparse.Namespace) -> None:
    print(f"layers, {given.quantization}:", flush=True)
    config = settings(given.layers, given.width)
    ((expected, speed),), total = expected_and_bytes(config, quantization=given.quantization)
    budget = int(given.share * total)
    core = core_of(config, budget, given.quantization)
    show_memory(core, total, budget)
    compare(core, expected)
    streaming = streaming_of(core)
    rates: dict[int, list[float]] = {1: [], 32: []}
    speeds: dict[int, list[float]] = {1: [], 32: []}
    links = []
    for _ in range(given.rounds):
        links.append(link_rate(max(2**26, streaming.streamed_bytes // given.layers)))
        for num in rates:
            took = answers(core, num)[1]
            rates[num].append(streaming.streamed_bytes / took)
            speeds[num].append(num / took)
    mid = statistics.median
    print("  requests  link GB/s  streamed GB/s  share  tok/s streamed  tok/s in memory")
    for num, found in rates.items():
        share = mid(rate / link for rate, link in zip(found, links, strict=True))
        figures = f"{mid(links) / 1e9:9.1f}  {mid(found) / 1e9:13.1f}  {share:5.0%}"
        print(f"  {num:>8}  {figures}  {mid(speeds[num]):14.1f}  {speed[num]:15.1f}", flush=True)
    let_go(core)


def of_experts(layers: int) -> dict[str, Any]:
    """32 experts of 768 in a layer, 4 for a token: 0.3 GB of experts a layer."""
    return settings(layers, 2048) | {
        "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
    }  # fmt: skip


@torch.inference_mode()
def make_hot(core: EngineCore) -> None:
    """Some experts are chosen more often than others: the rows of their routers are longer."""
    for module in core.runner.model.modules():  # type: ignore[attr-defined]
        if isinstance(module, MoE):
            weight = module.router.weight._weight_NK  # type: ignore[attr-defined]
            weight.mul_(
                torch.logspace(0.4, -0.4, len(weight), device=weight.device, dtype=weight.dtype)[
                    :, None
                ]
            )


def measure_experts(given: argparse.Namespace) -> None:
    print("experts:", flush=True)
    config = of_experts(given.layers)
    found, total = expected_and_bytes(config, make_hot)
    budget = int(given.share * total)
    core = core_of(config, budget)
    show_memory(core, total, budget)
    for name, (expected, speed) in zip(
        ("routers at random", "some experts hot"), found, strict=True
    ):
        print(f"  {name}:", flush=True)
        if name == "some experts hot":
            make_hot(core)
        compare(core, expected)
        for guesses in (True, False):
            for num in (1, 32):
                print(
                    f"  {num} requests, {'with' if guesses else 'without'} guesses: {read_by(core, num, guesses)}",
                    flush=True,
                )
        print(
            f"  with all in memory: {speed[1]:.0f} tok/s for 1 request, {speed[32]:.0f} for 32",
            flush=True,
        )
    let_go(core)


def read_by(core: EngineCore, num: int, guesses: bool) -> str:
    slots = streaming_of(core).experts
    assert slots is not None
    places, ahead = slots.places, slots.places.ahead
    if not guesses:
        places.ahead = lambda units: []  # type: ignore[method-assign]
    answers(core, num)  # warm
    before = (
        places.num_asked,
        places.num_missed,
        places.num_read,
        places.num_foreseen,
        slots.num_bytes,
    )
    began = time.perf_counter()
    took = answers(core, num)[1]
    seconds = time.perf_counter() - began
    now = places.num_asked, places.num_missed, places.num_read, places.num_foreseen, slots.num_bytes
    asked, missed, read, foreseen, num_bytes = (
        mine - other for mine, other in zip(now, before, strict=True)
    )
    places.ahead = ahead  # type: ignore[method-assign]
    return (
        f"{num / took:.1f} tok/s; {asked} experts used, {1 - missed / asked:.1%} there in time, {foreseen} of them foreseen by "
        f"{read - missed} copies ahead; {num_bytes / seconds / 1e9:.1f} GB/s"
    )


PARTS = {"layers": measure_layers, "experts": measure_experts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--quantization", default="auto", choices=("auto", "fp8", "int8", "int4"))
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if len(names) == 1:
        PARTS[names[0]](given)
        return
    # each in a process of its own: an assertion on the GPU would end all of them
    others = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(given).items()
        if name != "only"
    ]
    command = [sys.executable, "-m", "bench.gpu_streaming", *others]
    failed = [
        name
        for name in names
        if subprocess.run([*command, f"--only={name}"], check=False).returncode
    ]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
