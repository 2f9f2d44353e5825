"""Layers of a model that stream from pinned host memory to the GPU at hand: the same tokens, and the share of the link's rate.

    python -m bench.gpu_streaming [--layers 16] [--width 4096] [--share 0.5] [--quantization none|fp8|int8|int4] [--rounds 5]

A Llama with random weights, once with all of them in GPU memory and once with half. Rates are measured in turns: copies of a
layer's size from pinned host memory, then decode steps of one request and of 32. Every forward pass copies all streamed layers
once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.layers.host_streamed import HostStreaming, pinned
from tidemill.layers.streamed import resident_bytes
from tidemill.sampling import SamplingParams
from tidemill.wire import Submit


def settings(layers: int, width: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 32_000, "hidden_size": width, "intermediate_size": 7 * width // 2,
        "num_hidden_layers": layers, "num_attention_heads": width // 128, "num_key_value_heads": max(1, width // 512),
        "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip


def core_of(folder: Path, budget: int | None, quantization: str) -> EngineCore:
    options = EngineOptions(
        model=str(folder), load_format="dummy", device="cuda", quantization=quantization, weight_memory_bytes=budget,
        max_context=1024, max_requests=32, kv_memory_bytes=2**31, speculate="off",
    )  # fmt: skip
    return load_core(options)


def answers(core: EngineCore, num_requests: int, num_tokens: int, num_prompt: int = 16) -> tuple[list[list[int]], float]:
    """Greedy tokens, and seconds of a decode step."""
    found: dict[str, list[int]] = {}
    for number in range(num_requests):
        found[str(number)] = []
        prompt = [(7 * number + 13 * i) % 31_000 + 2 for i in range(num_prompt + number)]
        core.submit(Submit(str(number), prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)))
    began, num_steps = 0.0, 0
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        for delta in output.deltas:
            found[delta.request_id] += delta.token_ids
        if began:
            num_steps += bool(output.deltas)
        elif all(found.values()):  # all prompts are computed
            began = time.perf_counter()
    return list(found.values()), (time.perf_counter() - began) / max(1, num_steps)


def link_rate(num_bytes: int, times: int = 8) -> float:
    """Bytes a second from pinned host memory, one copy after the other."""
    device = torch.device("cuda")
    host, there = pinned(num_bytes, device), torch.empty(num_bytes, dtype=torch.uint8, device=device)
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    rate = times * num_bytes / (time.perf_counter() - began)
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--quantization", default="none", choices=("none", "fp8", "int8", "int4"))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(settings(given.layers, given.width)))
    whole = core_of(folder, None, given.quantization)
    model = whole.runner.model  # type: ignore[attr-defined]
    total = resident_bytes(model)
    expected = {num: answers(whole, num, 24)[0] for num in (1, 7, 32)}
    speed = {num: num / answers(whole, num, 48)[1] for num in (1, 32)}
    whole.close()
    del whole, model
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    half = core_of(folder, int(given.share * total), given.quantization)
    streaming = half.runner.model.streaming  # type: ignore[attr-defined]
    assert isinstance(streaming, HostStreaming)
    for num, tokens in expected.items():
        for _ in range(2):
            assert answers(half, num, 24)[0] == tokens, f"tokens of {num} requests differ"
    print("tokens are equal: 1, 7 and 32 requests, prompts of 16 to 48 tokens")
    held = torch.cuda.memory_allocated() - before
    print(f"weights {total / 1e9:.2f} GB; allowed {given.share * total / 1e9:.2f} GB; held {streaming.held_bytes / 1e9:.2f} GB")
    print(f"streamed {streaming.streamed_bytes / 1e9:.2f} GB a pass; GPU memory with the KV cache: {held / 1e9:.2f} GB")
    rates: dict[int, list[float]] = {1: [], 32: []}
    speeds: dict[int, list[float]] = {1: [], 32: []}
    links = []
    for _ in range(given.rounds):
        links.append(link_rate(max(2**26, streaming.streamed_bytes // given.layers)))
        for num in rates:
            took = answers(half, num, 24)[1]
            rates[num].append(streaming.streamed_bytes / took)
            speeds[num].append(num / took)
    mid = statistics.median
    print("requests  link GB/s  streamed GB/s  share  tok/s streamed  tok/s in memory")
    for num, found in rates.items():
        share = mid(rate / link for rate, link in zip(found, links, strict=True))
        figures = f"{mid(links) / 1e9:9.1f}  {mid(found) / 1e9:13.1f}  {share:5.0%}"
        print(f"{num:>8}  {figures}  {mid(speeds[num]):14.1f}  {speed[num]:15.1f}")


if __name__ == "__main__":
    main()
