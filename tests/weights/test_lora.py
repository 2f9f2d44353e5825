"""PEFT folders: what is read, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tidemill.errors import AdapterError, CheckpointError
from tidemill.weights.lora import read_lora

PLACES = {
    f"model.layers.{i}.self_attn.{name}": (16, 8) for i in range(2) for name in ("q_proj", "v_proj")
}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def folder(path: Path, tensors: dict[str, torch.Tensor] | None = None, **settings: object) -> Path:
    """A right one, unless it is told otherwise."""
    path.mkdir(exist_ok=True)
    made = {f"{Q}.lora_A.weight": torch.randn(4, 8), f"{Q}.lora_B.weight": torch.randn(16, 4)}
    save_file(
        {name: value for name, value in (made | (tensors or {})).items() if value.numel()},
        path / "adapter_model.safetensors",
    )
    stated = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 6,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
    }
    (path / "adapter_config.json").write_text(json.dumps(stated | settings))
    return path


def test_an_adapter_is_read_as_it_is_stored(tmp_path):
    read = read_lora(folder(tmp_path), PLACES)
    (name, pair), stored = *read.pairs.items(), load_file(tmp_path / "adapter_model.safetensors")
    assert name == "model.layers.0.self_attn.q_proj"
    assert torch.equal(pair.down_RK, stored[f"{Q}.lora_A.weight"])
    assert torch.equal(pair.up_NR, stored[f"{Q}.lora_B.weight"])
    assert (pair.scale, read.rank) == (1.5, 4)
    assert read_lora(folder(tmp_path, use_rslora=True), PLACES).pairs[name].scale == 6 / math.sqrt(
        4
    )
    patterns = {
        "alpha_pattern": {"q_proj": 2},
        "rank_pattern": {"model.layers.0.self_attn.q_proj": 4},
        "r": 9,
    }
    assert read_lora(folder(tmp_path, **patterns), PLACES).pairs[name].scale == 0.5


def test_the_digest_is_of_the_content(tmp_path):
    torch.manual_seed(0)
    first = read_lora(folder(tmp_path / "a"), PLACES).digest
    torch.manual_seed(0)
    assert read_lora(folder(tmp_path / "b"), PLACES).digest == first
    assert read_lora(folder(tmp_path / "b", lora_alpha=7), PLACES).digest != first
    torch.manual_seed(1)
    assert read_lora(folder(tmp_path / "b"), PLACES).digest != first


WRONG_SETTINGS = {
    "DoRA": ({"use_dora": True}, "use_dora is set; DoRA"),
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "biases of B": ({"lora_bias": True}, "lora_bias is set"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
    "something new": ({"use_magic": True}, "use_magic is set"),
    "changes the base": ({"init_lora_weights": "pissa_niter_16"}, "changes the base model"),
    "no rank": ({"r": None}, "r is 'None'"),
    "rank of another size": (
        {"r": 5},
        r"lora_A\.weight has shape \[4, 8\]; the model and rank 5 ask for \[5, 8\]",
    ),
    "rank too high": (
        {"r": 64},
        "the rank of model.layers.0.self_attn.q_proj is 64; ranks are 1 to 32 here",
    ),
    "half a rank": ({"r": 4.5}, "the rank of .* is 4.5"),
    "alpha that is no number": ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
    "alpha that is not finite": ({"lora_alpha": 1e300}, "lora_alpha is"),
    "regular expression": ({"rank_pattern": {"(a+)+$": 4}}, "regular expression"),
    "pattern that is no table": ({"alpha_pattern": [1]}, "alpha_pattern must map"),
}
NONE = torch.zeros(0)
WRONG_TENSORS = {
    "shape": (
        {f"{Q}.lora_B.weight": torch.randn(17, 4)},
        r"q_proj\.lora_B\.weight has shape \[17, 4\]",
    ),
    "missing half": ({f"{Q}.lora_B.weight": NONE}, r"tensor .*q_proj\.lora_B\.weight is missing"),
    "missing other half": (
        {f"{Q}.lora_A.weight": NONE},
        r"tensor .*q_proj\.lora_A\.weight is missing",
    ),
    "layer": (
        {Q.replace("0", "7") + ".lora_A.weight": torch.randn(4, 8)},
        r"layers\.7.* has no place in this model",
    ),
    "target": (
        {Q.replace("q_proj", "x") + ".lora_A.weight": torch.randn(4, 8)},
        r"self_attn\.x.* has no place",
    ),
    "embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.randn(4, 8)},
        "adapts the embedding",
    ),
    "head": ({"base_model.model.lm_head.lora_A.weight": torch.randn(4, 8)}, "adapts the head"),
    "magnitude": ({f"{Q}.lora_magnitude_vector": torch.randn(16)}, "belongs to DoRA"),
    "NaN": (
        {f"{Q}.lora_A.weight": torch.full((4, 8), math.nan)},
        r"lora_A\.weight holds values that are not finite",
    ),
    "type": ({f"{Q}.lora_A.weight": torch.zeros(4, 8, dtype=torch.int8)}, "has type I8"),
    "nothing": ({f"{Q}.lora_A.weight": NONE, f"{Q}.lora_B.weight": NONE}, "holds no tensors"),
}


@pytest.mark.parametrize("kind", WRONG_SETTINGS)
def test_settings_that_are_refused(kind, tmp_path):
    settings, message = WRONG_SETTINGS[kind]
    with pytest.raises(AdapterError, match=message):
        read_lora(folder(tmp_path, **settings), PLACES, max_rank=32)


@pytest.mark.parametrize("kind", WRONG_TENSORS)
def test_tensors_that_are_refused(kind, tmp_path):
    tensors, message = WRONG_TENSORS[kind]
    with pytest.raises(AdapterError, match=message):
        read_lora(folder(tmp_path, tensors), PLACES)


@pytest.mark.parametrize(
    "place",
    ["peft_type", "r", "lora_alpha", "rank_pattern", "modules_to_save", "base_model_name_or_path"],
)
def test_settings_that_are_nested_deeply_are_a_typed_error(tmp_path, place):
    """Deeper than this Python reads, and less deep than that: whatever looks at them then recurses,
    too."""
    made = folder(tmp_path)
    for depth in (100, 500, *range(900, 1000, 7), 10**5):
        (made / "adapter_config.json").write_text(
            '{{"peft_type": "LORA", "{}": {}}}'.format(place, "[" * depth + "]" * depth)
        )
        with pytest.raises(CheckpointError, match=r"cannot be read|nested more than 100 deep"):
            read_lora(made, PLACES)


def test_files_that_are_none(tmp_path):
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        read_lora(tmp_path / "nowhere", PLACES)
    made = folder(tmp_path)
    (made / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(AdapterError, match="corrupt or truncated"):
        read_lora(made, PLACES)
    (made / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"holds no adapter_model\.safetensors"):
        read_lora(made, PLACES)
