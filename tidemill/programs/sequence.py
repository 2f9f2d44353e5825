"""Sequence: the tokens of a state. What was computed is kept as token ids and never tokenized
again; text that was appended since is tokenized as a whole when a request needs it, so that a
program's prompts have the tokens of the same texts sent by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, count, takewhile

from tidemill.errors import ProgramError
from tidemill.programs.backend import Backend, Generated, OnText, Usage
from tidemill.programs.expressions import Gen, Select

_SALTS = count(1)


@dataclass(slots=True)
class Choice:
    """The result of a select: scores are mean log-probabilities."""

    text: str
    scores: dict[str, float]
    logprobs: list[list[float]]  # of each choice's tokens


@dataclass(slots=True)
class Sequence:
    backend: Backend
    usage: Usage
    shares: bool = True  # cached prefixes
    ids: list[int] = field(default_factory=list)
    tail: str = ""  # text that is not tokenized yet
    messages: list[dict[str, str]] = field(default_factory=list)
    replies: set[int] = field(default_factory=set)  # messages whose tokens are in `ids`

    def copy(self) -> Sequence:
        more = (list(self.ids), self.tail, list(self.messages), set(self.replies))
        return Sequence(self.backend, self.usage, self.shares, *more)

    async def generate(self, gen: Gen, on_text: OnText) -> Generated:
        (new,) = await self._encoded([self.tail])
        self.ids, self.tail = self.ids + new, ""
        generated = await self.backend.generate(self.ids, gen, self._salt(), on_text)
        self.usage.add(len(self.ids), generated.num_cached, len(generated.token_ids))
        kept, self.tail = await self._kept(generated)
        self.ids += kept
        return generated

    async def select(self, select: Select) -> Choice:
        """Each choice is tokenized together with the text before it. All are scored from the first
        token that any of them changes."""
        before, *several = await self._encoded(
            [self.tail, *(self.tail + choice for choice in select.choices)]
        )
        start = len(self.ids) + min(_num_common(before, ids) for ids in several)
        if start == 0:  # the first token has no probability: the choices are tokenized apart
            if not before:
                raise ProgramError("select() has no text before it.", fix="Append some first.")
            several = [before + ids for ids in await self.backend.encode_after(select.choices)]
            start = len(before)
        prompts = [self.ids + ids for ids in several]
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        scored = await self.backend.score(
            [list(ids) for ids in distinct], start, [self._salt() for _ in distinct]
        )
        for prompt, scored_prompt in zip(distinct, scored, strict=True):
            self.usage.add(len(prompt), scored_prompt.num_cached)
        by_prompt = dict(zip(distinct, scored, strict=True))
        logprobs = [by_prompt[tuple(prompt)].logprobs for prompt in prompts]
        scores = [sum(values) / len(values) for values in logprobs]
        best = max(range(len(scores)), key=lambda i: scores[i])  # the first of equals
        self.ids, self.tail = prompts[best], ""
        return Choice(
            select.choices[best], dict(zip(select.choices, scores, strict=True)), logprobs
        )

    async def open_reply(self) -> str:
        """Append the messages since the last reply, by the chat template. Returns their text as the
        template has it. Earlier replies stay as they were computed, whatever the template would
        make of them now."""
        if not self.messages and (self.ids or self.tail):
            raise ProgramError(
                "A conversation begins after text without a role.",
                fix="Use system() or user() for it.",
            )
        if not self.messages:
            raise ProgramError(
                "The assistant replies to nothing.", fix="Append a user() message first."
            )
        mark = "20482"  # instead of replies; it ends with a digit, so that no token goes beyond it
        while any(mark in message["content"] for message in self.messages):
            mark += "7"
        shown = [
            message | {"content": mark} if i in self.replies else message
            for i, message in enumerate(self.messages)
        ]
        tokens = await self.backend.encode_chat(shown)
        if self.replies:
            end = b"".join(token.data for token in tokens).rfind(mark.encode()) + len(mark)
            ends = list(accumulate(len(token.data) for token in tokens))
            if end < len(mark) or end not in ends:
                fix = "Use texts without roles, or another template."
                raise ProgramError("The chat template does not show where a reply ends.", fix=fix)
            tokens = tokens[ends.index(end) + 1 :]
            (rest,) = await self._encoded([self.tail])
            self.ids, self.tail = self.ids + rest, ""
        self.ids = self.ids + [token.token_id for token in tokens]
        return b"".join(token.data for token in tokens).decode(errors="replace")

    async def _encoded(self, texts: list[str]) -> list[list[int]]:
        """The token ids of texts that come next."""
        if self.ids:
            return await self.backend.encode_after(texts)
        return await self.backend.encode(texts, at_start=True)

    async def _kept(self, generated: Generated) -> tuple[list[int], str]:
        """The tokens of a generation that are before the stop string or token, and the text of one
        that reaches into it."""
        ids = generated.token_ids
        if isinstance(generated.stop, int):
            return ids[:-1], ""
        if generated.stop is None:
            return ids, ""
        for num in range(len(ids), -1, -1):
            text = await self.backend.decode(ids[:num])
            if generated.text.startswith(text):
                return ids[:num], generated.text[len(text) :]
        raise AssertionError("no tokens have no text")

    def _salt(self) -> str:
        return "" if self.shares else f"alone-{id(_SALTS)}-{next(_SALTS)}"


def _num_common(first: list[int], second: list[int]) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
