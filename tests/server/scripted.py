"""A model that writes what it is made to write: each token has one successor, whatever came before."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from tests.helpers import byte_tokenizer, make_llama

SPECIAL = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['reasoning_content'] }}{{ m['content'] }}<|end|>{% endfor %}"
    "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}"
)
CHAINS = [
    # a chat: it thinks, unless the template ends that
    ["<|assistant|>", "<think>", *"hm", "</think>", *"ok", "</s>"],
    ["<|fim_middle|>", *"xyz", "<|file_sep|>"],  # fill in the middle
]


def make_scripted(path: Path) -> None:
    byte_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {
        "chat_template": TEMPLATE
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    make_llama(
        path,
        vocab_size=320,
        hidden_size=320,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        max_position_embeddings=512,
    )
    _write_weights(path, tokenizer)


def _write_weights(path: Path, tokenizer: Tokenizer) -> None:
    """Token i is the i-th unit vector, the layer adds nothing, and the head looks the successor up."""
    from safetensors.torch import load_file, save_file

    weights = {
        name: torch.zeros_like(tensor)
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    for name in weights:
        if "norm" in name:
            weights[name].fill_(1.0)
    weights["model.embed_tokens.weight"] = torch.eye(320)
    head = weights["lm_head.weight"]
    for chain in CHAINS:
        for token, following in pairwise(chain):
            head[tokenizer.token_to_id(following), tokenizer.token_to_id(token)] = 10.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
