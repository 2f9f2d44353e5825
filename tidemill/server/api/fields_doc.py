"""The table of docs/api.md that lists fields without effect: python -m tidemill.server.api.fields_doc"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidemill.server import app as app  # every route, and so every body
from tidemill.server.api.openai.types import NEUTRAL
from tidemill.server.http.body import Body

BEGIN, END = "<!-- Made by `python -m tidemill.server.api.fields_doc`. -->", "<!-- End of the table. -->"
_APIS = {
    "openai_messages": "OpenAI", "openai_types": "OpenAI", "responses_types": "Responses", "anthropic_types": "Anthropic",
    "ollama_types": "Ollama", "ggml": "Ollama, llama.cpp", "llamacpp": "llama.cpp", "sglang": "SGLang",
    "lora": "Adapters", "rerank": "vLLM", "cohere": "Cohere",
}  # fmt: skip


def table() -> str:
    rows = ["| API | object | fields |", "|---|---|---|"]
    for model in sorted(_models(Body), key=lambda one: (one.__module__, one.__name__)):
        if model.__module__.startswith("tidemill.") and model.__dict__.get("without_effect"):
            module = model.__module__.rpartition(".")[2]
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", model.__name__).lower()
            names = ", ".join(f"`{name}`" for name in sorted(model.without_effect))
            rows.append(f"| {_APIS.get(module, module)} | {words} | {names} |")
    neutral = ", ".join(f"`{name}` ({', '.join(map(_written, values))})" for name, values in sorted(NEUTRAL.items()))
    rows.append(f"| OpenAI | sampling request, only at these values | {neutral} |")
    return "\n".join([BEGIN, "", *rows, "", END])


def _models(model: type[Body]) -> Iterator[type[Body]]:
    for one in model.__subclasses__():
        yield one
        yield from _models(one)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(table())
