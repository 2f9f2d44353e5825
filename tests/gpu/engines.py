"""Small random models and engines of them on a GPU, and what tests ask of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.runner.cuda_kinds import Decode, Mixed
from tidemill.runner.cuda_last import LastLayerApart
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


def random_llama(folder: Path) -> Any:
    """A small Llama with the head size of the large ones, as Transformers computes it in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1400, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=2048, initializer_range=0.05,
    )  # fmt: skip
    model = with_weights(LlamaForCausalLM(config), torch.bfloat16)
    model.save_pretrained(folder)
    return with_weights(model.cuda().eval(), torch.float32)


def with_weights(model: Any, dtype: torch.dtype) -> Any:
    """Not `model.to(dtype)`: that would round the rotation's frequencies, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


Outputs = dict[str, tuple[list[int], list[Any]]]


def ask(core: Any, requests: dict[str, Any]) -> Outputs:
    """Tokens and logprobs of every request, submitted together."""
    outputs: Outputs = {name: ([], []) for name in requests}
    for name, (prompt, params) in requests.items():
        core.submit(Submit(name, prompt, params))
    while core.has_work:
        output, failed = core.step()
        assert not failed
        for delta in output.deltas:
            outputs[delta.request_id][0].extend(delta.token_ids)
            outputs[delta.request_id][1].extend(delta.logprobs or [])
            outputs[delta.request_id][1].extend(delta.prompt_logprobs or [])
    core.scheduler.table.check_integrity()
    return outputs


def without_graphs(core: EngineCore) -> EngineCore:
    """Every step launched kernel by kernel."""

    class Eager:
        def __init__(self, step: Any) -> None:
            self.replay = step

    runner: Any = core.runner

    def eager(graph: Any, step: Any) -> Any:
        def replay() -> None:
            result = step.run()
            if result.data_ptr() != graph.out.data_ptr():
                graph.out.copy_(result)

        graph.graph = Eager(torch.inference_mode()(replay))
        return graph

    for kind in runner.captured:
        if isinstance(kind, Mixed | Decode | LastLayerApart):
            for key in kind.graphs:
                kind.graphs[key] = eager(kind.graphs[key], kind.step(key))
    return core


def assert_near(reference: Any, core: EngineCore, prompt: list[int]) -> None:
    """Log probabilities of a prompt are as near to float32 as those of Transformers in bfloat16
    (which `reference` is then)."""
    targets = torch.tensor(prompt[1:], device="cuda")[:, None]

    def scores(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt], device="cuda")).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, targets).flatten()

    exact = scores(reference)
    theirs = (scores(with_weights(reference, torch.bfloat16)) - exact).pow(2).mean().sqrt().item()
    scored = ask(core, {"x": (prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))})["x"][1]
    ours = torch.tensor([entry.logprob for entry in scored], device="cuda")
    error = (ours - exact).pow(2).mean().sqrt().item()
    print(
        f"  error of {len(targets)} log probabilities against float32: {error:.4f}; Transformers in bfloat16: {theirs:.4f}"
    )
    assert error < 1.3 * theirs


def check_family(name: str, made: Any, prompt: list[int], folder: Path) -> EngineCore:
    """Near Transformers, nothing compiles after the start, the same bits alone, cached, among
    others and in chunks."""
    model = with_weights(made, torch.bfloat16)
    model.save_pretrained(folder)
    reference = with_weights(model.cuda().eval(), torch.float32)
    options = EngineOptions(model=str(folder), kv_memory_bytes=2**28, max_requests=64)
    core = load_core(options)
    print(f"  {name}:", end="")
    assert_near(reference, core, prompt)
    x = {"x": (prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2))}
    with nothing_compiles():
        lone = ask(core, x)["x"]
        assert ask(core, x)["x"] == lone, f"{name}: cached"
        others = {
            f"o{i}": (prompt[: 20 * i + 1], SamplingParams(max_tokens=20, seed=i))
            for i in range(30)
        }
        assert ask(core, others | x)["x"] == lone, f"{name}: among others"
        # Beyond windows: without a common prefix, and with one of which the second has given back
        # what the third still sees.
        texts = (
            prompt[::-1] + prompt[:250],
            prompt[100:] + prompt[:330],
            prompt[100:] + prompt[:180],
        )
        far = {f"f{i}": (text, x["x"][1]) for i, text in enumerate(texts)}
        together = ask(core, far)
        for one, request in far.items():
            core.scheduler.kv.clear_prefixes()
            assert ask(core, {one: request})[one] == together[one], f"{name}: long ones together"
    chunked = load_core(dataclasses.replace(options, token_budget=64, prefix_caching=False))
    assert ask(chunked, x)["x"] == lone, f"{name}: in chunks"
    return core


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    seen = []
    compile_one = triton.runtime.jit.JITFunction._do_compile

    def count(kernel: Any, *given: Any, **more: Any) -> Any:
        seen.append(kernel.fn.__name__)
        return compile_one(kernel, *given, **more)

    with mock.patch.object(triton.runtime.jit.JITFunction, "_do_compile", count):
        yield
    assert not seen, seen
