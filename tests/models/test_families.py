"""Each family against Transformers in float32, on small random models; contexts go beyond every
window."""

import json

import gguf
import numpy as np
import pytest
import torch

from tests.helpers import Answer, greedy, load_model, make_core, reference_agrees, run, take
from tests.models.test_llama import prompt_logits, prompts
from tests.weights.test_gguf import arch_of, write_gguf
from tests.weights.test_safetensors import edit_config, edit_weights, fails
from tidemill.errors import CheckpointError
from tidemill.kernels import native
from tidemill.models.registry import model_class
from tidemill.quant import PLAIN
from tidemill.types.wire import Submit
from tidemill.weights.checkpoint import open_checkpoint

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "rms_norm_eps": 1e-6, "pad_token_id": 0,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
# of 12 rotated dimensions of 16
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1.5, 2.0, 3.0, 4.0, 6.0, 8.0]
FAMILIES = {
    "Qwen2": {},
    "Qwen2 with windows": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
    "Qwen3": {"head_dim": 24, "num_attention_heads": 6, "hidden_size": 48},
    "Qwen3 tied": {"head_dim": 16, "tie_word_embeddings": True},
    "Mistral": {"sliding_window": 40},
    "SmolLM3": {"no_rope_layers": [1, 1, 1, 0]},
    "Gemma2": {
        "head_dim": 16, "sliding_window": 40, "layer_types": LAYERS, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "Gemma3": {"head_dim": 24, "sliding_window": 33, "layer_types": LAYERS, "query_pre_attn_scalar": 30},
    "Gemma3 with vision": {
        "head_dim": 16, "sliding_window": 33, "num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}
    },
    "Phi3": {"sliding_window": 40},
    "Phi3 with longrope": {
        "tie_word_embeddings": True, "original_max_position_embeddings": 256, "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "short_factor": SHORT,
            "long_factor": LONG, "original_max_position_embeddings": 256,
        },
    },
    "Phi": {"layer_norm_eps": 1e-3},
    "GPT2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 100},
    "BitNet": {},
    "Olmo": {},
    "Olmo with clipping": {"clip_qkv": 0.7, "tie_word_embeddings": True},
    "Olmo2": {},
    "Olmo3": {
        "sliding_window": 40, "layer_types": LAYERS,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64
            },
        },
    },
    "Gemma": {"head_dim": 24},
    "Cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.25},
    "Cohere2": {"sliding_window": 40, "layer_types": LAYERS, "logit_scale": 0.5},
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16, "rms_norm_eps": 1e-5},
    "Exaone4": {"sliding_window": 40, "layer_types": LAYERS},
    "Exaone4 without windows": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "SeedOss": {"head_dim": 24, "attention_out_bias": True},
    "Starcoder2": {"sliding_window": 40},
    "Ernie4_5": {"head_dim": 16},
    "Arcee": {},
    "Nemotron": {"hidden_act": "relu2"},
    "Helium": {"head_dim": 16},
    "StableLm": {"use_qkv_bias": True},
    "StableLm in parallel": {"use_parallel_residual": True},
    "GPTNeoX": {},
    "GPTNeoX in sequence": {"use_parallel_residual": False, "tie_word_embeddings": True},
    "Granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0,
        "attention_bias": True, "mlp_bias": True,
    },
}  # fmt: skip
# What GGUF files cannot say is as their readers have it: scales of scores, layers without rotation.
IN_GGUF = {
    "Qwen2": {}, "Qwen3": {}, "Qwen3 tied": {}, "SmolLM3": {}, "Gemma2": {"query_pre_attn_scalar": 16},
    "Gemma3": {"query_pre_attn_scalar": 24}, "Phi": {}, "Phi3": {}, "Phi3 with longrope": {}, "GPT2": {}, "Olmo2": {},
    "Olmo3": {}, "Olmo": {}, "Olmo with clipping": {}, "Granite": {"attention_bias": False, "mlp_bias": False},
    "Gemma": {}, "Cohere": {}, "Cohere2": {}, "Glm4": {}, "Exaone4": {}, "Exaone4 without windows": {},
    "SeedOss": {"attention_out_bias": False}, "Starcoder2": {}, "Arcee": {}, "Nemotron": {}, "StableLm": {},
    "StableLm in parallel": {},
}  # fmt: skip
# Of the tests that take long, these are in `make test`, the others in `make test-slow`.
OFTEN = ("Phi", "Olmo with clipping", "Phi3 with longrope", "GPT2", "Olmo2", "Granite")
CONFIGS = {"Gemma3": "Gemma3TextConfig", "GPT2": "GPT2Config"}
MODELS = {"GPT2": "GPT2LMHeadModel", "Gemma3 with vision": "Gemma3ForConditionalGeneration"}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


def make(family, **more):
    import transformers

    name = family.split()[0]
    sizes = (
        {"vocab_size": 256, "initializer_range": 0.2, "tie_word_embeddings": True}
        if name == "GPT2"
        else SIZES
    )
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(
        **sizes | FAMILIES[family] | more
    )
    if family == "Gemma3 with vision":
        config = transformers.Gemma3Config(
            text_config=config, vision_config=VISION, mm_tokens_per_image=4
        )
    torch.manual_seed(0)
    reference = (
        getattr(transformers, MODELS.get(family, f"{name}ForCausalLM"))(config).eval().float()
    )
    for weight_name, weight in reference.named_parameters():
        is_norm = weight_name.endswith("weight") and (
            "norm" in weight_name or ".ln_" in weight_name
        )
        if is_norm or weight_name.endswith("bias"):
            weight.data.normal_(1.0 if is_norm and "Gemma" not in name else 0.0, 0.2)
    return reference


def gguf_keys(config):
    """Keys of a family's own."""
    c, arch = config, arch_of(config)
    windows = (
        {f"{arch}.attention.sliding_window": c.sliding_window or 0}
        if hasattr(c, "sliding_window")
        else {}
    )
    keys = (
        {f"{arch}.attention.key_length": c.head_dim}
        if arch in ("qwen3", "gemma2", "gemma3")
        else {}
    )
    if c.model_type in ("gemma2", "gemma3_text", "olmo3"):
        pattern = [kind == "sliding_attention" for kind in c.layer_types]
        keys |= {**windows, f"{arch}.attention.sliding_window_pattern": pattern}
    if arch == "gemma2":
        keys |= {"gemma2.attn_logit_softcapping": c.attn_logit_softcapping}
        keys |= {"gemma2.final_logit_softcapping": c.final_logit_softcapping}
    if c.model_type == "olmo3":
        keys |= {"olmo2.rope.scaling.type": "yarn", "olmo2.rope.scaling.factor": 4.0}
        keys |= {"olmo2.rope.scaling.original_context_length": 64}
    if arch == "phi3":
        keys |= windows | {
            "phi3.rope.scaling.original_context_length": c.original_max_position_embeddings
        }
        keys |= (
            {"phi3.rope.scaling.attn_factor": 1.118033988749895}
            if c.rope_parameters["rope_type"] == "longrope"
            else {}
        )
    if arch == "olmo" and c.clip_qkv:
        keys["olmo.attention.clamp_kqv"] = c.clip_qkv
    if arch in ("gemma", "seed_oss", "glm4"):
        keys[f"{arch}.attention.key_length"] = c.head_dim
    if arch in ("cohere2", "exaone4") and c.sliding_window:
        pattern = [kind == "sliding_attention" for kind in c.layer_types]
        keys |= windows | {f"{arch}.attention.sliding_window_pattern": pattern}
    if arch in ("command-r", "cohere2"):
        keys[f"{arch}.logit_scale"] = c.logit_scale
    if arch == "starcoder2":
        keys |= windows
    if arch == "stablelm":
        keys["stablelm.use_parallel_residual"] = c.use_parallel_residual
    if arch == "granite":
        keys |= {
            "granite.embedding_scale": c.embedding_multiplier,
            "granite.attention.scale": c.attention_multiplier,
        }
        keys |= {
            "granite.residual_scale": c.residual_multiplier,
            "granite.logit_scale": c.logits_scaling,
        }
    return keys


def save(family, how, path):
    """The model and where it is."""
    reference = make(family, **(IN_GGUF[family] if how == "gguf" else {}))
    if how == "safetensors":
        reference.save_pretrained(path)
        return reference, path
    tensors = (
        {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
        if "longrope" in family
        else {}
    )
    extra = {name: np.array(values, np.float32) for name, values in tensors.items()}
    return reference, write_gguf(
        path / "model.gguf", reference, extra=extra, strings=gguf_keys(reference.config)
    )


ALL = [(family, "safetensors") for family in FAMILIES] + [(family, "gguf") for family in IN_GGUF]


@pytest.fixture(scope="module", params=ALL, ids="-".join)
def saved(request, tmp_path_factory):
    return save(*request.param, tmp_path_factory.mktemp("family"))


@pytest.mark.parametrize(
    ("num_prompts", "num_tokens"), [(5, 8), pytest.param(20, 32, marks=pytest.mark.slow)]
)
def test_tokens_and_logits_equal_transformers(saved, num_prompts, num_tokens):
    reference, path = saved
    model = load_model(path)
    asked = prompts(num_prompts, model.config.vocab_size)
    with torch.inference_mode():
        for prompt in sorted(asked.values(), key=len)[-3:]:
            expected = reference(torch.tensor([prompt])).logits[0]
            assert (prompt_logits(model, prompt, max_context=256) - expected).abs().max() < 1e-3
    core = make_core(model, max_context=256)
    assert core.runner.fallback == ("" if native.lib else core.runner.fallback)
    outputs = run(core, {name: (prompt, greedy(num_tokens)) for name, prompt in asked.items()})
    results = [
        reference_agrees(reference, prompt, outputs[name].tokens) for name, prompt in asked.items()
    ]
    assert sum(agreed for agreed, _ in results) >= 0.98 * num_prompts * num_tokens


@pytest.fixture
def folder(request, tmp_path):
    make(request.param).save_pretrained(tmp_path)
    return tmp_path


def mostly_slow(families):
    return [
        pytest.param(family, marks=[] if family in OFTEN else pytest.mark.slow)
        for family in families
    ]


@pytest.mark.parametrize("folder", mostly_slow(FAMILIES), indirect=True)
def test_without_compiled_kernels(folder, monkeypatch):
    prompt = list(range(3, 73))
    compiled = prompt_logits(load_model(folder), prompt, max_context=256)
    monkeypatch.setattr(native, "lib", None)
    model = load_model(folder)
    assert (prompt_logits(model, prompt, max_context=256) - compiled).abs().max() < 1e-3
    core = make_core(model, max_context=256)
    chunked = make_core(model, max_context=256, token_budget=8, max_requests=1)
    asked = {"x": (prompt, greedy(4, logprobs=2))}
    assert run(core, asked | {"y": (prompt[5:], greedy(4))})["x"] == run(chunked, asked)["x"]


@pytest.mark.parametrize("folder", mostly_slow(FAMILIES), indirect=True)
def test_tokens_do_not_depend_on_the_company(folder):
    """Alone, among others, in chunks, cached, preempted: bit for bit."""
    model = load_model(folder)
    asked = prompts(12, model.config.vocab_size)
    longest = max(asked, key=lambda name: len(asked[name]))
    prompt = asked.pop(longest)
    x = {"x": (prompt, greedy(10, logprobs=2, ignore_eos=True))}
    core = make_core(model)
    alone = run(core, x)["x"]
    others = {name: (tokens, greedy(6)) for name, tokens in asked.items()}
    assert run(make_core(model), others | x)["x"] == alone
    assert run(make_core(model, token_budget=7, max_requests=1), x)["x"] == alone
    cached = run(core, x)["x"]
    assert cached.last.num_cached >= 128
    assert cached == alone
    core, answers, preempted = make_core(model, token_budget=64), {"x": Answer()}, 0
    core.submit(Submit("x", *x["x"]))
    while core.has_work:
        take(core, answers)
        request = next(iter(core.scheduler.running), None)
        if request and (preempted == 0 or request.num_output >= 5) and preempted < 2:
            core.scheduler.table.preempt(request, "test")
            preempted += 1
    assert preempted == 2
    assert answers["x"] == alone


@pytest.mark.parametrize("how", ["safetensors", "gguf"])
def test_the_longest_context_decides_longropes_factors(how, tmp_path):
    """Transformers goes by the length of each sequence: below the original context its short
    factors are replaced to compare."""
    family = "Phi3 with longrope"
    reference, path = save(family, how, tmp_path)
    rope = FAMILIES[family]["rope_parameters"]
    always_long = make(family, rope_parameters=rope | {"short_factor": LONG})
    model = load_model(path)
    assert "256" in model.config.notes[0]
    prompt = [token for tokens in prompts(8, 256).values() for token in tokens]
    with torch.inference_mode():
        for length, max_context, of in (
            (100, 256, reference),
            (100, 257, always_long),
            (300, 1024, reference),
        ):
            expected = of(torch.tensor([prompt[:length]])).logits[0]
            assert (
                prompt_logits(model, prompt[:length], max_context=max_context) - expected
            ).abs().max() < 1e-3
        short, long = (of(torch.tensor([prompt[:100]])).logits for of in (reference, always_long))
        assert (short - long).abs().max() > 0.1


def test_older_files_say_longrope_differently(tmp_path):
    make("Phi3 with longrope").save_pretrained(tmp_path)
    newer = load_model(tmp_path).config
    rope = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    edit_config(
        tmp_path,
        rope_parameters=None,
        rope_scaling=rope,
        rope_theta=10000.0,
        partial_rotary_factor=0.75,
    )
    assert load_model(tmp_path).config == newer


@pytest.mark.parametrize("folder", ["Phi3", "GPT2"], indirect=True)
def test_random_weights_of_the_right_shapes(folder):
    checkpoint = open_checkpoint(folder)
    cls = model_class(checkpoint)
    model = cls.load(checkpoint, cls.read_config(checkpoint), PLAIN, random=True)
    logits = prompt_logits(model, [5, 6, 7])
    assert logits.isfinite().all()
    assert logits.std() > 0.1


@pytest.mark.parametrize("family", ["Phi3", "GPT2"])
def test_fused_matrices_stay_quantized(family, tmp_path):
    """Pieces of a quantized matrix are its rows."""
    if native.lib is None:
        pytest.skip(native.why)
    reference = make(
        family, **({"n_inner": 128} if family == "GPT2" else {"intermediate_size": 128})
    )
    file = write_gguf(
        tmp_path / "q.gguf",
        reference,
        quantize=gguf.GGMLQuantizationType.Q8_0,
        strings=gguf_keys(reference.config),
    )
    quantized, exact = load_model(file, "quantized"), load_model(file)
    linears = [
        layer.weight for block in quantized.blocks for layer in (block.attn.qkv, block.mlp.down)
    ]
    assert {type(linear).__name__ for linear in linears} == {"QuantizedPanels"}
    prompt = list(range(5, 65))
    one, other = (prompt_logits(model, prompt) for model in (quantized, exact))
    assert (one - other).norm() < 0.1 * other.norm()


def test_first_ggufs_of_phi_hold_q_k_and_v_in_one_matrix(tmp_path):
    reference = make("Phi", num_key_value_heads=4)
    newer, fused = write_gguf(tmp_path / "new.gguf", reference), {}
    parts = [
        f"blk.{layer}.attn_{part}.{kind}"
        for layer in range(4)
        for kind in ("weight", "bias")
        for part in "qkv"
    ]
    for i in range(0, len(parts), 3):
        layer = reference.model.layers[i // 6].self_attn
        some = [
            getattr(getattr(layer, f"{part}_proj"), parts[i].rpartition(".")[2]) for part in "qkv"
        ]
        fused[parts[i].replace("attn_q", "attn_qkv")] = torch.cat(some).detach().numpy()
    older = write_gguf(tmp_path / "old.gguf", reference, drop=parts, extra=fused)
    one, other = (prompt_logits(load_model(path), list(range(5, 65))) for path in (newer, older))
    assert torch.equal(one, other)


def test_a_bias_of_a_head_that_is_the_table_is_refused(tmp_path):
    make("Phi").save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    assert not load_model(tmp_path).config.tie_embeddings, "the stored head has values of its own"
    edit_weights(tmp_path, pop("lm_head.weight"))
    fails(tmp_path, "lm_head.bias has no place")


def test_gpt2_files_without_the_prefix(tmp_path):
    make("GPT2").save_pretrained(tmp_path)
    prompt = list(range(5, 65))
    named = prompt_logits(load_model(tmp_path), prompt)

    def rename(weights):
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)
        weights["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # a causal mask

    edit_weights(tmp_path, rename)
    assert torch.equal(prompt_logits(load_model(tmp_path), prompt), named)


@pytest.mark.parametrize("folder", ["Gemma3 with vision"], indirect=True)
def test_newer_files_name_the_text_model_differently(folder):
    prompt = list(range(5, 65))
    model = load_model(folder)
    assert "vision tower" in model.config.notes[0]
    text = make("Gemma3 with vision").model.language_model
    assert sum(model.config.stored.values()) == sum(weight.numel() for weight in text.parameters())
    older = prompt_logits(model, prompt)

    def rename(weights):
        for name in list(weights):
            newer = name.replace("language_model.model.", "language_model.", 1)
            weights[f"model.{newer}"] = weights.pop(name)

    edit_weights(folder, rename)
    assert torch.equal(prompt_logits(load_model(folder), prompt), older)


@pytest.mark.parametrize("name", ["language_model.lm_head.weight", "lm_head.weight"])
@pytest.mark.parametrize("in_text", [True, False, None])
def test_gemma3_with_vision_and_a_head_of_its_own(name, in_text, tmp_path):
    """Of the two places that say whether the head is the embeddings' table, Transformers goes by
    the outer one; a stored head with other values counts, whatever they say."""
    reference = make("Gemma3 with vision")
    reference.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text.pop("tie_word_embeddings", None)
    prompt, head = list(range(5, 65)), torch.randn(reference.lm_head.weight.shape) * 0.2
    edit_weights(tmp_path, lambda weights: weights.update({name: head}))
    for outer in (False, True, None):
        inner = {} if in_text is None else {"tie_word_embeddings": in_text}
        edit_config(tmp_path, tie_word_embeddings=outer, text_config=text | inner)
        expected = type(reference).from_pretrained(tmp_path).eval()
        with torch.inference_mode():
            logits = expected(torch.tensor([prompt])).logits[0]
        assert torch.equal(expected.lm_head.weight, head)
        assert (
            prompt_logits(load_model(tmp_path), prompt, max_context=256) - logits
        ).abs().max() < 1e-3


@pytest.mark.parametrize("size", ["4b", "27b"])
def test_gemma3s_configurations_as_published_leave_much_out(size, tmp_path):
    import transformers

    text = {
        "4b": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "27b": {
            "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
            "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }[size]  # fmt: skip
    settings = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    checkpoint = open_checkpoint(tmp_path)
    ours, theirs = (
        model_class(checkpoint).read_config(checkpoint),
        transformers.Gemma3TextConfig(**text),
    )
    assert (ours.num_heads, ours.num_kv_heads) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert (ours.vocab_size, ours.max_context, ours.norm_eps) == (
        262208,
        131072,
        theirs.rms_norm_eps,
    )
    assert ours.head_dim == theirs.head_dim
    assert ours.tie_embeddings
    assert ours.act == "gelu_tanh"
    for spec, kind in zip(ours.layers, theirs.layer_types, strict=True):
        rope = theirs.rope_parameters[kind]
        assert spec.window == (1024 if kind == "sliding_attention" else 0)
        assert spec.scale == theirs.query_pre_attn_scalar**-0.5
        assert spec.rotation.theta == rope["rope_theta"]
        assert (spec.rotation.scaling.factor if spec.rotation.scaling else None) == rope.get(
            "factor"
        )


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3"])
def test_older_files_do_not_say_which_layers_have_windows(family, tmp_path):
    make(family, layer_types=None, num_hidden_layers=7).save_pretrained(tmp_path)
    newer = load_model(tmp_path).config
    assert {spec.window for spec in newer.layers} == {0, FAMILIES[family]["sliding_window"]}
    edit_config(tmp_path, layer_types=None, _sliding_window_pattern=None)
    assert load_model(tmp_path).config == newer


def pop(name):
    return lambda weights: weights.pop(name)


def shorten(name):
    return lambda weights: weights.update({name: weights[name][:-1].clone()})


QKV, C_ATTN = "model.layers.1.self_attn.qkv_proj.weight", "transformer.h.1.attn.c_attn.weight"
WRONG_WEIGHTS = {
    ("Phi3", "tensor model.layers.1.self_attn.qkv_proj.weight is missing"): pop(QKV),
    (
        "Phi3",
        "qkv_proj.weight has shape [127, 64]; the model's configuration asks for [128, 64]",
    ): shorten(QKV),
    (
        "GPT2",
        "c_attn.weight has shape [192, 63]; the model's configuration asks for [192, 64]",
    ): shorten(C_ATTN),
    ("Phi", "tensor lm_head.bias is missing"): pop("lm_head.bias"),
    ("Phi", "tensor model.layers.2.mlp.fc1.bias is missing"): pop("model.layers.2.mlp.fc1.bias"),
    ("GPT2", "tensor transformer.wpe.weight is missing"): pop("transformer.wpe.weight"),
    ("GPT2", "tensor transformer.h.0.ln_1.bias is missing"): pop("transformer.h.0.ln_1.bias"),
    ("GPT2", "transformer.x has no place"): lambda weights: weights.update({"x": torch.zeros(3)}),
    ("Olmo", "model.norm.weight has no place"): lambda weights: weights.update(
        {"model.norm.weight": torch.zeros(64)}
    ),
    ("Olmo2", "self_attn.q_norm.weight has shape [63]"): shorten(
        "model.layers.2.self_attn.q_norm.weight"
    ),
    ("Olmo2", "tensor model.layers.0.post_feedforward_layernorm.weight is missing"): pop(
        "model.layers.0.post_feedforward_layernorm.weight"
    ),
    ("Gemma3 with vision", "tensor model.layers.3.mlp.up_proj.weight is missing"): pop(
        "language_model.model.layers.3.mlp.up_proj.weight"
    ),
    ("Gemma3 with vision", "audio_tower.x has no place"): lambda weights: weights.update(
        {"audio_tower.x": torch.zeros(3)}
    ),
    ("Granite", "model.layers.0.self_attn.q_norm.weight has no place"): lambda weights: (
        weights.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(16)})
    ),
}


@pytest.mark.parametrize(("folder", "words"), WRONG_WEIGHTS, indirect=["folder"])
def test_wrong_weights(folder, words, request):
    edit_weights(folder, WRONG_WEIGHTS[request.node.callspec.params["folder"], words])
    fails(folder, words)


ROPE = FAMILIES["Phi3 with longrope"]["rope_parameters"]
WRONG_CONFIGS = [
    (
        "Phi3",
        {"rope_parameters": {"rope_type": "spiral"}},
        "rope scaling 'spiral' is not supported",
    ),
    (
        "Phi3",
        {"rope_parameters": ROPE | {"partial_rotary_factor": 0.7}},
        "number of rotated dimensions",
    ),
    ("Phi3", {"rope_parameters": ROPE | {"long_factor": LONG[:-1]}}, "short_factor or long_factor"),
    (
        "Phi3",
        {"rope_parameters": ROPE | {"short_factor": [0.0, *SHORT[1:]]}},
        "short_factor or long_factor",
    ),
    ("Phi3", {"rope_parameters": ROPE | {"long_factor": ["x"] * 6}}, "key long_factor is 'x'"),
    ("Phi3", {"rope_parameters": ROPE | {"long_factor": 3.0}}, "key long_factor is '3.0'"),
    ("Phi3", {"rope_parameters": ROPE, "original_max_position_embeddings": 1}, "original context"),
    ("Phi3", {"rope_parameters": ROPE | {"attention_factor": float("inf")}}, "attention_factor"),
    ("Phi", {"qk_layernorm": True}, "qk_layernorm (norms of query and key heads) is not supported"),
    ("Olmo", {"clip_qkv": -1.0}, "clip_qkv is -1.0, which cannot be used"),
    ("GPT2", {"activation_function": "mish"}, "activation_function 'mish' is not supported"),
    ("GPT2", {"n_head": 5}, "5 heads do not divide 64 dimensions"),
    ("GPT2", {"n_head": 0}, "0 heads do not divide"),
    ("GPT2", {"n_positions": 300}, "transformer.wpe.weight has shape [256, 64]"),
    ("GPT2", {"add_cross_attention": True}, "add_cross_attention"),
    (
        "Gemma3",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is not supported",
    ),
    ("Gemma3 with vision", {"text_config": None}, "key text_config is missing"),
    ("Granite", {"residual_multiplier": 0.0}, "residual_multiplier is 0.0"),
    ("Granite", {"logits_scaling": "x"}, "key logits_scaling is 'x'"),
]


@pytest.mark.parametrize(("folder", "changes", "words"), WRONG_CONFIGS, indirect=["folder"])
def test_wrong_configurations(folder, changes, words):
    edit_config(folder, **changes)
    fails(folder, words)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"rope_factors_long.weight": LONG}, "rope_factors_short.weight is missing"),
        (
            {"rope_factors_long.weight": LONG, "rope_factors_short.weight": [1.0] * 8},
            "has shape [8], not [6]",
        ),
        (
            {"rope_factors_long.weight": LONG, "rope_factors_short.weight": [float("nan")] * 6},
            "short_factor or long_factor",
        ),
    ],
)
def test_wrong_rope_factors_in_a_gguf(extra, words, tmp_path):
    reference = make("Phi3 with longrope")
    tensors = {name: np.array(values, np.float32) for name, values in extra.items()}
    path = write_gguf(
        tmp_path / "x.gguf", reference, extra=tensors, strings=gguf_keys(reference.config)
    )
    with pytest.raises(CheckpointError, match=words.replace("[", r"\[")):
        load_model(path)
