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
    ("hf", "LlamaModel"): "tidemill.models.llama:Llama",
    ("hf", "MistralModel"): "tidemill.models.llama:Llama",
    ("hf", "SmolLM3ForCausalLM"): "tidemill.models.llama:SmolLM3",
    ("hf", "Qwen2ForCausalLM"): "tidemill.models.qwen2:Qwen2",
    ("hf", "Qwen2Model"): "tidemill.models.qwen2:Qwen2",
    ("hf", "Gemma2ForCausalLM"): "tidemill.models.gemma:Gemma2",
    ("hf", "Gemma3ForCausalLM"): "tidemill.models.gemma:Gemma3",
    ("hf", "Gemma3ForConditionalGeneration"): "tidemill.models.gemma:Gemma3Multimodal",
    ("hf", "Qwen3ForCausalLM"): "tidemill.models.qwen3:Qwen3",
    ("hf", "Qwen3Model"): "tidemill.models.qwen3:Qwen3",
    ("hf", "Qwen3NextForCausalLM"): "tidemill.models.qwen3_next:Qwen3Next",
    ("hf", "MambaForCausalLM"): "tidemill.models.mamba:Mamba",
    ("hf", "Mamba2ForCausalLM"): "tidemill.models.mamba2:Mamba2",
    ("gguf", "qwen3next"): "tidemill.models.qwen3_next:Qwen3Next",
    ("gguf", "mamba"): "tidemill.models.mamba:Mamba",
    ("gguf", "mamba2"): "tidemill.models.mamba2:Mamba2",
    ("hf", "MixtralForCausalLM"): "tidemill.models.mixtral:Mixtral",
    ("hf", "Qwen2MoeForCausalLM"): "tidemill.models.qwen_moe:Qwen2MoE",
    ("hf", "Qwen3MoeForCausalLM"): "tidemill.models.qwen_moe:Qwen3MoE",
    ("hf", "OlmoeForCausalLM"): "tidemill.models.olmoe:Olmoe",
    ("hf", "GptOssForCausalLM"): "tidemill.models.gpt_oss:GptOss",
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
    ("hf", "Phi3ForCausalLM"): "tidemill.models.phi3:Phi3",
    ("hf", "PhiForCausalLM"): "tidemill.models.phi:Phi",
    ("hf", "BitNetForCausalLM"): "tidemill.models.bitnet:BitNet",
    ("hf", "GPT2LMHeadModel"): "tidemill.models.gpt2:GPT2",
    ("hf", "BloomForCausalLM"): "tidemill.models.bloom:Bloom",
    ("hf", "BloomModel"): "tidemill.models.bloom:Bloom",
    ("hf", "OlmoForCausalLM"): "tidemill.models.olmo:Olmo",
    ("hf", "Olmo2ForCausalLM"): "tidemill.models.olmo2:Olmo2",
    ("hf", "Olmo3ForCausalLM"): "tidemill.models.olmo2:Olmo3",
    ("hf", "GraniteForCausalLM"): "tidemill.models.granite:Granite",
    ("hf", "GraniteMoeForCausalLM"): "tidemill.models.granite:GraniteMoE",
    ("gguf", "llama"): "tidemill.models.llama:Llama",
    ("gguf", "qwen2"): "tidemill.models.qwen2:Qwen2",
    ("gguf", "gemma2"): "tidemill.models.gemma:Gemma2",
    ("gguf", "gemma3"): "tidemill.models.gemma:Gemma3",
    ("gguf", "qwen3"): "tidemill.models.qwen3:Qwen3",
    ("gguf", "llama with experts"): "tidemill.models.mixtral:Mixtral",
    ("gguf", "qwen2moe"): "tidemill.models.qwen_moe:Qwen2MoE",
    ("gguf", "qwen3moe"): "tidemill.models.qwen_moe:Qwen3MoE",
    ("gguf", "olmoe"): "tidemill.models.olmoe:Olmoe",
    ("gguf", "gpt-oss"): "tidemill.models.gpt_oss:GptOss",
    ("gguf", "smollm3"): "tidemill.models.llama:SmolLM3",
    ("gguf", "phi2"): "tidemill.models.phi:Phi",
    ("gguf", "phi3"): "tidemill.models.phi3:Phi3",
    ("gguf", "gpt2"): "tidemill.models.gpt2:GPT2",
    ("gguf", "olmo"): "tidemill.models.olmo:Olmo",
    ("gguf", "olmo2"): "tidemill.models.olmo2:Olmo2",
    ("gguf", "granite"): "tidemill.models.granite:Granite",
    ("gguf", "granitemoe"): "tidemill.models.granite:GraniteMoE",
}


def model_class(checkpoint: Checkpoint) -> type[Model]:
    name = checkpoint.architecture
    if name == "llama" and checkpoint.metadata.get("llama.expert_count"):
        name = "llama with experts"  # GGUF's word for Mixtral
    target = ARCHITECTURES.get((checkpoint.format, name))
    if target is None:
        known = ", ".join(sorted({name for kind, name in ARCHITECTURES if kind == checkpoint.format}))
        raise CheckpointError(
            f"{checkpoint.path} has the architecture {checkpoint.architecture}, which is not supported.",
            fix=f"Supported in this format: {known}.",
        )
    module, _, class_name = target.partition(":")
    cls: type[Model] = getattr(importlib.import_module(module), class_name)
    return cls
