"""Who answers in `tidemill chat`: a model in this process, or a server with the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from tidemill.cli.generate import summary
from tidemill.client import BadResponse, Client
from tidemill.types.sampling import SamplingParams

if TYPE_CHECKING:
    from tidemill.engine.llm import LLM


class Backend(Protocol):
    name: str

    def reply(
        self, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> Iterator[tuple[str, bool]]:
        """Pieces of the answer, and whether each is reasoning."""
        ...

    def interrupt(self) -> None:
        """End the answer: called from a signal handler while `reply` runs."""
        ...

    def summary(self) -> str:
        """One line about the last answer."""
        ...

    def defaults(self) -> dict[str, Any]:
        """Sampling parameters where nothing is set."""
        ...


class Local:
    def __init__(self, llm: LLM, name: str, lora: str | None = None) -> None:
        self.name, self._llm, self._lora = name, llm, lora

    def reply(
        self, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> Iterator[tuple[str, bool]]:
        context = self._llm.config.max_context
        ids = self._llm.tokenizer.encode_chat(messages, max_tokens=context)
        room = max(1, context - len(ids))
        fits = (
            {"max_tokens": min(sampling["max_tokens"], room)} if sampling.get("max_tokens") else {}
        )
        for piece in self._llm.stream(ids, SamplingParams(**sampling | fits), lora=self._lora):
            yield piece, False

    def interrupt(self) -> None:
        self._llm.interrupt()  # between two steps, so that the engine is never cut in two

    def summary(self) -> str:
        return summary(self._llm)

    def defaults(self) -> dict[str, Any]:
        return self._llm.defaults.shown()


class Remote:
    """Sends only what was set: the server has its own defaults."""

    def __init__(self, url: str, key: str) -> None:
        self._client = Client(url, key)
        self.models = self._list_models()
        self.name, self._summary = "", ""

    def _list_models(self) -> list[str]:
        reply = self._client.json("GET", "/v1/models")
        try:
            found = [str(each["id"]) for each in reply["data"]]
        except (KeyError, TypeError):
            found = []
        if not found:
            raise BadResponse(self._client.url, "lists no model at /v1/models")
        return found

    def reply(
        self, messages: list[dict[str, Any]], sampling: dict[str, Any]
    ) -> Iterator[tuple[str, bool]]:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | sampling
        begin, first, reason, num_pieces = time.perf_counter(), None, None, 0
        usage: dict[str, Any] = {}
        try:
            with self._client.stream("/v1/chat/completions", body) as chunks:
                for chunk in chunks:
                    usage = chunk.get("usage") or usage
                    for choice in chunk.get("choices") or ():
                        reason = choice.get("finish_reason") or reason
                        delta = choice.get("delta") or {}
                        for name in ("reasoning_content", "reasoning", "content"):
                            if text := delta.get(name):
                                first = first or time.perf_counter()
                                num_pieces += 1
                                yield text, name != "content"
                                break
        finally:
            self._summary = _figures(begin, first, usage, reason, num_pieces)

    def interrupt(self) -> None:
        raise KeyboardInterrupt  # closes the connection, which ends the request

    def summary(self) -> str:
        return self._summary

    def defaults(self) -> dict[str, Any]:
        return {}


def _figures(
    begin: float, first: float | None, usage: dict[str, Any], reason: str | None, num_pieces: int
) -> str:
    if first is None:
        return f"no answer, ended by {reason or 'you'}"
    count = usage.get("completion_tokens")
    words = [f"{usage['prompt_tokens']} prompt tokens"] if "prompt_tokens" in usage else []
    words.append(f"{count} generated" if count else f"{num_pieces} pieces")
    words.append(f"first after {first - begin:.2f} s")
    took = time.perf_counter() - first
    if count and count > 1 and took > 0:
        words.append(f"then {(count - 1) / took:.1f} tokens/s")
    return ", ".join([*words, f"ended by {reason or 'you'}"])
