"""Neurons divided between the GPU at hand and its host's cores: how fast, against layers that are
streamed.

    python -m bench.gpu_neurons [--layers 8] [--width 4096] [--shares 0.5,0.25] [--active 0.1]
    [--requests 1,4,8,32] [--threads N]

A Llama with ReLU gates and random weights, whose neurons are above zero with frequencies that fall
as a power of their rank (its gates' biases say how often), so that some are hot. Once with all
weights on the GPU; then, for each share of the feed-forwards' weights that may be there, with hot
neurons on the GPU and the others computed by the CPU, and with whole layers streamed in the same
memory, or in what two layers need if that is more.

Printed, too: the error of a feed-forward against float64, beside the GPU's own, and tokens against
the model with all weights on the GPU, which may part where two tokens are nearly as likely.
tests/gpu/test_split_neurons.py checks them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.gpu_streaming import let_go, settings
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.layers.split_neurons import NeuronSplit
from tidemill.layers.streamed import resident_bytes
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.neurons import TENSORS, tensor_name

_TOKENS, _VOCABULARY = 24, 8192
LENGTHS = range(16, 48)  # of the prompts whose answers are compared
_POWER, _FIRST = 1.0, 0.02  # frequencies fall as (rank / neurons + first) ** -power
Answers = dict[str, list[tuple[int, float]]]


def frequencies(num: int, active: float) -> torch.Tensor:
    """Of neurons by rank, so many of which are above zero on average."""
    often = (torch.arange(num, device="cuda") / num + _FIRST) ** -_POWER
    return (often * active / often.mean()).clamp(1e-4, 0.95)


@torch.inference_mode()
def make_model(folder: Path, layers: int, width: int, active: float) -> None:
    shape = settings(layers, width, _VOCABULARY) | {
        "hidden_act": "relu",
        "mlp_bias": True,
        "dtype": "bfloat16",
    }
    torch.manual_seed(0)
    inner, kv = shape["intermediate_size"], shape["num_key_value_heads"] * 128
    often = frequencies(inner, active)
    tensors: dict[str, torch.Tensor] = {}
    measured: dict[str, torch.Tensor] = {}

    def put(name: str, *sizes: int, scale: float | None = None) -> None:
        made = torch.randn(*sizes, device="cuda") * (sizes[-1] ** -0.5 if scale is None else scale)
        tensors[name] = made.bfloat16().cpu()

    put("model.embed_tokens.weight", _VOCABULARY, width, scale=1.0)
    put("lm_head.weight", _VOCABULARY, width, scale=4 * width**-0.5)
    tensors["model.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, out in (("q", width), ("k", kv), ("v", kv), ("o", width)):
            put(f"{at}self_attn.{name}_proj.weight", out, width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        own = often[torch.randperm(inner, device="cuda")]
        put(f"{at}mlp.gate_proj.weight", inner, width)
        put(f"{at}mlp.up_proj.weight", inner, width)
        put(f"{at}mlp.down_proj.weight", width, inner, scale=(active * inner) ** -0.5)
        tensors[f"{at}mlp.gate_proj.bias"] = torch.special.ndtri(own).bfloat16().cpu()
        tensors[f"{at}mlp.up_proj.bias"] = torch.zeros(inner, dtype=torch.bfloat16)
        tensors[f"{at}mlp.down_proj.bias"] = torch.zeros(width, dtype=torch.bfloat16)
        measured[tensor_name(i)] = own.cpu()
    save_file(tensors, folder / "model.safetensors")
    save_file(measured, folder / TENSORS)
    (folder / "config.json").write_text(json.dumps(shape))


def core_of(
    folder: Path,
    budget: int | None = None,
    hot: bool = False,
    threads: int | None = None,
    **more: Any,
) -> EngineCore:
    began = time.perf_counter()
    core = load_core(EngineOptions(**{
        "model": str(folder / "model"), "device": "cuda", "weight_memory_bytes": budget, "max_context": 512, "max_requests": 32,
        "token_budget": 256, "kv_memory_bytes": 2**30, "speculate": "off", "prefix_caching": False, "threads": threads,
        "hot_neurons": str(folder / "often") if hot else None,
    } | more))  # fmt: skip
    print(f"  started in {time.perf_counter() - began:.1f} s", flush=True)
    return core


def answers(
    core: EngineCore, lengths: Sequence[int], num_tokens: int = _TOKENS
) -> tuple[Answers, float]:
    """Of prompts of these lengths: greedy tokens with their log probabilities, and seconds of a
    decode step."""
    found: Answers = {}
    for number, length in enumerate(lengths):
        found[str(number)] = []
        prompt = [(7 * number + 13 * i + i * i) % 8000 + 2 for i in range(length)]
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        core.submit(Submit(str(number), prompt, params))
    began, num_steps = 0.0, 0
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        for delta in output.deltas:
            found[delta.request_id] += zip(
                delta.token_ids, (one.logprob for one in delta.logprobs or ()), strict=True
            )
        if began:
            num_steps += bool(output.deltas)
        elif all(found.values()):
            began = time.perf_counter()
    return found, (time.perf_counter() - began) / max(1, num_steps)


def least_bytes(total: int, layers: int, width: int) -> int:
    """Memory for streamed layers, at least: two of them have slots. `total`: of all weights."""
    tables = 2 * 2 * _VOCABULARY * width
    return int(tables + 2.05 * (total - tables) / layers)


def compare(found: Answers, expected: Answers) -> None:
    """Greedy tokens up to where they part; log probabilities up to there."""
    num_equal, furthest, parted = 0, 0.0, []
    for number, theirs in expected.items():
        for (mine, p), (other, q) in zip(found[number], theirs, strict=True):
            if mine != other:
                parted.append(abs(p - q))
                break
            num_equal, furthest = num_equal + 1, max(furthest, abs(p - q))
    num = sum(map(len, expected.values()))
    print(
        f"  {num_equal} of {num} tokens are those of all weights on the GPU, log probabilities within {furthest:.3f}; "
        f"{len(parted)} of {len(expected)} requests part from it, at tokens whose log probabilities differ by "
        f"{max(parted, default=0):.3f} at most",
        flush=True,
    )


@torch.inference_mode()
def error_of(core: EngineCore, folder: Path) -> float:
    """Of the first feed-forward, against float64: the root of the mean square, of that of what it
    gives."""
    model: Any = core.runner.model  # type: ignore[attr-defined]
    x = torch.randn(
        64,
        model.config.hidden_size,
        device="cuda",
        generator=torch.Generator("cuda").manual_seed(1),
    ).bfloat16()
    with safe_open(folder / "model" / "model.safetensors", "pt", device="cuda") as file:
        gate, up, down = (
            file.get_tensor(f"model.layers.0.mlp.{name}_proj.weight").double()
            for name in ("gate", "up", "down")
        )
        bias = file.get_tensor("model.layers.0.mlp.gate_proj.bias").double()
    exact = ((x.double() @ gate.t() + bias).clamp(min=0) * (x.double() @ up.t())) @ down.t()
    streaming = model.streaming
    before = None
    if isinstance(streaming, NeuronSplit) and streaming.exchange is not None:
        before, streaming.exchange.live = (
            streaming.exchange.live,
            torch.full((1,), 64, device="cuda"),
        )
    made = model.blocks[0].mlp(x).double()
    torch.cuda.synchronize()
    if before is not None:
        streaming.exchange.live = before
    return float((made - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def speeds(core: EngineCore, requests: list[int]) -> dict[int, float]:
    """Tokens a second."""
    for num in requests:
        answers(core, [16] * num, 8)
    return {num: num / min(answers(core, [16] * num)[1] for _ in range(2)) for num in requests}


def show_split(core: EngineCore, requests: list[int]) -> None:
    """Of decode steps: how long the CPU computes, and how much of that does not make them longer."""
    streaming: Any = core.runner.model.streaming  # type: ignore[attr-defined]
    exchange, num_layers = streaming.exchange, len(streaming.layers)
    for num in requests:
        counts = [(int(exchange.num_ns), *streaming._figures())]
        for num_tokens in (1, _TOKENS):  # the prompts alone, then with decode steps
            _, step_s = answers(core, [16] * num, num_tokens)
            counts.append((int(exchange.num_ns), *streaming._figures()))
        num_steps = _TOKENS - 1
        cpu_ns, num_bytes, _, neurons = (
            (one[0] - 2 * one[1] + one[2]) / num_steps
            for one in list(zip(*counts, strict=True))[:4]
        )
        kept = {key: call.num_rows for key, call in exchange._calls.items()}
        for call in exchange._calls.values():
            call.num_rows = 0  # it returns at once
        _, gpu_s = answers(core, [16] * num)
        for key, call in exchange._calls.items():
            call.num_rows = kept[key]
        cpu_s = cpu_ns / 1e9
        num_bytes += sum(
            one.cold.gate.held.codes.nbytes for one in streaming.layers if one.cold.gate is not None
        )
        hidden, rate = 1 - max(0.0, step_s - gpu_s) / cpu_s, num_bytes / cpu_s / 1e9
        print(
            f"  {num:>3} requests: {step_s * 1e3:7.2f} ms a step, {gpu_s * 1e3:6.2f} ms without the CPU's work of "
            f"{cpu_s * 1e3:7.2f} ms, of which {hidden:4.0%} adds nothing; {neurons / num_layers:6.0f} cold neurons a layer, "
            f"{rate:5.1f} GB/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--active", type=float, default=0.1)
    parser.add_argument("--shares", default="0.5,0.25")
    parser.add_argument("--requests", default="1,4,8,32")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--no-streaming", action="store_true", help="leave out layers that are streamed"
    )
    given = parser.parse_args()
    requests, folder = [int(one) for one in given.requests.split(",")], Path(tempfile.mkdtemp())
    for name in ("model", "often"):
        (folder / name).mkdir()
    make_model(folder / "model", given.layers, given.width, given.active)
    (folder / "model" / TENSORS).rename(folder / "often" / TENSORS)
    inner = 7 * given.width // 2
    often = frequencies(inner, given.active)
    hottest = float(often[: inner // 4].sum() / often.sum())
    print(
        f"a neuron is above zero for {often.mean():.1%} of tokens; the hottest quarter is {hottest:.0%} of those above zero"
    )
    print("all on the GPU:", flush=True)
    whole = core_of(folder)
    total, matrices = resident_bytes(whole.runner.model), 3 * 2 * given.layers * given.width * inner  # type: ignore[attr-defined]
    least = least_bytes(total, given.layers, given.width)
    expected, error = answers(whole, LENGTHS)[0], error_of(whole, folder)
    table = {"all on the GPU": speeds(whole, requests)}
    let_go(whole)
    for share in (float(one) for one in given.shares.split(",")):
        budget = total - int((1 - share) * matrices)
        print(
            f"{share:.0%} of feed-forwards on the GPU, {budget / 1e9:.2f} of {total / 1e9:.2f} GB of weights:",
            flush=True,
        )
        core = core_of(folder, budget, True, given.threads)
        streaming: Any = core.runner.model.streaming  # type: ignore[attr-defined]
        print(f"  {core.config.reasons['hot_neurons']}; {core.config.threads} threads")
        print(
            f"  held {streaming.held_bytes / 1e9:.2f} GB; in host memory {streaming.streamed_bytes / 1e9:.2f} GB"
        )
        print(
            f"  error of a feed-forward: {error_of(core, folder):.2e}; all on the GPU: {error:.2e}"
        )
        compare(answers(core, LENGTHS)[0], expected)
        show_split(core, requests)
        table[f"{share:.0%}, neurons divided"] = speeds(core, requests)
        let_go(core)
        if not given.no_streaming:
            core = core_of(folder, max(budget, least))
            table[
                f"{share:.0%}, layers streamed" + (" (more memory)" if least > budget else "")
            ] = speeds(core, requests)
            let_go(core)
    print("tokens a second, by requests:      " + "".join(f"{num:>10}" for num in requests))
    for name, by_requests in table.items():
        print(f"{name:<35}" + "".join(f"{by_requests[num]:>10.1f}" for num in requests))


if __name__ == "__main__":
    main()
