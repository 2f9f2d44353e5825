"""EXAONE 4: norms after attention and feed-forward as in OLMo 2, and of each query and key head as
in Qwen3. Its larger models have windows in most layers, and no rotation in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.errors import CheckpointError
from tidemill.layers.attention import Attention
from tidemill.models.llama import (
    from_settings,
    gguf_windows,
    rotated_by_windows,
    source_of,
    windows_of,
)
from tidemill.models.olmo2 import Block as Olmo2Block
from tidemill.models.olmo2 import Olmo2
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint

_EVERY = 4  # layers, the last of which is without a window


class Block(Olmo2Block):
    attention: ClassVar = Attention


class Exaone4(Olmo2):
    block: ClassVar = Block
    KEYS: ClassVar = {
        "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 16384,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": Nullable(int, 4096),
        "sliding_window_pattern": Nullable(object, _EVERY), "layer_types": Nullable(list), **rope_keys(),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        """Older files have a pattern: a number of layers, or a letter for each, L for a window."""
        config = replace(from_settings(settings, checkpoint), qk_norm=True)
        source, num, window = source_of(checkpoint), config.num_layers, settings["sliding_window"]
        if window is None:  # then all are rotated
            return config
        pattern = settings["sliding_window_pattern"] or _EVERY
        letters = "L" * (pattern - 1) + "G" if isinstance(pattern, int) else pattern
        if not isinstance(letters, str) or not letters or set(letters) - {"L", "G"}:
            raise CheckpointError(
                f"{source}: sliding_window_pattern {str(pattern)[:50]!r} is unknown."
            )
        names = {"L": "sliding_attention", "G": "full_attention"}
        kinds = settings["layer_types"] or [names[letters[i % len(letters)]] for i in range(num)]
        return rotated_by_windows(config, windows_of(kinds, window, num, source))

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super(Olmo2, cls).read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        config = replace(config, qk_norm=True)
        windows = gguf_windows(checkpoint, config.num_layers, _EVERY)
        return rotated_by_windows(config, windows) if any(windows) else config
