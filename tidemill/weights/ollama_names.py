"""Names of Ollama's library, and the same models on the Hugging Face hub: to be suggested, never
fetched by themselves."""

from __future__ import annotations

import re

# By name: a GGUF repository, and the sizes that there are of it, Ollama's default first. `{}` is
# the size.
_LIBRARY = {
    "llama3.1": ("bartowski/Meta-Llama-3.1-{}-Instruct-GGUF", "8B 70B"),
    "llama3.2": ("bartowski/Llama-3.2-{}-Instruct-GGUF", "3B 1B"),
    "llama3.3": ("bartowski/Llama-3.3-{}-Instruct-GGUF", "70B"),
    "mistral": ("bartowski/Mistral-{}-Instruct-v0.3-GGUF", "7B"),
    "qwen2.5": ("Qwen/Qwen2.5-{}-Instruct-GGUF", "7B 0.5B 1.5B 3B 14B 32B 72B"),
    "qwen2.5-coder": ("Qwen/Qwen2.5-Coder-{}-Instruct-GGUF", "7B 0.5B 1.5B 3B 14B 32B"),
    "qwen3": ("Qwen/Qwen3-{}-GGUF", "8B 0.6B 1.7B 4B 14B 32B"),
    "gemma2": ("bartowski/gemma-2-{}-it-GGUF", "9b 2b 27b"),
    "gemma3": ("ggml-org/gemma-3-{}-it-GGUF", "4b 1b 12b 27b"),
    "phi4": ("bartowski/phi-4-GGUF", "14b"),
    "gpt-oss": ("ggml-org/gpt-oss-{}-GGUF", "20b 120b"),
    "smollm2": ("HuggingFaceTB/SmolLM2-{}-Instruct-GGUF", "1.7B 360M"),
    "tinyllama": ("TheBloke/TinyLlama-{}-Chat-v1.0-GGUF", "1.1B"),
}
_QUANTIZATION = re.compile(r"i?q\d\w*|f16|fp16|bf16", re.IGNORECASE)


def on_the_hub(name: str) -> str:
    """The hub's name of `llama3.2`, `llama3.2:1b` or `llama3.2:1b-instruct-q8_0`; empty if it is
    not known."""
    family, _, tag = name.lower().removeprefix("library/").partition(":")
    if family not in _LIBRARY:
        return ""
    repo, sizes = _LIBRARY[family]
    words = [] if tag in ("", "latest") else tag.split("-")
    known = {size.lower(): size for size in sizes.split()}
    size = known.get(words[0], "") if words else sizes.split()[0]
    if not size:
        return ""
    quantization = next(
        (word.upper().replace("FP", "F") for word in words[1:] if _QUANTIZATION.fullmatch(word)), ""
    )
    return repo.format(size) + (f":{quantization}" if quantization else "")
