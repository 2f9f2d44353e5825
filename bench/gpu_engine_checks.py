"""The engine on the GPU at hand, held against a reference, and bit for bit against itself. Run by bench/gpu.py."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from safetensors.torch import load_file, save_file

from bench.gpu_checks import has_flash
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.events import ExpertsUsed, StepPlanned
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import Beams, Grammar, SamplingParams
from tidemill.wire import Abort, Submit


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
    core.scheduler.check_integrity()
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

    kinds = [(runner._mixed_graphs, runner._mixed_step), (runner._decode_graphs, runner._decode_step)]
    kinds += [] if runner._last is None else [(runner._last.graphs, runner._last.step)]
    for graphs, step in kinds:
        for key in graphs:
            graphs[key] = eager(graphs[key], step(*key))
    return core


def assert_near(reference: Any, core: EngineCore, prompt: list[int]) -> None:
    """Log probabilities of a prompt are as near to float32 as those of Transformers in bfloat16 (which `reference` is then)."""
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
    print(f"  error of {len(targets)} log probabilities against float32: {error:.4f}; Transformers in bfloat16: {theirs:.4f}")
    assert error < 1.3 * theirs


def check_engine() -> None:
    """Near Transformers; and the same bits alone, among 255 others, in chunks, cached, preempted, with and without graphs."""
    folder = Path(tempfile.mkdtemp())
    reference = random_llama(folder)
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    def core(**options: Any) -> Any:
        return load_core(EngineOptions(model=str(folder), **({"kv_memory_bytes": 2**28, "max_requests": 256} | options)))

    prompt = ids(700)
    assert_near(reference, core(), prompt)
    for params in (
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=40, ignore_eos=True, logprobs=2, seed=3),
        SamplingParams(n=8, max_tokens=40, ignore_eos=True, logprobs=2, beams=Beams(8)),
    ):
        x = {"x": (prompt, params)}
        whole = core()
        lone = ask(whole, x)["x"]
        assert ask(whole, x)["x"] == lone, "cached"
        others = {
            f"o{i}": (ids(1 + (i * 37) % 900), SamplingParams(temperature=float(i % 2), max_tokens=5 + i % 60, seed=i))
            for i in range(255)
        }
        assert ask(core(), others | x)["x"] == lone, "among 255 others"
        assert ask(core(token_budget=64, max_requests=32), x)["x"] == lone, "in chunks of 64"
        tight = core(kv_memory_bytes=2**23, max_context=1024, max_requests=64)
        crowd = dict(list(others.items())[:40])
        assert ask(tight, crowd | x)["x"] == lone, "preempted"
        family = {f"s{i}": (prompt[: 600 + i % 3] + ids(5), SamplingParams(temperature=0.0, max_tokens=30)) for i in range(60)}
        assert ask(core(), family | x)["x"] == lone, "among 60 that begin like it"
        assert ask(without_graphs(core()), x)["x"] == lone, "without graphs"


def check_families() -> None:
    """Layers that differ from Llama's: near Transformers, and the same bits in any company."""
    import transformers

    common = {
        "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 1400, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.05,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    kinds = ["sliding_attention", "full_attention"] * 2
    factors = [1 + i / 8 for i in range(48)]
    longrope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": [1.0] * 48,
        "long_factor": factors, "original_max_position_embeddings": 512,
    }  # fmt: skip
    draw = random.Random(1)
    families: dict[str, dict[str, Any]] = {
        "Qwen2": {},
        "Mistral": {"sliding_window": 300, "head_dim": 128},
        "Gemma2": {"sliding_window": 300, "head_dim": 128, "query_pre_attn_scalar": 100, "layer_types": kinds},
        "Gemma3": {"sliding_window": 300, "head_dim": 256, "layer_types": kinds},
        "Qwen3": {"head_dim": 128},
        "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
        "Phi3": {"rope_parameters": longrope, "original_max_position_embeddings": 512, "pad_token_id": 0},
        "Phi": {},
        "Olmo": {"clip_qkv": 1.5},
        "Olmo2": {"pad_token_id": 0},
        "Granite": {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
        "GPT2": {"n_embd": 512, "n_layer": 4, "n_head": 4, "n_positions": 2048, "vocab_size": 2000, "initializer_range": 0.05},
        "Bloom": {"hidden_size": 512, "n_layer": 4, "n_head": 4, "vocab_size": 2000, "initializer_range": 0.05},
        # By FlexAttention:
        "Bloom with heads of 96": {"hidden_size": 384, "n_layer": 4, "n_head": 4, "vocab_size": 2000, "initializer_range": 0.05},
        "Mistral with heads of 96": {"sliding_window": 300, "head_dim": 96},
    }
    for name, more in families.items():
        family = name.split()[0]
        torch.manual_seed(0)
        sizes = more if family in ("GPT2", "Bloom") else common | more
        config = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")(**sizes)
        made = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
        check_family(name, made, [draw.randrange(2000) for _ in range(700)])


def check_family(name: str, made: Any, prompt: list[int]) -> EngineCore:
    folder = Path(tempfile.mkdtemp())
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
        others = {f"o{i}": (prompt[: 20 * i + 1], SamplingParams(max_tokens=20, seed=i)) for i in range(30)}
        assert ask(core, others | x)["x"] == lone, f"{name}: among others"
        # Beyond windows: without a common prefix, and with one of which the second has given back what the third still sees.
        texts = prompt[::-1] + prompt[:250], prompt[100:] + prompt[:330], prompt[100:] + prompt[:180]
        far = {f"f{i}": (text, x["x"][1]) for i, text in enumerate(texts)}
        together = ask(core, far)
        for one, request in far.items():
            core.scheduler.kv.clear_prefixes()
            assert ask(core, {one: request})[one] == together[one], f"{name}: long ones together"
    chunked = load_core(dataclasses.replace(options, token_budget=64, prefix_caching=False))
    assert ask(chunked, x)["x"] == lone, f"{name}: in chunks"
    return core


def check_moe() -> None:
    """Families with experts, whose routers have weights large enough to choose clearly: as check_families."""
    import transformers

    common = {
        "vocab_size": 2000, "hidden_size": 512, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.05, "head_dim": 128,
        "experts_implementation": "eager",
    }  # fmt: skip
    yarn = {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 150000.0,
        "original_max_position_embeddings": 256,
    }  # fmt: skip
    shared = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 320, "mlp_only_layers": [1]}
    draw = random.Random(2)
    families: dict[str, dict[str, Any]] = {
        "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "Qwen2Moe": {"num_experts": 12, "num_experts_per_tok": 3} | shared,
        "Qwen3Moe": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 192, "norm_topk_prob": True},
        "GptOss": {
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "head_dim": 64,
            "sliding_window": 128,
            "rope_parameters": yarn,
        },
    }
    for name, more in families.items():
        torch.manual_seed(0)
        made = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**common | more))
        for weight_name, weight in made.named_parameters():
            if "bias" in weight_name or "sinks" in weight_name or ".gate.weight" in weight_name or "router" in weight_name:
                weight.data.normal_(0.0, 0.3)
        core = check_family(name, made, [draw.randrange(2000) for _ in range(700)])
        check_expert_counts(name, core)


def check_expert_counts(name: str, core: EngineCore) -> None:
    """Events say how many tokens experts got: every one that a step computed, and none that filled a graph up."""
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
    expected = {layer: num_tokens * spec.top_k for layer, spec in enumerate(core.model_config.experts) if spec}
    assert totals == expected, f"{name}: tokens of experts {totals}, not {expected}"


def check_fast_math() -> None:
    """Prompts by flash-attn-4, whether it is faster or not."""
    folder = Path(tempfile.mkdtemp())
    reference = random_llama(folder)
    core = load_core(EngineOptions(model=str(folder), kv_memory_bytes=2**28, max_requests=64, fast_math=True))
    runner: Any = core.runner
    print(f"  flash-attn-4: {runner.flash.why}")
    if has_flash() and not runner.flash.is_taken:
        with torch.inference_mode():
            runner._take_flash()
    draw = random.Random(5)
    assert_near(reference, core, [draw.randrange(2000) for _ in range(1900)])


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


def check_nothing_compiles() -> None:
    """Once an engine is ready: batches of odd sizes, all that sampling may do, prompts of odd lengths, page copies."""
    from tests.helpers import byte_tokenizer

    folder = Path(tempfile.mkdtemp())
    random_llama(folder)
    byte_tokenizer(folder)
    core = load_core(EngineOptions(model=str(folder), kv_memory_bytes=2**28, max_requests=80, max_context=2048))
    asked = [
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, max_tokens=5),
        SamplingParams(typical_p=0.7, min_p=0.01, max_tokens=5, logprobs=3),
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=20),
        SamplingParams(
            max_tokens=5, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={5: 1.0}, min_tokens=2
        ),
        SamplingParams(max_tokens=30, grammar=Grammar("regex", "[0-9]{9}")),
        SamplingParams(max_tokens=4, n=3, top_p=0.5),
        SamplingParams(max_tokens=5, allowed_token_ids=(5, 6, 7, 8), bad_word_ids=((5,), (6, 7))),
        SamplingParams(max_tokens=1, pooling="mean"),
    ]
    core.compile_grammar(Grammar("regex", "[0-9]{9}"))
    draw = random.Random(0)
    with nothing_compiles():
        for num in (1, 2, 3, 5, 7, 17, 33, 64, 79):
            for i in range(num):
                params = asked[i % len(asked)] if num > 5 else asked[0]
                prompt = [draw.randrange(2, 300) for _ in range(draw.choice((1, 3, 17, 63, 64, 65, 700)))]
                core.submit(Submit(f"{num}.{i}", prompt, params, eos_token_ids=[1]))
            while core.has_work:
                assert not core.step()[1]


def check_odd_requests() -> None:
    """Requests that ask for more than tokens, or break, each among others that notice nothing."""
    from tests.helpers import byte_tokenizer

    folder = Path(tempfile.mkdtemp())
    reference = random_llama(folder)
    byte_tokenizer(folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def core() -> EngineCore:
        return load_core(EngineOptions(model=str(folder), kv_memory_bytes=2**26, max_requests=32, max_context=1024))

    greedy, prompt = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), list(range(20, 320))
    asked = {
        "plain": (prompt, greedy),
        "typical": (prompt, SamplingParams(typical_p=0.5, max_tokens=20, seed=1, ignore_eos=True)),
        "choice": (prompt, SamplingParams(max_tokens=40, seed=2, grammar=Grammar("choice", '["ebb", "flow"]'))),
        "regex": (prompt, SamplingParams(temperature=0.0, max_tokens=40, grammar=Grammar("regex", "[0-9]{9}"), logprobs=1)),
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
    crowded.scheduler.check_integrity()
    assert errors == [("bad", "ModelFailed")], errors
    assert not crowded.runner.cache.isnan().any(), "pages of the broken one are cleared"
    assert outputs["plain"] == lone["plain"][0]
    assert outputs["typical"] == lone["typical"][0]
    words = Tokenizer.load(folder)
    assert words.decode(outputs["choice"]) in ("ebb", "flow"), words.decode(outputs["choice"])
    assert re.fullmatch("[0-9]{9}", words.decode(outputs["regex"])), words.decode(outputs["regex"])
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([prompt], device="cuda")).last_hidden_state[0].double().mean(0).cpu()
    likeness = F.cosine_similarity(hidden, torch.tensor(seen, dtype=torch.double), dim=0).item()
    print(f"  embedding against float32: cosine {likeness:.5f}")
    assert likeness > 0.999


def stress_engine(num_steps: int = 3000) -> None:
    """Arrivals and aborts at random while steps are in flight; rows and pages agree all along, and at the end nothing is left."""
    folder = Path(tempfile.mkdtemp())
    random_llama(folder)
    core = load_core(EngineOptions(model=str(folder), kv_memory_bytes=2**23, max_requests=64, max_context=512, token_budget=256))
    draw, live, made = random.Random(1), set[str](), 0
    for step in range(num_steps):
        for _ in range(draw.choice((0, 0, 1, 3))):
            params = SamplingParams(temperature=float(made % 2), max_tokens=draw.randrange(1, 60), seed=made)
            core.submit(Submit(str(made), [draw.randrange(2000) for _ in range(draw.randrange(1, 300))], params))
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
            core.scheduler.check_integrity()
    while core.has_work:
        core.step()
    core.scheduler.check_integrity()
    print(f"  {made} requests in {num_steps} steps, all pages free")
