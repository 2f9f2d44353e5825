"""Which file implements which architecture. Adding one is a file and a line here."""

from __future__ import annotations

import importlib

from tidemill.errors import CheckpointError
from tidemill.models.base import Model
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
    ("hf", "BertModel"): "tidemill.models.bert:Bert",
    ("hf", "BertForMaskedLM"): "tidemill.models.bert:Bert",
    ("hf", "BertForSequenceClassification"): "tidemill.models.bert:BertCrossEncoder",
    ("hf", "RobertaModel"): "tidemill.models.roberta:Roberta",
    ("hf", "RobertaForMaskedLM"): "tidemill.models.roberta:Roberta",
    ("hf", "RobertaForSequenceClassification"): "tidemill.models.roberta:RobertaCrossEncoder",
    ("hf", "XLMRobertaModel"): "tidemill.models.roberta:Roberta",
    ("hf", "XLMRobertaForMaskedLM"): "tidemill.models.roberta:Roberta",
    ("hf", "XLMRobertaForSequenceClassification"): "tidemill.models.roberta:RobertaCrossEncoder",
    ("hf", "MPNetModel"): "tidemill.models.mpnet:MPNet",
    ("hf", "MPNetForMaskedLM"): "tidemill.models.mpnet:MPNet",
    ("gguf", "llama"): "tidemill.models.llama:Llama",
    ("gguf", "qwen2"): "tidemill.models.qwen2:Qwen2",
    ("gguf", "gemma2"): "tidemill.models.gemma:Gemma2",
    ("gguf", "gemma3"): "tidemill.models.gemma:Gemma3",
    ("gguf", "qwen3"): "tidemill.models.qwen3:Qwen3",
}


def model_class(checkpoint: Checkpoint) -> type[Model]:
    target = ARCHITECTURES.get((checkpoint.format, checkpoint.architecture))
    if target is None:
        known = ", ".join(sorted({name for kind, name in ARCHITECTURES if kind == checkpoint.format}))
        raise CheckpointError(
            f"{checkpoint.path} has the architecture {checkpoint.architecture}, which is not supported.",
            fix=f"Supported in this format: {known}.",
        )
    module, _, name = target.partition(":")
    cls: type[Model] = getattr(importlib.import_module(module), name)
    return cls
