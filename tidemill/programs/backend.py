"""The backends that run a program's requests. Each backend has an event loop in a thread of its
own, in which all its states advance."""

from __future__ import annotations

import asyncio
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidemill.programs.expressions import Gen

OnText = Callable[[str], None]
_ANCHOR = "\n"  # some text, of which the next is not the beginning


@dataclass(slots=True)
class Generated:
    token_ids: list[int]
    text: str
    finish_reason: str
    stop: str | int | None  # the stop string or token that ended it
    num_cached: int


@dataclass(slots=True)
class Scored:
    """Log-probabilities of a prompt's tokens, from where they were asked for."""

    logprobs: list[float]
    num_cached: int


@dataclass(slots=True)
class Usage:
    num_requests: int = 0
    num_prompt: int = 0
    num_cached: int = 0  # prompt tokens that were in the KV cache
    num_output: int = 0

    @property
    def num_computed(self) -> int:
        """Tokens that went through the model."""
        return self.num_prompt - self.num_cached + self.num_output

    def add(self, num_prompt: int, num_cached: int, num_output: int = 0) -> None:
        self.num_requests += 1
        self.num_prompt += num_prompt
        self.num_cached += num_cached
        self.num_output += num_output


@dataclass(slots=True)
class Token:
    """One token of a rendered conversation."""

    token_id: int
    data: bytes = field(repr=False)


class Backend(ABC):
    """Methods are called in its event loop. A call that is cancelled frees its requests. `salt`:
    requests share cached prefixes with those of the same salt."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # whether the tokenizer writes a space before every text; None: not tried yet
        self._adds_space: bool | None = None
        thread = threading.Thread(
            target=self.loop.run_forever, name="tidemill-programs", daemon=True
        )
        thread.start()
        weakref.finalize(self, self.loop.call_soon_threadsafe, self.loop.stop)

    async def encode_after(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts that continue another: without what the tokenizer writes before a first
        one."""
        if self._adds_space is None:
            alone, after = await self.encode(["a", f"{_ANCHOR}a"])
            self._adds_space = after[-len(alone) :] != alone
        if not self._adds_space:
            return await self.encode(texts)
        anchor, *encoded = await self.encode([_ANCHOR, *(_ANCHOR + text for text in texts)])
        return [ids[len(anchor) :] if ids[: len(anchor)] == anchor else (await self.encode([text]))[0]
                for text, ids in zip(texts, encoded, strict=True)]  # fmt: skip

    @abstractmethod
    async def encode(self, texts: Sequence[str], at_start: bool = False) -> list[list[int]]:
        """Tokens of each text. `at_start`: with those that the model expects before a text."""

    @abstractmethod
    async def encode_chat(self, messages: list[dict[str, str]]) -> list[Token]:
        """A conversation by the chat template, up to where the assistant's reply begins."""

    @abstractmethod
    async def decode(self, token_ids: list[int]) -> str:
        """Without special tokens."""

    @abstractmethod
    async def generate(
        self, token_ids: list[int], gen: Gen, salt: str, on_text: OnText
    ) -> Generated:
        """`on_text`: called with each piece of the text."""

    @abstractmethod
    async def score(self, prompts: list[list[int]], start: int, salts: list[str]) -> list[Scored]:
        """Log-probabilities of the tokens from `start` on (1 or more), of all prompts in one batch."""
