"""The engine on the GPU at hand, held against Transformers in float32, and bit for bit against
itself."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.gpu.engines import (
    ask,
    assert_near,
    check_family,
    nothing_compiles,
    random_llama,
    without_graphs,
)
from tests.gpu.scenes import has_flash
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.runner.cuda_kinds import FlashPrompts
from tidemill.types.events import ExpertsUsed, StepPlanned
from tidemill.types.sampling import Beams, Grammar, SamplingParams
from tidemill.types.wire import Abort, Submit

WAYS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    "greedy, with logprobs": SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2
    ),
    "sampled": SamplingParams(
        temperature=0.9, top_p=0.95, max_tokens=40, ignore_eos=True, logprobs=2, seed=3
    ),
    "beams": SamplingParams(n=8, max_tokens=40, ignore_eos=True, logprobs=2, beams=Beams(8)),
}


@pytest.mark.parametrize("way", WAYS)
def test_batch_invariance(way: str, tmp_path: Path) -> None:
    """Near Transformers; and the same bits alone, among 255 others, in chunks, cached, preempted,
    with and without graphs."""
    folder = tmp_path
    reference = random_llama(folder)
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    def core(**options: Any) -> Any:
        return load_core(
            EngineOptions(
                model=str(folder), **({"kv_memory_bytes": 2**28, "max_requests": 256} | options)
            )
        )

    prompt = ids(700)
    assert_near(reference, core(), prompt)
    x = {"x": (prompt, WAYS[way])}
    whole = core()
    lone = ask(whole, x)["x"]
    assert ask(whole, x)["x"] == lone, "cached"
    others = {
        f"o{i}": (
            ids(1 + (i * 37) % 900),
            SamplingParams(temperature=float(i % 2), max_tokens=5 + i % 60, seed=i),
        )
        for i in range(255)
    }
    assert ask(core(), others | x)["x"] == lone, "among 255 others"
    assert ask(core(token_budget=64, max_requests=32), x)["x"] == lone, "in chunks of 64"
    tight = core(kv_memory_bytes=2**23, max_context=1024, max_requests=64)
    crowd = dict(list(others.items())[:40])
    assert ask(tight, crowd | x)["x"] == lone, "preempted"
    family = {
        f"s{i}": (prompt[: 600 + i % 3] + ids(5), SamplingParams(temperature=0.0, max_tokens=30))
        for i in range(60)
    }
    assert ask(core(), family | x)["x"] == lone, "among 60 that begin like it"
    assert ask(without_graphs(core()), x)["x"] == lone, "without graphs"


COMMON = {
    "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1400, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.05,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention"] * 2
_FACTORS = [1 + i / 8 for i in range(48)]
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 48,
    "long_factor": _FACTORS, "original_max_position_embeddings": 512,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Mistral": {"sliding_window": 300, "head_dim": 128},
    "Gemma2": {
        "sliding_window": 300,
        "head_dim": 128,
        "query_pre_attn_scalar": 100,
        "layer_types": _KINDS,
    },
    "Gemma3": {"sliding_window": 300, "head_dim": 256, "layer_types": _KINDS},
    "Qwen3": {"head_dim": 128},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
    "Phi3": {
        "rope_parameters": _LONGROPE,
        "original_max_position_embeddings": 512,
        "pad_token_id": 0,
    },
    "Phi": {},
    "Olmo": {"clip_qkv": 1.5},
    "Olmo2": {"pad_token_id": 0},
    "Granite": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "GPT2": {
        "n_embd": 512,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 2048,
        "vocab_size": 2000,
        "initializer_range": 0.05,
    },
    "Bloom": {
        "hidden_size": 512,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 2000,
        "initializer_range": 0.05,
    },
    # By FlexAttention:
    "Bloom with heads of 96": {
        "hidden_size": 384,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 2000,
        "initializer_range": 0.05,
    },
    "Mistral with heads of 96": {"sliding_window": 300, "head_dim": 96},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Layers that differ from Llama's: near Transformers, and the same bits in any batch."""
    import transformers

    torch.manual_seed(0)
    family, more, draw = name.split()[0], FAMILIES[name], random.Random(1)
    sizes = more if family in ("GPT2", "Bloom") else COMMON | more
    config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(
        **sizes
    )
    made = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(
        config
    )
    check_family(name, made, [draw.randrange(2000) for _ in range(700)], tmp_path)


_COMMON_OF_EXPERTS = {
    "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.05, "head_dim": 128,
    "experts_implementation": "eager",
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 150000.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
_SHARED = {
    "moe_intermediate_size": 192,
    "shared_expert_intermediate_size": 320,
    "mlp_only_layers": [1],
}
FAMILIES_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 12, "num_experts_per_tok": 3} | _SHARED,
    "Qwen3Moe": {
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
    },
    "GptOss": {
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "sliding_window": 128,
        "rope_parameters": _YARN,
    },
}


@pytest.mark.parametrize("name", FAMILIES_OF_EXPERTS)
def test_families_with_experts(name: str, tmp_path: Path) -> None:
    """Families whose routers have weights large enough to choose clearly: as test_families."""
    import transformers

    torch.manual_seed(0)
    sizes, draw = _COMMON_OF_EXPERTS | FAMILIES_OF_EXPERTS[name], random.Random(2)
    made = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**sizes)
    )
    for weight_name, weight in made.named_parameters():
        if (
            "bias" in weight_name
            or "sinks" in weight_name
            or ".gate.weight" in weight_name
            or "router" in weight_name
        ):
            weight.data.normal_(0.0, 0.3)
    core = check_family(name, made, [draw.randrange(2000) for _ in range(700)], tmp_path)
    check_expert_counts(name, core)


def check_expert_counts(name: str, core: EngineCore) -> None:
    """Events say how many tokens experts got: every one that a step computed, and none that filled
    a graph up."""
    draw, params = random.Random(3), SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    for i, length in enumerate((3, 30, 101, 260, 7)):
        core.submit(Submit(f"counted {i}", [draw.randrange(2000) for _ in range(length)], params))
    totals: dict[int, int] = {}
    num_tokens = 0
    while core.has_work:
        output, failed = core.step()
        assert not failed
        for event in output.events:
            if isinstance(event, StepPlanned):
                num_tokens += event.num_tokens
            if isinstance(event, ExpertsUsed):
                for layer, counts in event.tokens_of:
                    totals[layer] = totals.get(layer, 0) + sum(counts)
    expected = {
        layer: num_tokens * spec.top_k
        for layer, spec in enumerate(core.model_config.experts)
        if spec
    }
    assert totals == expected, f"{name}: tokens of experts {totals}, not {expected}"


def test_fast_math(tmp_path: Path) -> None:
    """Prompts by flash-attn-4, whether it is faster or not."""
    folder = tmp_path
    reference = random_llama(folder)
    core = load_core(
        EngineOptions(model=str(folder), kv_memory_bytes=2**28, max_requests=64, fast_math=True)
    )
    runner: Any = core.runner
    print(f"  flash-attn-4: {runner.flash.why}")
    if has_flash() and not runner.flash.is_taken:
        flash = next(each for each in runner.captured if isinstance(each, FlashPrompts))
        with torch.inference_mode():
            flash.take()
    draw = random.Random(5)
    assert_near(reference, core, [draw.randrange(2000) for _ in range(1900)])


def test_nothing_compiles_after_the_start(tmp_path: Path) -> None:
    """Once an engine is ready: batches of odd sizes, all that sampling may do, prompts of odd
    lengths, page copies."""
    from tests.helpers import byte_tokenizer

    folder = tmp_path
    random_llama(folder)
    byte_tokenizer(folder)
    core = load_core(
        EngineOptions(model=str(folder), kv_memory_bytes=2**28, max_requests=80, max_context=2048)
    )
    asked = [
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=5),
        SamplingParams(typical_p=0.7, min_p=0.01, max_tokens=5, logprobs=3),
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=20),
        SamplingParams(
            max_tokens=5,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias={5: 1.0},
            min_tokens=2,
        ),
        SamplingParams(max_tokens=30, grammar=Grammar("regex", "[0-9]{9}")),
        SamplingParams(max_tokens=4, n=3, top_p=0.5),
        SamplingParams(max_tokens=5, allowed_token_ids=(5, 6, 7, 8), bad_word_ids=((5,), (6, 7))),
        SamplingParams(max_tokens=1, pooling="mean"),
    ]
    core.part(StructuredOutput).compile(Grammar("regex", "[0-9]{9}"))
    draw = random.Random(0)
    with nothing_compiles():
        for num in (1, 2, 3, 5, 7, 17, 33, 64, 79):
            for i in range(num):
                params = asked[i % len(asked)] if num > 5 else asked[0]
                prompt = [
                    draw.randrange(2, 300) for _ in range(draw.choice((1, 3, 17, 63, 64, 65, 700)))
                ]
                core.submit(Submit(f"{num}.{i}", prompt, params, eos_token_ids=[1]))
            while core.has_work:
                assert not core.step()[1]


def test_odd_requests(tmp_path: Path) -> None:
    """Requests that ask for more than tokens, or break, each among others that notice nothing."""
    from tests.helpers import byte_tokenizer

    folder = tmp_path
    reference = random_llama(folder)
    byte_tokenizer(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def core() -> EngineCore:
        return load_core(
            EngineOptions(
                model=str(folder), kv_memory_bytes=2**26, max_requests=32, max_context=1024
            )
        )

    greedy, prompt = (
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        list(range(20, 320)),
    )
    asked = {
        "plain": (prompt, greedy),
        "typical": (prompt, SamplingParams(typical_p=0.5, max_tokens=20, seed=1, ignore_eos=True)),
        "choice": (
            prompt,
            SamplingParams(max_tokens=40, seed=2, grammar=Grammar("choice", '["ebb", "flow"]')),
        ),
        "regex": (
            prompt,
            SamplingParams(
                temperature=0.0, max_tokens=40, grammar=Grammar("regex", "[0-9]{9}"), logprobs=1
            ),
        ),
    }
    lone = {name: ask(core(), {name: one})[name] for name, one in asked.items()}
    crowded = core()
    for name, one in asked.items():
        crowded.submit(Submit(name, *one, eos_token_ids=[1]))
    crowded.submit(Submit("bad", [7, *prompt], greedy))
    crowded.submit(Submit("seen", prompt, SamplingParams(max_tokens=1, pooling="mean")))
    outputs: dict[str, list[int]] = {name: [] for name in asked}
    errors, seen = [], None
    while crowded.has_work:
        output, failed = crowded.step()
        errors += [(refused.request_id, refused.error) for refused in failed]
        for delta in output.deltas:
            if delta.request_id == "seen":
                seen = delta.embedding
            else:
                outputs[delta.request_id] += delta.token_ids
    crowded.scheduler.table.check_integrity()
    assert errors == [("bad", "ModelFailed")], errors
    assert not crowded.runner.cache.isnan().any(), "pages of the broken one are cleared"
    assert outputs["plain"] == lone["plain"][0]
    assert outputs["typical"] == lone["typical"][0]
    words = Tokenizer.load(folder)
    assert words.decode(outputs["choice"]) in ("ebb", "flow"), words.decode(outputs["choice"])
    assert re.fullmatch("[0-9]{9}", words.decode(outputs["regex"])), words.decode(outputs["regex"])
    with torch.inference_mode():
        hidden = (
            reference.model(torch.tensor([prompt], device="cuda"))
            .last_hidden_state[0]
            .double()
            .mean(0)
            .cpu()
        )
    likeness = F.cosine_similarity(hidden, torch.tensor(seen, dtype=torch.double), dim=0).item()
    print(f"  embedding against float32: cosine {likeness:.5f}")
    assert likeness > 0.999


def test_arrivals_and_aborts(tmp_path: Path) -> None:
    """Arrivals and aborts at random while steps are in flight; rows and pages agree all along, and
    at the end nothing is left."""
    folder = tmp_path
    random_llama(folder)
    core = load_core(
        EngineOptions(
            model=str(folder),
            kv_memory_bytes=2**23,
            max_requests=64,
            max_context=512,
            token_budget=256,
        )
    )
    draw, live, made = random.Random(1), set[str](), 0
    for step in range(3000):
        for _ in range(draw.choice((0, 0, 1, 3))):
            params = SamplingParams(
                temperature=float(made % 2), max_tokens=draw.randrange(1, 60), seed=made
            )
            core.submit(
                Submit(
                    str(made), [draw.randrange(2000) for _ in range(draw.randrange(1, 300))], params
                )
            )
            live.add(str(made))
            made += 1
        if live and draw.random() < 0.2:
            name = draw.choice(sorted(live))
            core.abort(Abort(name, "left"))
            live.discard(name)
        output, failed = core.step()
        assert not failed
        live -= {delta.request_id for delta in output.deltas if delta.finish_reason}
        if step % 50 == 0:
            core.scheduler.table.check_integrity()
    while core.has_work:
        core.step()
    core.scheduler.table.check_integrity()
