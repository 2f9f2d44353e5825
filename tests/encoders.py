"""Small random encoders made with Transformers, with a WordPiece tokenizer and the files of
sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

WORDS = "the a of sea tide mill wheel water turns grain flour stone wind slow fast old new night day boat"
SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 3,
    "max_position_embeddings": 130, "initializer_range": 0.2,
}  # fmt: skip


def make_encoder(path: Path, name: str, **config: Any) -> Any:
    """`name`: a class of Transformers, like BertModel. Its reference, in float32."""
    import transformers

    family = name.partition("For")[0].removesuffix("Model")
    torch.manual_seed(0)
    sizes = {
        "hidden_dim" if key == "intermediate_size" and family == "DistilBert" else key: size
        for key, size in SIZES.items()
    }
    model = (
        getattr(transformers, name)(getattr(transformers, f"{family}Config")(**sizes | config))
        .eval()
        .float()
    )
    for weight_name, weight in model.named_parameters():
        is_norm = any(part in weight_name for part in ("LayerNorm", "layer_norm"))
        if is_norm or "bias" in weight_name:
            weight.data.normal_(1.0 if is_norm and weight_name.endswith("weight") else 0.0, 0.2)
    model.save_pretrained(path)
    word_piece(path)
    return model


def word_piece(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    names = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *WORDS.split(),
        *(f"##{char}" for char in ascii_lowercase),
        *ascii_lowercase,
    ]
    tokenizer = Tokenizer(
        models.WordPiece(
            {name: i for i, name in enumerate(dict.fromkeys(names))}, unk_token="[UNK]"
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "sep_token": "[SEP]",
        "cls_token": "[CLS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def pooling_files(
    path: Path, mode: str = "mean_tokens", normalize: bool = True, max_length: int | None = None
) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listed = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False})
    )
    if max_length is not None:
        (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))


@torch.inference_mode()
def reference_embedding(
    model: Any, ids: list[int], how: str = "mean", normalize: bool = True
) -> torch.Tensor:
    hidden = model(torch.tensor([ids])).last_hidden_state[0].double()
    vector = hidden.mean(0) if how == "mean" else hidden[0]
    return torch.nn.functional.normalize(vector, dim=0) if normalize else vector
