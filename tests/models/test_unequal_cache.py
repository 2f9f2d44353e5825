"""A family whose keys and values differ in size, and whose last layer reads the cache of an earlier
one."""

import json
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from tests.helpers import (
    Answer,
    byte_tokenizer,
    engine_config,
    greedy,
    load_model,
    make_core,
    run,
    take,
)
from tidemill.config.cache import bytes_of_page, decide_layout
from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.kernels.attention import TorchAttention, attention_reference
from tidemill.kernels.kv_cache import PagedKV
from tidemill.kernels.native_attention import NativeAttention
from tidemill.models.llama import Llama, from_settings
from tidemill.models.registry import ARCHITECTURES
from tidemill.models.settings import rope_keys
from tidemill.types.cache_layout import Place, lay_out
from tidemill.types.model_config import AttentionSpec
from tidemill.types.wire import Submit

HEADS, KV_HEADS, KEY, VALUE, HIDDEN, INNER, LAYERS, VOCAB = 4, 2, 24, 16, 64, 96, 4, 320


class Unequal(Llama):
    KEYS: ClassVar = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": KEY, "v_head_dim": VALUE, "sliding_window": 0, "hidden_act": "silu",
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        **rope_keys(),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings, checkpoint):
        """The second layer has a window; the last one reads the cache of the first."""
        config = from_settings({**settings, "sliding_window": 0}, checkpoint)
        layers = [spec.but(value_head_dim=settings["v_head_dim"]) for spec in config.layers]
        layers[1] = layers[1].but(window=settings["sliding_window"])
        layers[-1] = layers[-1].but(reads=0)
        return replace(config, layers=tuple(layers))


def random_weights(key=KEY, value=VALUE, heads=HEADS, kv_heads=KV_HEADS):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    tensors = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN),
        "lm_head.weight": random(VOCAB, HIDDEN),
    }
    tensors["model.norm.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (heads * key, HIDDEN), "self_attn.k_proj": (kv_heads * key, HIDDEN),
            "self_attn.v_proj": (kv_heads * value, HIDDEN), "self_attn.o_proj": (HIDDEN, heads * value),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }  # fmt: skip
        if layer == LAYERS - 1:
            del shapes["self_attn.k_proj"], shapes["self_attn.v_proj"]
        tensors |= {
            f"model.layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()
        }
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = (
                torch.rand(HIDDEN, generator=generator) + 0.5
            )
    return tensors


def make_model(folder, window=20, key=KEY, value=VALUE, **more):
    """A checkpoint of the family, and its weights."""
    from safetensors.torch import save_file

    settings = {
        "architectures": ["UnequalForCausalLM"],
        "model_type": "unequal",
        "sliding_window": window,
    }
    settings |= {"head_dim": key, "v_head_dim": value} | more
    (folder / "config.json").write_text(json.dumps(settings))
    sizes = more.get("num_attention_heads", HEADS), more.get("num_key_value_heads", KV_HEADS)
    tensors = random_weights(key, value, *sizes)
    save_file(tensors, folder / "model.safetensors")
    byte_tokenizer(folder)
    return tensors


def logprobs_of(tensors, ids, window=20, key=KEY, value=VALUE, heads=HEADS, kv_heads=KV_HEADS):
    """Log probabilities [T, V] in float32, as plainly as can be."""
    num, x, cache = len(ids), tensors["model.embed_tokens.weight"][ids], {}
    positions, repeats = torch.arange(num), heads // kv_heads
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, key, 2) / key)

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * tensors[name]

    def rotate(x):
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    for layer in range(LAYERS):
        of = {name.removeprefix(f"model.layers.{layer}."): w for name, w in tensors.items()}
        y = norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q = rotate((y @ of["self_attn.q_proj.weight"].T).view(num, heads, key))
        if layer < LAYERS - 1:
            k = rotate((y @ of["self_attn.k_proj.weight"].T).view(num, kv_heads, key))
            cache[layer] = k, (y @ of["self_attn.v_proj.weight"].T).view(num, kv_heads, value)
        k, v = (
            part.repeat_interleave(repeats, 1) for part in cache[layer if layer < LAYERS - 1 else 0]
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * key**-0.5
        behind = positions[:, None] - positions
        hidden = (behind < 0) | ((behind >= window) if layer == 1 else False)
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        x = x + out.flatten(1) @ of["self_attn.o_proj.weight"].T
        y = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        inner = torch.nn.functional.silu(y @ of["mlp.gate_proj.weight"].T) * (
            y @ of["mlp.up_proj.weight"].T
        )
        x = x + inner @ of["mlp.down_proj.weight"].T
    return (norm(x, "model.norm.weight") @ tensors["lm_head.weight"].T).log_softmax(-1)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(ARCHITECTURES, ("hf", "UnequalForCausalLM"), f"{__name__}:Unequal")


PROMPT = [(7 * j + 3) % VOCAB for j in range(150)]
X = {"x": (PROMPT, greedy(24, logprobs=1, ignore_eos=True))}
OTHERS = {
    f"o{i}": ([(5 * j + i) % VOCAB for j in range(1 + 37 * i % 90)], greedy(12, ignore_eos=True))
    for i in range(7)
}


@pytest.fixture(params=["compiled", "torch"])
def path_taken(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "lib", None)
    elif native.lib is None:
        pytest.skip(native.why)
    return request.param


def test_equals_the_reference(tmp_path, path_taken):
    tensors = make_model(tmp_path)
    core = make_core(load_model(tmp_path))
    assert (core.runner.fallback == "") == (path_taken == "compiled")
    answer = run(core, X)["x"]
    expected = logprobs_of(tensors, PROMPT + answer.tokens)[len(PROMPT) - 1 : -1]
    assert expected.argmax(-1).tolist() == answer.tokens
    found = torch.tensor([entry.logprob for entry in answer.logprobs])
    assert torch.allclose(expected.amax(-1), found, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_the_company(tmp_path, path_taken, kv_dtype):
    """Alone, among others, in chunks, cached, preempted: bit for bit."""
    make_model(tmp_path)
    model = load_model(tmp_path)
    core = make_core(model, kv_dtype=kv_dtype)
    alone = run(core, X)["x"]
    assert run(make_core(model, kv_dtype=kv_dtype), OTHERS | X)["x"] == alone
    assert run(make_core(model, kv_dtype=kv_dtype, token_budget=7, max_requests=1), X)["x"] == alone
    cached = run(core, X)["x"]
    assert cached.last.num_cached >= 128
    assert cached == alone
    core, answers, num_preempted = (
        make_core(model, kv_dtype=kv_dtype, token_budget=64),
        {"x": Answer()},
        0,
    )
    core.submit(Submit("x", *X["x"]))
    while core.has_work:
        take(core, answers)
        request = next(iter(core.scheduler.running), None)
        if request and (num_preempted == 0 or request.num_output >= 5) and num_preempted < 2:
            core.scheduler.table.preempt(request, "test")
            num_preempted += 1
    assert num_preempted == 2
    assert answers["x"] == alone


def test_sizes_follow_from_the_specs(tmp_path):
    make_model(tmp_path)
    config = load_model(tmp_path).config
    own = KV_HEADS * (KEY + VALUE) * 4
    assert [spec.token_bytes("float32") for spec in config.layers] == [own, own, own, 0]
    assert config.kv_bytes_per_token("float32") == 3 * own
    assert config.num_parameters == sum(tensor.numel() for tensor in random_weights().values())
    layout, why = decide_layout(config, "float32", 16, 512)
    assert [place.group for place in layout.places] == [0, 2, 1, 0]
    assert layout.places[3] == layout.places[0]
    assert bytes_of_page(config, "float32", 16, layout) >= 16 * own
    assert "% of a page stay empty" in why


def test_what_has_no_kernel_is_refused(tmp_path):
    make_model(tmp_path)
    model = load_model(tmp_path)
    for options in ({"kv_dtype": "int8"}, {"kv_dtype": "int4"}, {"kv_layout": "virtual"}):
        with pytest.raises(ConfigError, match="layers that are all alike"):
            engine_config(model, **options)
    assert "KV policies do not know such layers" in engine_config(model).reasons["kv_policies"]


def test_pages_of_layers_of_different_sizes():
    """Few bytes of a page stay empty, and as few page tables as that allows."""
    layout = lay_out([0, 0, 0, 64, 64], 16, 4096, [40, 40, 80, 100, 60])
    assert layout.token_bytes == 160
    assert [(place.group, place.start) for place in layout.places] == [
        (0, 0),
        (0, 40),
        (0, 80),
        (1, 0),
        (1, 100),
    ]
    assert [group.window for group in layout.groups] == [0, 64]
    assert layout.page_bytes(16, 0) == 16 * 160
    padded = lay_out([0, 0], 16, 4096, [40, 80], row_bytes=1000)
    assert padded.page_bytes(16, 0) == 2000


@pytest.mark.parametrize("backend", [TorchAttention, NativeAttention])
def test_a_value_is_a_part_of_its_key(backend):
    """As in latent attention: one vector a token, whose last dimensions are the value."""
    if backend is NativeAttention and native.lib is None:
        pytest.skip(native.why)
    heads, key, value, size, before, new = 6, 72, 64, 16, 40, 5
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=key,
        value_head_dim=value,
        values_in_keys=True,
        scale=0.1,
        rotation=None,
    )
    assert spec.token_bytes("float32") == 4 * key
    pages, table = torch.zeros(9, size * key), torch.arange(1, 9, dtype=torch.int32)[None]
    kv = PagedKV(pages, [table], (spec,), [None], (Place(0, 0),), page_size=size)
    vectors, queries = torch.randn(before + new, 1, key), torch.randn(before + new, heads, key)
    fused = torch.cat([queries, vectors], 1).flatten(1)
    expected = attention_reference(
        queries, vectors, vectors[..., -value:], torch.arange(before + new), spec
    ).flatten(1)
    found, attention = [], backend(kv)
    for start, count in ((0, before), (before, new)):
        positions = torch.arange(start, start + count)
        step = attention.plan(
            np.array([0]), np.array([start]), np.array([count]), positions, size + positions[None]
        )
        found.append(step.attend(0, fused[start : start + count].clone()))
    assert torch.allclose(torch.cat(found), expected, atol=2e-5)
