"""The registry of architectures, with the file that implements each. Adding one is a file and a
line here."""

from __future__ import annotations

import importlib

from tidemill.config import extensions
from tidemill.errors import CheckpointError
from tidemill.models.base import Model
from tidemill.weights.checkpoint import Checkpoint

_DECODERS = {  # "module:class" by how Hugging Face's classes begin; imported when first needed
    "Arcee": "arcee:Arcee",
    "BitNet": "bitnet:BitNet",
    "Bloom": "bloom:Bloom",
    "Cohere": "cohere:Cohere",
    "Cohere2": "cohere:Cohere2",
    "Dots1": "scored_experts:Dots1",
    "Ernie4_5": "ernie:Ernie",
    "Ernie4_5_Moe": "ernie:ErnieMoE",
    "Exaone4": "exaone4:Exaone4",
    "GPT2": "gpt2:GPT2",
    "GPTNeoX": "gpt_neox:GPTNeoX",
    "Gemma": "gemma:Gemma",
    "Gemma2": "gemma:Gemma2",
    "Gemma3Text": "gemma:Gemma3",
    "Glm": "glm:Glm",
    "Glm4": "glm:Glm4",
    "Glm4Moe": "scored_experts:Glm4MoE",
    "GptOss": "gpt_oss:GptOss",
    "Granite": "granite:Granite",
    "GraniteMoe": "granite:GraniteMoE",
    "Helium": "helium:Helium",
    "Llama": "llama:Llama",
    "Mamba": "mamba:Mamba",
    "Mamba2": "mamba2:Mamba2",
    "MiniMaxM2": "scored_experts:MiniMaxM2",
    "Mistral": "llama:Mistral",
    "Mixtral": "mixtral:Mixtral",
    "Nemotron": "nemotron:Nemotron",
    "Olmo": "olmo:Olmo",
    "Olmo2": "olmo2:Olmo2",
    "Olmo3": "olmo2:Olmo3",
    "Olmoe": "olmoe:Olmoe",
    "Phi": "phi:Phi",
    "Phi3": "phi3:Phi3",
    "Qwen2": "qwen2:Qwen2",
    "Qwen2Moe": "qwen_moe:Qwen2MoE",
    "Qwen3": "qwen3:Qwen3",
    "Qwen3Moe": "qwen_moe:Qwen3MoE",
    "Qwen3Next": "qwen3_next:Qwen3Next",
    "SeedOss": "seed_oss:SeedOss",
    "SmolLM3": "llama:SmolLM3",
    "SolarOpen": "scored_experts:SolarOpen",
    "StableLm": "stablelm:StableLm",
    "Starcoder2": "starcoder2:Starcoder2",
}
_ENCODERS = {
    "Albert": "albert:Albert",
    "Bert": "bert:Bert",
    "Camembert": "roberta:XLMRoberta",
    "DistilBert": "distilbert:DistilBert",
    "Electra": "electra:Electra",
    "MPNet": "mpnet:MPNet",
    "Roberta": "roberta:Roberta",
    "XLMRoberta": "roberta:XLMRoberta",
}
_OTHERS = {
    "GPT2LMHeadModel": "gpt2:GPT2",
    "Gemma3ForCausalLM": "gemma:Gemma3",
    "Gemma3ForConditionalGeneration": "gemma:Gemma3Multimodal",
}


def _hugging_face() -> dict[tuple[str, str], str]:
    """The classes of Hugging Face that the families load."""
    names = dict(_OTHERS)
    for begin, target in _DECODERS.items():
        names |= dict.fromkeys(
            (f"{begin}ForCausalLM", f"{begin}Model", f"{begin}ForSequenceClassification"), target
        )
    for begin, target in _ENCODERS.items():
        names |= dict.fromkeys(
            (f"{begin}Model", f"{begin}ForMaskedLM", f"{begin}ForPreTraining"), target
        )
        names[f"{begin}ForSequenceClassification"] = f"{target}CrossEncoder"
    return {("hf", name): f"tidemill.models.{target}" for name, target in names.items()}


# (format, name the format uses) to "module:class"
ARCHITECTURES = _hugging_face() | {
    ("gguf", "qwen3next"): "tidemill.models.qwen3_next:Qwen3Next",
    ("gguf", "mamba"): "tidemill.models.mamba:Mamba",
    ("gguf", "mamba2"): "tidemill.models.mamba2:Mamba2",
    ("gguf", "llama"): "tidemill.models.llama:Llama",
    ("gguf", "qwen2"): "tidemill.models.qwen2:Qwen2",
    ("gguf", "arcee"): "tidemill.models.arcee:Arcee",
    ("gguf", "cohere2"): "tidemill.models.cohere:Cohere2",
    ("gguf", "command-r"): "tidemill.models.cohere:Cohere",
    ("gguf", "exaone4"): "tidemill.models.exaone4:Exaone4",
    ("gguf", "gemma"): "tidemill.models.gemma:Gemma",
    ("gguf", "gemma2"): "tidemill.models.gemma:Gemma2",
    ("gguf", "glm4"): "tidemill.models.glm:Glm4",
    ("gguf", "nemotron"): "tidemill.models.nemotron:Nemotron",
    ("gguf", "seed_oss"): "tidemill.models.seed_oss:SeedOss",
    ("gguf", "stablelm"): "tidemill.models.stablelm:StableLm",
    ("gguf", "starcoder2"): "tidemill.models.starcoder2:Starcoder2",
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
    if target is None and (
        found := extensions.load(extensions.MODELS, f"{checkpoint.format}.{name}")
    ):
        family: type[Model] = found
        return family
    if target is None:
        known = ", ".join(
            sorted({name for kind, name in ARCHITECTURES if kind == checkpoint.format})
        )
        raise CheckpointError(
            f"{checkpoint.path} has the architecture {checkpoint.architecture}, which is not supported.",
            fix=f"Supported in this format: {known}.",
        )
    module, _, class_name = target.partition(":")
    cls: type[Model] = getattr(importlib.import_module(module), class_name)
    return cls
