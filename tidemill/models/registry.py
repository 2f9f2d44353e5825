"""Which file implements which architecture. Adding one is a file and a line here."""

from __future__ import annotations

import importlib

from tidemill.errors import CheckpointError
from tidemill.models.base import CausalLM
from tidemill.weights.checkpoint import Checkpoint

# (format, name the format uses) to "module:class", imported when first needed
ARCHITECTURES = {
    ("hf", "LlamaForCausalLM"): "tidemill.models.llama:Llama",
    ("hf", "MistralForCausalLM"): "tidemill.models.llama:Llama",
    ("hf", "SmolLM3ForCausalLM"): "tidemill.models.llama:Llama",
    ("hf", "Qwen2ForCausalLM"): "tidemill.models.qwen2:Qwen2",
    ("hf", "Gemma2ForCausalLM"): "tidemill.models.gemma:Gemma2",
    ("hf", "Gemma3ForCausalLM"): "tidemill.models.gemma:Gemma3",
    ("hf", "Qwen3ForCausalLM"): "tidemill.models.qwen3:Qwen3",
    ("hf", "MambaForCausalLM"): "tidemill.models.mamba:Mamba",
    ("hf", "Mamba2ForCausalLM"): "tidemill.models.mamba2:Mamba2",
    ("gguf", "mamba"): "tidemill.models.mamba:Mamba",
    ("gguf", "mamba2"): "tidemill.models.mamba2:Mamba2",
    ("gguf", "llama"): "tidemill.models.llama:Llama",
    ("gguf", "qwen2"): "tidemill.models.qwen2:Qwen2",
    ("gguf", "gemma2"): "tidemill.models.gemma:Gemma2",
    ("gguf", "gemma3"): "tidemill.models.gemma:Gemma3",
    ("gguf", "qwen3"): "tidemill.models.qwen3:Qwen3",
}


def model_class(checkpoint: Checkpoint) -> type[CausalLM]:
    target = ARCHITECTURES.get((checkpoint.format, checkpoint.architecture))
    if target is None:
        known = ", ".join(sorted({name for kind, name in ARCHITECTURES if kind == checkpoint.format}))
        raise CheckpointError(
            f"{checkpoint.path} has the architecture {checkpoint.architecture}, which is not supported.",
            fix=f"Supported in this format: {known}.",
        )
    module, _, name = target.partition(":")
    cls: type[CausalLM] = getattr(importlib.import_module(module), name)
    return cls
