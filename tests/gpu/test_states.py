"""Models with states of constant size on the GPU at hand: kernels, families, and the same bits in
any batch."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from bench.gpu_states import SPECS, Layer
from tests.gpu.engines import ask, assert_near, nothing_compiles, with_weights, without_graphs
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.types.sampling import SamplingParams


@pytest.mark.parametrize("kind", SPECS)
def test_kernels(kind: str) -> None:
    """Near the reference; bits do not depend on how a sequence is cut."""
    spec = SPECS[kind]
    num = 600
    (whole,) = Layer(spec, 40, num).run([(0, 0, num)])
    reference = Layer(spec, 40, num).reference(60).cuda()
    error = ((whole[:60].float() - reference).norm() / reference.norm()).item()
    assert error < 0.02, f"{kind}: {error}"
    again = Layer(spec, 40, num)
    parts = [again.run([(0, at, 1)])[0] for at in range(num)]
    assert torch.equal(torch.cat(parts), whole), f"{kind}: one token at a time"
    crowd, done, parts = Layer(spec, 40, num), 0, []
    for i, count in enumerate((1, 254, 1, 1, 3, 250, 2, 88)):
        others = [(row, 7 * i, 7 if row % 3 else 1) for row in range(1, 40) if row % 3 or i == 0]
        items = [*others[:20], (0, done, count), *others[20:]]
        parts.append(crowd.run(items, num_programs=3 + 9 * (i % 2))[20])
        done += count
    assert torch.equal(torch.cat(parts), whole), f"{kind}: in chunks among others"


_COMMON = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "initializer_range": 0.05,
}
# before, it normed all groups together
_GROUPS = 2 if Version(transformers.__version__) >= Version("5.23") else 1
_KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 16, "conv_kernel": 4, "intermediate_size": 1024, "use_associative_scan": False},
    "Mamba2": {"num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": _GROUPS, "conv_kernel": 4, "chunk_size": 64},
    "Qwen3Next": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 640,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 192, "max_position_embeddings": 2048, "layer_types": _KINDS,
        "experts_implementation": "eager",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Near Transformers; the same bits alone, cached, among others, in chunks, preempted, without
    graphs."""
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**_COMMON | FAMILIES[name])
    )
    for weight_name, weight in made.named_parameters():
        if "A_log" in weight_name:
            weight.data.uniform_(-2, 1.5)
        elif "dt_" in weight_name and weight.dim() == 1:
            weight.data.uniform_(-3, 1)
        elif ".gate.weight" in weight_name:
            weight.data.normal_(0.0, 0.3)
    check_family(name, made, tmp_path)


def check_family(name: str, made: Any, folder: Path) -> None:
    draw = random.Random(3)
    model = with_weights(made, torch.bfloat16)
    model.save_pretrained(folder)
    reference = with_weights(model.cuda().eval(), torch.float32)
    options = EngineOptions(
        model=str(folder), kv_memory_bytes=2**29, max_requests=64, max_context=2048
    )

    def core(**more: Any) -> Any:
        return load_core(dataclasses.replace(options, **more))

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    prompt, whole = ids(700), core()
    assert_near(reference, whole, prompt)
    for params in (
        SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=2),
        SamplingParams(
            temperature=0.9, top_p=0.95, max_tokens=100, ignore_eos=True, logprobs=2, seed=3
        ),
    ):
        x = {"x": (prompt, params)}
        others = {
            f"o{i}": (ids(1 + 29 * i), SamplingParams(max_tokens=5 + i, seed=i)) for i in range(40)
        }
        with nothing_compiles():
            whole.scheduler.kv.clear_prefixes()
            lone = ask(whole, x)["x"]
            assert ask(whole, x)["x"] == lone, f"{name}: cached"
            whole.scheduler.kv.clear_prefixes()
            assert ask(whole, others | x)["x"] == lone, f"{name}: among others"
        assert ask(core(token_budget=64, max_requests=32, prefix_caching=False), x)["x"] == lone, (
            f"{name}: in chunks"
        )
        tight = core(
            kv_memory_bytes=6 * whole.config.layout.num_pages_for(900, 2048) * page_bytes(whole)
        )
        assert ask(tight, others | x)["x"] == lone, f"{name}: preempted"
        assert ask(without_graphs(core()), x)["x"] == lone, f"{name}: without graphs"


def page_bytes(core: Any) -> int:
    return core.config.kv_bytes // core.config.num_pages
