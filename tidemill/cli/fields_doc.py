"""The table of docs/reference/api/index.md that lists fields without effect: python -m
tidemill.cli.fields_doc"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tidemill.server import app as app  # every route, and so every body
from tidemill.server.generation.sampling import NEUTRAL
from tidemill.server.http.body import Body

BEGIN, END = (
    "<!-- Made by `python -m tidemill.cli.fields_doc`. -->",
    "<!-- End of the table. -->",
)
_APIS = {
    "openai": "OpenAI", "responses": "Responses", "anthropic": "Anthropic", "ollama": "Ollama",
    "llamacpp": "llama.cpp", "sglang": "SGLang", "cohere": "Cohere", "vllm": "vLLM",
    "gemini": "Gemini",
}  # fmt: skip
_SHARED = {"retention": "OpenAI, Anthropic", "sampling_aliases": "Ollama, llama.cpp"}


def table() -> str:
    rows = ["| API | object | fields |", "|---|---|---|"]
    for model in sorted(_models(Body), key=lambda model: (model.__module__, model.__name__)):
        if model.__module__.startswith("tidemill.") and model.__dict__.get("without_effect"):
            api = re.search(r"server\.api\.(\w+)", model.__module__)
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", model.__name__).lower()
            names = ", ".join(f"`{name}`" for name in sorted(model.without_effect))
            name = _APIS[api[1]] if api else _SHARED[model.__module__.rpartition(".")[2]]
            rows.append(f"| {name} | {words} | {names} |")
    rows += [
        "",
        "Of a sampling request of the OpenAI API, these have no effect at the values named, "
        "and are refused at others:",
    ]
    rows += ["", "| field | values |", "|---|---|"]
    rows += [
        f"| `{name}` | {', '.join(map(_written, values))} |"
        for name, values in sorted(NEUTRAL.items())
    ]
    return "\n".join([BEGIN, "", *rows, "", END])


def _models(model: type[Body]) -> Iterator[type[Body]]:
    for child in model.__subclasses__():
        yield child
        yield from _models(child)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(table())
