"""The scripted model of the matrix: the last word of a prompt chooses what it writes, and each
token has one successor."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CALL_TIDE = ['<tool_call>{"name": "tide", ', '"arguments": {"to": "ebb"}}</tool_call>']
CALL_WIND = ['<tool_call>{"name": "wind", ', '"arguments": {"at": "noon"}}</tool_call>']
SCRIPTS = {
    "text": ["The", " tide", " turns", " at", " noon", " again", "</s>"],
    "think": ["<think>", "It", " depends", " here", "</think>", "So", " be", " it", "</s>"],
    "call": [*CALL_WIND, "</s>"],
    "calls": [*CALL_TIDE, *CALL_WIND, "</s>"],
    "json": ['{"to":', '"ebb"}', " and", " more", "</s>"],  # with a schema, only the object
    "endless": [" la", " la"],
    "other": ["Low", " water", "</s>"],  # what the adapter makes of «text»
}
TEXT, REASONING, ANSWER, OTHER = (
    "The tide turns at noon again",
    "It depends here",
    "So be it",
    "Low water",
)
DICE = [
    " one",
    " two",
    " three",
    " four",
]  # after «dice» and after each other, with the same probability
# Where a grammar forbids what a script says, and does not say itself how to go on: a call of wind,
# in a list or not.
_FORCED = [("«text»", "{"), ("«text»", "["), ('"', "w"), ("}", "]")]
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "<|assistant|>{{ messages[-1]['content'].split(' ')[-1] }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
_SPECIAL = [
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
]
_SIZE, _INNER, _HEADS = 320, 8, 4  # _SIZE: of the vocabulary, and of the vectors


def said(script: str) -> str:
    """The word that makes the model write this."""
    return f"«{script}»"


def make_model(path: Path) -> None:
    _write_tokenizer(path)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": _SIZE, "hidden_size": _SIZE,
        "intermediate_size": _INNER, "num_hidden_layers": 1, "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    _write_weights(path, Tokenizer.from_file(str(path / "tokenizer.json")))


def _write_tokenizer(path: Path) -> None:
    """Bytes, markers that are found in texts, and words that only the model writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    markers = [*map(said, [*SCRIPTS, "dice"]), "<think>", "</think>"]
    written = [*(word for words in SCRIPTS.values() for word in words), *DICE]
    words = [
        word.replace(" ", "Ġ") for word in dict.fromkeys(written) if word not in (*markers, "</s>")
    ]
    vocab = {text: i for i, text in enumerate(["<s>", "</s>", *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ["<s>", "</s>", *_SPECIAL]]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markers])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_weights(path: Path, tokenizer: Tokenizer) -> None:
    """Token i is the i-th unit vector, the layer adds nothing, and the head looks the successors
    up."""
    layer, square = "model.layers.0", (_SIZE, _SIZE)
    shapes = {f"{layer}.self_attn.{name}_proj.weight": square for name in "qkvo"}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": (_INNER, _SIZE) for name in ("gate", "up")}
    shapes[f"{layer}.mlp.down_proj.weight"] = (_SIZE, _INNER)
    norms = ["model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(_SIZE) for name in norms}
    weights |= {
        "model.embed_tokens.weight": torch.eye(_SIZE),
        "lm_head.weight": torch.zeros(square),
    }
    head = weights["lm_head.weight"]
    steps = [pair for script, words in SCRIPTS.items() for pair in pairwise([said(script), *words])]
    steps += [(before, after) for before in [said("dice"), *DICE] for after in DICE]
    for before, after in steps:
        head[_id_of(tokenizer, after), _id_of(tokenizer, before)] = 10.0
    for before, after in _FORCED:
        head[_id_of(tokenizer, after), _id_of(tokenizer, before)] = 9.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _id_of(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text.replace(" ", "Ġ"))
    assert found is not None, text
    return found


def make_classifier(path: Path) -> None:
    """A classifier of two moods, by the last token of a text: «text» is calm, all else is either."""
    make_model(path)
    config = json.loads((path / "config.json").read_text())
    moods = {"0": "calm", "1": "rough"}
    config |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": moods,
        "num_labels": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    weights["score.weight"] = torch.zeros(2, _SIZE)
    weights["score.weight"][0, _id_of(tokenizer, said("text"))] = math.log(3) / math.sqrt(_SIZE)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def make_adapter(path: Path, model: Path) -> None:
    """An adapter with which «text» is «other»: the layer sees that one token and adds the other, a
    thousand times as large."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sees, adds, unit = torch.zeros(1, _SIZE), torch.zeros(_SIZE, 1), torch.zeros(_INNER, 1)
    sees[0, _id_of(tokenizer, said("text"))] = 1.0
    adds[_id_of(tokenizer, said("other")), 0] = 1000.0
    unit[0, 0] = 1.0
    halves = {"gate_proj": (sees, unit), "up_proj": (sees, unit), "down_proj": (unit.T, adds)}
    tensors = {
        f"base_model.model.model.layers.0.mlp.{name}.lora_{half}.weight": tensor.contiguous().clone()
        for name, pair in halves.items()
        for half, tensor in zip("AB", pair, strict=True)
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "r": 1,
        "lora_alpha": 1,
        "target_modules": list(halves),
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(stated))
