"""Families with mixtures of experts against Transformers in float32, on small random models."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import Answer, greedy, load_model, make_core, reference_agrees, run, take, watch
from tests.models.test_llama import prompt_logits, prompts
from tidemill.errors import CheckpointError
from tidemill.kernels import native
from tidemill.models.registry import model_class
from tidemill.quant import PLAIN
from tidemill.types.events import ExpertsUsed
from tidemill.types.wire import Submit
from tidemill.weights.checkpoint import open_checkpoint

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "rms_norm_eps": 1e-6, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 52,
        "mlp_only_layers": [1],
    },
    "Qwen3Moe": {
        "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "Qwen3Moe top-1": {  # weighted by the probability of the one expert
        "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": False,
    },
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "GraniteMoe": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.4, "logits_scaling": 3.0,
    },
    "Glm4Moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16, "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True,
    },
    "Dots1": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 0.6, "norm_topk_prob": False, "sliding_window": 40,
        "max_window_layers": 1,
    },
    "SolarOpen": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
    },
    "MiniMaxM2": {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 16, "rotary_dim": 8},
    "Ernie4_5_Moe": {
        "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1, "moe_layer_start_index": 1,
        "use_bias": False,
    },
    "GptOss": {
        "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 40, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 150000.0,
            "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip


def make(family: str, **more):
    """A random model. Routers with weights large enough to choose clearly."""
    import transformers

    torch.manual_seed(0)
    name = family.split()[0]
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES[family] | more)
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    for weight_name, weight in reference.named_parameters():
        if "norm" in weight_name:
            weight.data.normal_(1.0, 0.2)
        elif any(
            part in weight_name
            for part in ("bias", "sinks", ".gate.weight", "router", "shared_expert_gate")
        ):
            weight.data.normal_(0.0, 0.3)
    for buffer_name, buffer in [*reference.named_buffers(), *reference.named_parameters()]:
        if "e_score_correction_bias" in buffer_name:
            buffer.data.normal_(0.0, 0.3)
    return reference


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    reference = make(request.param)
    path = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(path)
    return reference, path


def check(reference, path, num_prompts: int, num_tokens: int, dtype: str = "float32") -> None:
    """Logits of the longest prompts, and tokens after all of them."""
    model = load_model(path, dtype)
    asked = prompts(num_prompts, model.config.vocab_size)
    with torch.inference_mode():
        for prompt in sorted(asked.values(), key=len)[-2:]:
            expected = reference(torch.tensor([prompt])).logits[0]
            assert (prompt_logits(model, prompt) - expected).abs().max() < 1e-3
    outputs = run(
        make_core(model), {name: (prompt, greedy(num_tokens)) for name, prompt in asked.items()}
    )
    results = [
        reference_agrees(reference, prompt, outputs[name].tokens) for name, prompt in asked.items()
    ]
    assert sum(agreed for agreed, _ in results) >= 0.98 * num_prompts * num_tokens


def test_tokens_and_logits_equal_transformers(saved):
    check(*saved, num_prompts=4, num_tokens=8)


@pytest.mark.slow
def test_many_tokens_equal_transformers(saved, backend):
    check(*saved, num_prompts=20, num_tokens=32)


def test_dummy_weights_fill_every_part(saved):
    """`--load-format dummy`: random weights of the right shapes."""
    checkpoint = open_checkpoint(saved[1])
    cls = model_class(checkpoint)
    model = cls.load(checkpoint, cls.read_config(checkpoint), PLAIN, random=True)
    assert prompt_logits(model, [5, 6, 7]).isfinite().all()


@pytest.mark.parametrize("family", ["Glm4Moe", "Dots1", "SolarOpen", "MiniMaxM2", "Ernie4_5_Moe"])
def test_scored_experts_do_not_depend_on_the_company(family, tmp_path):
    """Alone, among others, in chunks, cached: bit for bit."""
    make(family).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    asked = prompts(8, model.config.vocab_size)
    prompt = asked.pop(max(asked, key=lambda name: len(asked[name])))
    x = {"x": (prompt, greedy(8, logprobs=2, ignore_eos=True))}
    core = make_core(model)
    alone = run(core, x)["x"]
    others = {name: (tokens, greedy(6)) for name, tokens in asked.items()}
    assert run(make_core(model), others | x)["x"] == alone
    assert run(make_core(model, token_budget=7, max_requests=1), x)["x"] == alone
    cached = run(core, x)["x"]
    assert cached.last.num_cached > 0
    assert cached == alone


def test_a_forward_pass_is_recorded(saved):
    _, path = saved
    assert make_core(load_model(path)).runner.fallback == ""


# ---- GGUF

ARCHITECTURES = {
    "Mixtral": "llama", "Qwen2Moe": "qwen2moe", "Qwen3Moe": "qwen3moe", "Olmoe": "olmoe", "GraniteMoe": "granitemoe",
    "GptOss": "gpt-oss",
}  # fmt: skip
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "block_sparse_moe.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip


def gguf_tensors(reference) -> dict[str, np.ndarray]:
    """As llama.cpp's converter names and lays them out."""
    name_of = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    c, tensors = reference.config, {}
    is_oss, is_permuted = c.model_type == "gpt_oss", c.model_type in ("mixtral", "granitemoe")
    for name, weight in reference.state_dict().items():
        if name in name_of:
            tensors[name_of[name]] = weight
            continue
        _, _, layer, rest = name.split(".", 3)
        if ".experts." in rest:
            side, _, kind = rest.split(".")[-1].partition("_proj")
            values, ending = weight, "bias" if kind else "weight"
            if is_oss and not kind:
                values = weight.transpose(1, 2)
            if side == "down":
                tensors[f"blk.{layer}.ffn_down_exps.{ending}"] = values
            else:
                gate, up = (values[:, ::2], values[:, 1::2]) if is_oss else values.chunk(2, 1)
                tensors |= {
                    f"blk.{layer}.ffn_gate_exps.{ending}": gate,
                    f"blk.{layer}.ffn_up_exps.{ending}": up,
                }
            continue
        if rest.endswith("sinks"):
            tensors[f"blk.{layer}.attn_sinks.weight"] = weight
            continue
        stem, _, ending = rest.rpartition(".")
        if is_permuted and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = c.num_attention_heads if "q_proj" in stem else c.num_key_value_heads
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)
        short = LAYER_NAMES[stem]
        if is_oss and short == "ffn_norm":
            short = "post_attention_norm"
        tensors[f"blk.{layer}.{short}.{ending}"] = (
            weight.flatten() if short.endswith("inp_shexp") else weight
        )
    return {name: values.float().contiguous().numpy() for name, values in tensors.items()}


def write_gguf(path, reference, family: str, quantize=None, drop=(), **metadata):
    family = family.split()[0]
    c, arch = reference.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, arch)
    size = getattr(c, "moe_intermediate_size", c.intermediate_size)
    settings = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size, "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads, "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "expert_count": c.num_local_experts if hasattr(c, "num_local_experts") else c.num_experts,
        "expert_used_count": c.num_experts_per_tok, "rope.freq_base": float(c.rope_parameters["rope_theta"]),
    }  # fmt: skip
    if family.startswith("Qwen") or family == "GptOss":
        settings["expert_feed_forward_length"] = size
    if family == "Qwen2Moe":
        settings["expert_shared_feed_forward_length"] = c.shared_expert_intermediate_size
    if family == "GraniteMoe":
        settings |= {
            "embedding_scale": c.embedding_multiplier,
            "attention.scale": c.attention_multiplier,
        }
        settings |= {"residual_scale": c.residual_multiplier, "logit_scale": c.logits_scaling}
    if family in ("Qwen3Moe", "GptOss"):
        settings["attention.key_length"] = c.head_dim
    if family == "GptOss":
        rope = c.rope_parameters
        settings |= {
            "attention.sliding_window": c.sliding_window, "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }  # fmt: skip
    for key, value in (settings | metadata).items():
        writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    for name, values in gguf_tensors(reference).items():
        if name in drop:
            continue
        if quantize is not None and values.ndim > 1 and "ffn_gate_inp" not in name:
            writer.add_tensor(name, gguf.quants.quantize(values, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# In GGUF files every layer has experts, and Qwen3's weights are renormalised.
IN_GGUF = {
    "Qwen2Moe": {"mlp_only_layers": []}, "Qwen3Moe": {"decoder_sparse_step": 1}, "Qwen3Moe top-1": {"norm_topk_prob": True},
}  # fmt: skip


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_is_the_same_model(family, tmp_path):
    reference = make(family, **IN_GGUF.get(family, {}), num_hidden_layers=2)
    model = load_model(write_gguf(tmp_path / "m.gguf", reference, family))
    prompt = list(range(2, 100))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (prompt_logits(model, prompt) - expected).abs().max() < 1e-3
    assert (
        model.config.num_parameters
        <= sum(model.config.stored.values())
        < 1.1 * model.config.num_parameters
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1"])
def test_quantized_experts_of_a_gguf_stay_quantized(kind, tmp_path):
    """Multiplied in their own bits, they give what their values in float32 give, within the
    rounding of activations."""
    if native.lib is None:
        pytest.skip(native.why)
    reference = make(
        "Qwen2Moe", mlp_only_layers=[], moe_intermediate_size=32, shared_expert_intermediate_size=64
    )
    path = write_gguf(tmp_path / "q.gguf", reference, "Qwen2Moe", gguf.GGMLQuantizationType[kind])
    packed, plain = (
        prompt_logits(load_model(path, dtype), list(range(2, 60)))
        for dtype in ("quantized", "float32")
    )
    # a rounded logit may choose another expert
    assert (packed - plain).abs().median() < 0.02 * plain.abs().max()


# ---- mxfp4

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = torch.cat([VALUES, -VALUES])


def to_mxfp4(
    values: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random blocks and scales of a matrix of this shape, and what they mean, from the format's
    definition."""
    *rows, width = values.shape
    codes = torch.randint(0, 16, (*rows, width // 32, 32), generator=generator)
    scales = torch.randint(121, 127, (*rows, width // 32), generator=generator)
    meant = (VALUES[codes] * 2.0 ** (scales - 127.0)[..., None]).reshape(*rows, width)
    blocks = codes[..., ::2] | (codes[..., 1::2] << 4)
    return blocks.to(torch.uint8), scales.to(torch.uint8), meant


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """A gpt-oss in mxfp4, blocks and scales in different files; and the same in float32 by
    Transformers."""
    reference = make("GptOss")
    path, generator = tmp_path_factory.mktemp("mxfp4"), torch.Generator().manual_seed(3)
    reference.save_pretrained(path)
    stored, scales_of = load_file(path / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, meant = to_mxfp4(stored.pop(name).transpose(1, 2), generator)
        stored[f"{name}_blocks"], scales_of[f"{name}_scales"] = blocks, scales
        reference.get_parameter(name).data = meant.transpose(1, 2).contiguous()
    save_file(stored, path / "model.safetensors")
    save_file(scales_of, path / "more.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    return reference, path


def test_mxfp4_experts_are_their_values(mxfp4):
    reference, path = mxfp4
    prompt = list(range(2, 90))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (
        prompt_logits(load_model(path), prompt) - expected
    ).abs().max() < 1e-3 * expected.abs().max()
    if native.lib:
        model = load_model(path, "quantized")
        assert (
            prompt_logits(model, prompt) - expected
        ).abs().median() < 0.02 * expected.abs().max()
        assert model.config.stored["MXFP4"] == 3 * 3 * 5 * 64 * 96  # values, not bytes


def test_mxfp4_without_its_scales_is_refused(mxfp4, tmp_path):
    _, path = mxfp4
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((path / file).read_bytes())
    with pytest.raises(
        CheckpointError,
        match=r"layers.0.mlp.experts.down_proj in mxfp4, blocks or scales are missing",
    ):
        load_model(tmp_path)


# ---- other layouts, and files that are wrong


def rewrite(path, target, change, **config):
    """A copy of a checkpoint whose tensors went through `change`."""
    target.mkdir(exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(
        {name: values.contiguous() for name, values in tensors.items()},
        target / "model.safetensors",
    )
    settings = json.loads((path / "config.json").read_text()) | config
    (target / "config.json").write_text(
        json.dumps({key: value for key, value in settings.items() if value is not None})
    )
    return target


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    make("Qwen3Moe", num_hidden_layers=2).save_pretrained(path)
    return path


def test_stacked_experts_are_the_same_model(qwen3, tmp_path):
    """As Transformers 5 holds them in memory, and some files do."""

    def stack(tensors):
        prefix = "model.layers.1.mlp.experts"
        sides = {
            side: torch.stack(
                [tensors.pop(f"{prefix}.{expert}.{side}_proj.weight") for expert in range(8)]
            )
            for side in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat([sides["gate"], sides["up"]], 1)
        tensors[f"{prefix}.down_proj"] = sides["down"]

    stacked = rewrite(qwen3, tmp_path / "stacked", stack, num_local_experts=None, num_experts=8)
    prompt = list(range(2, 60))
    one, other = (prompt_logits(load_model(path), prompt) for path in (qwen3, stacked))
    assert torch.equal(one, other)


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
BROKEN = {
    "is missing": lambda tensors: tensors.pop(EXPERT),
    "has shape": lambda tensors: tensors.update({EXPERT: torch.zeros(32, 65)}),
    "has no place": lambda tensors: tensors.update(
        {EXPERT.replace(".3.", ".8."): torch.zeros(32, 64)}
    ),
    "another tensor has brought": lambda tensors: tensors.update(
        {"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(8, 64, 64)}
    ),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_wrong_expert_tensors_are_refused_by_name(problem, qwen3, tmp_path):
    broken = rewrite(qwen3, tmp_path / "broken", BROKEN[problem])
    name = (
        EXPERT.replace(".3.", ".[38].")
        if "brought" not in problem
        else "model.layers.1.mlp.experts"
    )
    with pytest.raises(CheckpointError, match=f"(?i)tensor {name}.*{problem}"):
        load_model(broken)


@pytest.mark.parametrize(
    "wrong", [{"scoring_func": "sigmoid"}, {"n_group": 4}, {"routed_scaling_factor": 2.5}]
)
def test_keys_of_other_routing_have_no_effect(wrong, qwen3, tmp_path):
    """As in Transformers: the family does not know them."""
    checkpoint = open_checkpoint(rewrite(qwen3, tmp_path / "other", lambda tensors: None, **wrong))
    config = model_class(checkpoint).read_config(checkpoint)
    assert config == load_model(qwen3).config


@pytest.mark.parametrize(
    "wrong", [{"expert_gating_func": 2}, {"expert_weights_scale": 2.5}, {"expert_group_count": 4}]
)
def test_other_routing_of_a_gguf_is_refused_by_name(wrong, tmp_path):
    reference = make("Qwen3Moe", num_hidden_layers=1, decoder_sparse_step=1)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", reference, "Qwen3Moe", **wrong))
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        model_class(checkpoint).read_config(checkpoint)


def test_a_gguf_without_an_expert_tensor_is_refused_by_name(tmp_path):
    reference = make("Mixtral", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", reference, "Mixtral", drop=["blk.0.ffn_up_exps.weight"])
    with pytest.raises(CheckpointError, match=r"tensor blk.0.ffn_up_exps.weight is missing"):
        load_model(path)


def test_memory_counts_experts(qwen3):
    config = load_model(qwen3).config
    stored = sum(values.numel() for values in load_file(qwen3 / "model.safetensors").values())
    small = 2 * 2 * 16  # norms of heads are not counted
    assert config.num_parameters == stored - small
    assert config.weight_bytes("bfloat16", True) == 2 * config.num_parameters
    # half of one layer's eight experts
    assert config.num_parameters - config.num_active_parameters == 4 * 3 * 64 * 32
    dense = replace(config, experts=())
    spec = config.experts[1]
    assert spec is not None
    more = config.activation_bytes(100, 1) - dense.activation_bytes(100, 1)
    assert more == 4 * 100 * (4 * (2 * 64 + 3 * 32) + 2 * 8 - 3 * 96)


# ---- batch invariance


@pytest.mark.parametrize(
    "kind",
    [
        "Qwen2Moe float32",
        "GptOss float32",
        "Qwen2Moe Q4_1",
        "Qwen3Moe Q4_0",
        "Mixtral float32",
        "Olmoe float32",
        "GraniteMoe float32",
    ]
    + ["Qwen3Moe top-1 float32", "Qwen3Moe top-1 Q4_0"]
    + [
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in ("Qwen2Moe torch", "Mixtral Q4_0", "Qwen3Moe float32", "Olmoe Q8_0")
    ],
)
def test_tokens_do_not_depend_on_the_batch(kind, tmp_path, monkeypatch):
    """Alone, among others, in chunks, cached, preempted: the same bits."""
    family, _, how = kind.rpartition(" ")
    if how == "torch":
        monkeypatch.setattr(native, "lib", None)
    elif native.lib is None:
        pytest.skip(native.why)
    reference = make(
        family,
        num_hidden_layers=2,
        **(
            {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
            if family == "Qwen2Moe"
            else {}
        )
        | IN_GGUF.get(family, {}),
    )
    if how.startswith("Q"):
        model = load_model(
            write_gguf(tmp_path / "q.gguf", reference, family, gguf.GGMLQuantizationType[how]),
            "quantized",
        )
    else:
        reference.save_pretrained(tmp_path)
        model = load_model(tmp_path)
    crowd = {name: (prompt, greedy(8, logprobs=2)) for name, prompt in prompts(9, 256).items()}
    asked = {"x": (list(range(3, 93)), greedy(12, logprobs=2))}
    alone = run(make_core(model), asked)["x"]
    assert run(make_core(model), crowd | asked)["x"] == alone
    for chunk in (1, 7):
        assert run(make_core(model, token_budget=chunk, max_requests=1), asked)["x"] == alone
    core = make_core(model, token_budget=64)
    run(core, {"before": (asked["x"][0][:50], greedy(2))})
    cached = run(core, asked)["x"]
    assert cached.last.num_cached == 48
    assert cached == alone
    assert preempted(make_core(model, token_budget=64, prefix_caching=False), asked) == alone


def preempted(core, asked) -> Answer:
    prompt, params = asked["x"]
    core.submit(Submit("x", prompt, params))
    answers, num_preempted = {"x": Answer()}, 0
    while core.has_work:
        take(core, answers)
        request = next((one for one in core.scheduler.running if one.request_id == "x"), None)
        if request and request.num_output in (0, 5) and request.epoch < 2:
            core.scheduler.table.preempt(request, "test")
            num_preempted += 1
    assert num_preempted == 2
    return answers["x"]


# ---- statistics


def test_tokens_of_experts_are_an_event(saved):
    """Every token goes to as many experts as the configuration says, in every layer that has them.
    The last layer computes those that yield logits."""
    model = load_model(saved[1])
    core = make_core(model, speculate="off")  # drafts are computed, and counted, too
    seen = watch(core)
    run(core, {"x": (list(range(3, 33)), greedy(70)), "y": (list(range(9, 40)), greedy(5))})
    counted = [event for event in seen if isinstance(event, ExpertsUsed)]
    assert [event.num_steps for event in counted] == [64, 6]
    num_read = 70 + 5
    num_tokens = num_read + 29 + 30
    for layer, spec in enumerate(model.config.experts):
        totals = [
            sum(counts)
            for event in counted
            for number, counts in event.tokens_of
            if number == layer
        ]
        num = num_read if layer == model.config.num_layers - 1 else num_tokens
        assert sum(totals) == (0 if spec is None else num * spec.top_k)
