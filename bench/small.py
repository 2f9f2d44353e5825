"""A small language model of bytes, trained here in minutes: comparisons need weights that were
learned, and the default model's lie on a grid of 4 bits already.

    python -m bench.small FOLDER --steps 1000
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tidemill.compress.draft.steps import Schedule, run_steps
from tidemill.compress.evaluate import default_text

HELD_OUT = 65_536  # bytes at the end of the text
_LENGTH, _BATCH = 128, 8
SETTINGS: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def byte_tokenizer(path: Path) -> None:
    """A token for each byte, after <s> and </s>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({char: i + 2 for i, char in enumerate(alphabet)} | {"<s>": 0, "</s>": 1}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>"})
    )


def train_small(folder: Path, steps: int, seed: int = 0, act: str = "silu") -> None:
    """Goes on where it ended. Trained on Python's documentation but for its end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tidemill.frontend.tokenizer import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(folder)
    ids = torch.tensor(Tokenizer.load(folder).encode(default_text(), add_special=False))[:-HELD_OUT]
    torch.manual_seed(seed)
    settings = SETTINGS | {"hidden_act": act}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    begin = time.perf_counter()

    def loss(step: int) -> torch.Tensor:
        starts = torch.randint(
            0, len(ids) - _LENGTH, (_BATCH,), generator=torch.Generator().manual_seed(seed + step)
        )
        batch = torch.stack([ids[start : start + _LENGTH] for start in starts.tolist()])
        logits = model(input_ids=batch, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def tick(done: int, value: float) -> None:
        if done % 50 == 0 and not math.isnan(value):
            print(
                f"step {done} of {steps}: loss {value:.3f}, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )

    schedule = Schedule(steps, 6e-3, settings | {"seed": seed}, folder / "training.safetensors")
    run_steps(model, loss, schedule, tick, lambda: False)
    model.save_pretrained(folder)
    (folder / "training.safetensors").unlink()


def add_outliers(folder: Path, out: Path, every: int = 32, factor: float = 50.0) -> None:
    """The same function with a few channels of large activations behind each norm, as trained
    models of billions of parameters have them: the norm's weights times a factor, the columns that
    read them divided by it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out)
    tensors = load_file(folder / "model.safetensors")
    reads = {
        "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    }
    for layer in range(SETTINGS["num_hidden_layers"]):
        for number, (norm, linears) in enumerate(reads.items()):
            channels = slice((5 * layer + 11 * number) % every, None, every)
            tensors[f"model.layers.{layer}.{norm}.weight"][channels] *= factor
            for linear in linears:
                tensors[f"model.layers.{layer}.{linear}.weight"][:, channels] /= factor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--act", default="silu", help="of feed-forwards: silu or relu")
    parser.add_argument(
        "--outliers",
        type=Path,
        help="also write it with a few channels of large activations to this folder",
    )
    given = parser.parse_args()
    train_small(given.folder, given.steps, act=given.act)
    if given.outliers:
        add_outliers(given.folder, given.outliers)
