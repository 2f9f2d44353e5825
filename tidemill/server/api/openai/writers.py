"""Writers: what a completion and a chat completion look like on the wire, streamed as chunks or whole.

Logprobs are encoded to JSON as they arrive, since their objects take many times the memory of their text, and in bounded pieces,
so that the event loop can serve others in between.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidemill.errors import InvalidRequest
from tidemill.frontend.parsers import CallArguments, CallStart, OutputParser, Reading, TextPiece
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import SamplingParams
from tidemill.server.api.openai.types import ChatRequest, CompletionRequest, SamplingRequest
from tidemill.server.generation.custom_tools import custom_input
from tidemill.wire import TokenLogprobs, decode_logprobs

# A cell is one log-probability: a token reported with k alternatives has k + 1. A cell takes some 60 bytes of JSON, so a whole
# response takes about 32 MB at most.
MAX_LOGPROB_CELLS = 2**19
_ECHOED_PER_CELL = 8  # tokens of a prompt that is echoed as text

_json = msgspec.json.Encoder().encode


class Writer(ABC):
    """Of one request. A choice's number is prompt * n + sample."""

    object_name: str  # of the whole response
    chunk_name: str  # of a streamed chunk
    num_prompt_copies = 0  # how often the logprobs of a prompt are written in each of its choices
    writes_logprobs = False  # of the output

    def __init__(self, tokenizer: Tokenizer, prompts: list[list[int]], params: SamplingParams, body: SamplingRequest) -> None:
        self._tokenizer, self._prompts, self._params = tokenizer, prompts, params
        self.num_sent = params.n  # choices of each prompt
        self._lists_prompts = body.prompt_logprobs is not None
        self._token_name = _id_name if body.return_tokens_as_token_ids else tokenizer.token_text
        self._new_ids: list[list[int]] | None = None  # by choice: tokens that no chunk has reported yet
        if body.return_token_ids:
            self._new_ids = [[] for _ in range(len(prompts) * params.n)]
        self.verbose: dict[str, Any] = {}  # what else is said of the prompt
        self._stops: dict[int, str | int] = {}  # by choice
        self._prompt_lists: dict[int, msgspec.Raw] = {}

    async def take_prompt_logprobs(self, prompt: int, pieces: list[msgspec.Raw]) -> None:
        """They arrive before the first token. The first token of a prompt has none."""
        if self._lists_prompts:
            self._prompt_lists[prompt] = _list([b"null", await _encoded(pieces, self._prompt_entry)])

    def _prompt_logprobs(self, prompt: int) -> dict[str, Any]:
        return {"prompt_logprobs": self._prompt_lists.get(prompt, [None]) if self._lists_prompts else None}

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The token itself and the likeliest in its place, by id."""
        return {
            str(token): {"logprob": _finite(value), "decoded_token": self._tokenizer.token_text(token)}
            for token, value in dict([*entry.top, (entry.token_id, entry.logprob)]).items()
        }

    def take_ids(self, number: int, token_ids: list[int]) -> None:
        """Of the output of a choice that is written next, if they are to be reported."""
        if self._new_ids is not None:
            self._new_ids[number] += token_ids

    def _reported_ids(self, number: int) -> dict[str, Any]:
        """For the choice that is written now."""
        if self._new_ids is None:
            return {}
        token_ids, self._new_ids[number] = self._new_ids[number], []
        return {"token_ids": token_ids}

    def _without_new_ids(self) -> dict[str, Any]:
        """For a choice that is written after its last token."""
        return {} if self._new_ids is None else {"token_ids": []}

    def take_stop(self, number: int, stop: str | int | None) -> None:
        """The stop string or token that ended a choice; to be told before its last text."""
        if stop is not None:
            self._stops[number] = stop

    def _ending(self, number: int) -> dict[str, Any]:
        """What ended a choice, as vLLM and as SGLang say it: the first knows no end-of-text token."""
        stop = self._stops.get(number)
        is_asked = isinstance(stop, str) or stop in self._params.stop_token_ids
        return {"stop_reason": stop if is_asked else None, "matched_stop": stop}

    def prompt_ids(self) -> dict[str, Any]:
        """For the whole response or its first chunk."""
        return self.verbose

    def of_prompt(self) -> dict[str, Any]:
        """Of the prompt, for the whole response."""
        return self.prompt_ids()

    def first_chunk(self, number: int) -> dict[str, Any] | None:
        """Before any text."""
        return None

    @abstractmethod
    def without_text(self, number: int) -> dict[str, Any]:
        """A choice that says nothing."""

    @abstractmethod
    def chunks(self, number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None) -> list[dict[str, Any]]:
        """New output of a choice, as the choices of streamed chunks."""

    @abstractmethod
    def add(self, number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None) -> None:
        """New output of a choice, kept for the whole response."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """Of the whole response."""

    @property
    def num_echoed(self) -> int:
        """Prompt tokens that are sent back as text, over all choices."""
        return 0

    def limit(self, max_tokens: int) -> None:
        """Of each choice's output."""
        self._params = msgspec.structs.replace(self._params, max_tokens=max_tokens)

    def bounded(self, max_context: int, is_streamed: bool, default_limit: int | None, num_sharing: int = 1) -> SamplingParams:
        """The parameters, if the logprobs they ask for fit one response, which `num_sharing` of the same size share. Without
        max_tokens, the output ends where they no longer would, or at the default limit."""
        params, num_tokens, most_cells = self._params, sum(map(len, self._prompts)), MAX_LOGPROB_CELLS // num_sharing
        cells = self.num_echoed // _ECHOED_PER_CELL
        if params.prompt_logprobs is not None:
            cells += num_tokens * (params.prompt_logprobs + 1) * self.num_sent * self.num_prompt_copies
        if cells > most_cells:
            at = "prompt_logprobs" if self._lists_prompts else "echo"
            raise _too_many(
                cells * num_sharing, "Send fewer or shorter prompts at once, or ask for fewer logprobs or samples.", at
            )
        if not self.writes_logprobs or is_streamed:
            return params
        cells_per_token = params.n * (max(params.logprobs or 0, len(params.logprob_token_ids)) + 1)
        left = [max(max_context - len(prompt), 0) for prompt in self._prompts]
        if params.max_tokens is None:
            affordable = max((most_cells - cells) // (cells_per_token * len(left)), 1)
            most = max(left) if default_limit is None else min(max(left), max(default_limit, params.min_tokens))
            return params if most <= affordable else msgspec.structs.replace(params, max_tokens=affordable)
        cells += sum(min(params.max_tokens, num) for num in left) * cells_per_token
        if cells > most_cells:
            raise _too_many(
                cells * num_sharing, "Stream the response, or lower max_tokens, n or the number of logprobs.", "logprobs"
            )
        return params


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _too_many(cells: int, fix: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"The response could hold {cells:,} log-probabilities; at most {MAX_LOGPROB_CELLS:,} fit one response.",
        fix=fix,
        param=param,
    )


async def _encoded(pieces: list[msgspec.Raw], write: Callable[[TokenLogprobs], Any]) -> bytes:
    """A JSON list without its brackets."""
    parts = []
    for piece in pieces:
        parts.append(_json([write(entry) for entry in decode_logprobs(piece)])[1:-1])
        await asyncio.sleep(0)
    return b",".join(parts)


def _list(parts: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(part for part in parts if part) + b"]")


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON has no infinity


# ---- completions

_NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class _Lists:
    """Logprobs of a completion: four lists in parallel, as JSON."""

    def __init__(self, tokenizer: Tokenizer, name: Callable[[int], str], offset: int = 0) -> None:
        self._parts: dict[str, list[bytes]] = {name: [] for name in _NAMES}
        self._tokenizer, self._name = tokenizer, name
        self._offset = offset  # of the next token, in characters

    def add(self, entries: list[TokenLogprobs]) -> None:
        tokens, offsets = [], []
        for entry in entries:
            tokens.append(self._name(entry.token_id))
            offsets.append(self._offset)
            self._offset += len(self._tokenizer.token_text(entry.token_id))
        values = [_finite(entry.logprob) for entry in entries]
        top = [self._top(entry) for entry in entries]
        for name, column in zip(_NAMES, (tokens, values, top, offsets), strict=True):
            self._parts[name].append(_json(column)[1:-1])

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The token itself, and the likeliest. Of tokens with the same text, the likeliest counts."""
        top = {self._name(token): _finite(value) for token, value in reversed(entry.top)}
        return {self._name(entry.token_id): _finite(entry.logprob)} | dict(reversed(top.items()))

    def add_first(self, token_id: int) -> None:
        """The first token of a prompt: it has no log-probability."""
        self.add([TokenLogprobs(token_id, 0.0, [])])
        self._parts["token_logprobs"][-1] = self._parts["top_logprobs"][-1] = b"null"

    def copy(self) -> _Lists:
        made = _Lists(self._tokenizer, self._name, self._offset)
        made._parts = {name: list(parts) for name, parts in self._parts.items()}
        return made

    def body(self) -> dict[str, Any]:
        return {name: _list(parts) for name, parts in self._parts.items()}


@dataclass(slots=True)
class _Completion:
    texts: list[str] = field(default_factory=list)
    lists: _Lists | None = None
    finish_reason: str | None = None
    number: int = 0
    sum_logprobs: float = 0.0
    num_logprobs: int = 0


class CompletionWriter(Writer):
    object_name = chunk_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, prompts: list[list[int]], params: SamplingParams, body: CompletionRequest) -> None:
        super().__init__(tokenizer, prompts, params, body)
        if body.best_of is not None:
            self.num_sent = body.n or 1  # the likeliest
        self.writes_logprobs = body.logprobs is not None
        self._echo = bool(body.echo)
        self._is_text = isinstance(body.prompt, str) or (bool(body.prompt) and all(isinstance(one, str) for one in body.prompt))
        self.num_prompt_copies = self._lists_prompts + (self._echo and self.writes_logprobs)
        self._only_echo = self._echo and body.max_tokens == 0
        self._echoed: dict[int, _Lists] = {}  # by prompt
        self._texts: dict[int, str] = {}
        self._num_chars: dict[int, int] = {}  # streamed so far, by choice
        self._kept = [_Completion(number=number) for number in range(len(prompts) * params.n)]

    @property
    def num_echoed(self) -> int:
        return sum(map(len, self._prompts)) * self.num_sent if self._echo else 0

    async def take_prompt_logprobs(self, prompt: int, pieces: list[msgspec.Raw]) -> None:
        await super().take_prompt_logprobs(prompt, pieces)
        if self._echo and self.writes_logprobs:
            lists = self._echoed_lists(prompt)
            for piece in pieces:
                lists.add(decode_logprobs(piece))
                await asyncio.sleep(0)

    def _echoed_lists(self, prompt: int) -> _Lists:
        if prompt not in self._echoed:
            self._echoed[prompt] = _Lists(self._tokenizer, self._token_name)
            self._echoed[prompt].add_first(self._prompts[prompt][0])
        return self._echoed[prompt]

    def _echoed_text(self, prompt: int) -> str:
        if prompt not in self._texts:
            self._texts[prompt] = self._tokenizer.decode(self._prompts[prompt], skip_special=self._is_text) if self._echo else ""
        return self._texts[prompt]

    def _new_lists(self, prompt: int, is_first: bool, offset: int = 0) -> _Lists:
        return self._echoed_lists(prompt).copy() if self._echo and is_first else _Lists(self._tokenizer, self._token_name, offset)

    def chunks(self, number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None) -> list[dict[str, Any]]:
        prompt, offset, is_first = number // self.num_sent, self._num_chars.get(number, 0), number not in self._num_chars
        if self._only_echo:
            text, logprobs = "", []
        if is_first:
            text = self._echoed_text(prompt) + text
        self._num_chars[number] = offset + len(text)
        lists = None
        if self.writes_logprobs:
            lists = self._new_lists(prompt, is_first, offset)
            lists.add(logprobs)
        first = self._prompt_logprobs(prompt) | self._prompt_ids(prompt) if is_first else {}
        made = self._choice(number, text, lists, reason) | first | self._reported_ids(number)
        return [made if reason is None else made | self._ending(number)]  # with the last text, as vLLM and SGLang

    def without_text(self, number: int) -> dict[str, Any]:
        return self._choice(number, "", None, None)

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        return {} if self._new_ids is None else {"prompt_token_ids": self._prompts[prompt]}

    def add(self, number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None) -> None:
        kept = self._kept[number]
        kept.finish_reason = reason
        kept.sum_logprobs += sum(entry.logprob for entry in logprobs)
        kept.num_logprobs += len(logprobs)
        if self._only_echo:
            return
        kept.texts.append(text)
        if self.writes_logprobs:
            kept.lists = kept.lists or self._new_lists(number // self._params.n, True)
            kept.lists.add(logprobs)

    def choices(self) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for prompt in range(len(self._prompts)):
            group = self._kept[prompt * self._params.n : (prompt + 1) * self._params.n]
            if self.num_sent < len(group):
                group = sorted(group, key=lambda one: -one.sum_logprobs / max(one.num_logprobs, 1))[: self.num_sent]
            for kept in group:
                if self.writes_logprobs and kept.lists is None:
                    kept.lists = self._new_lists(prompt, True)
                text = self._echoed_text(prompt) + "".join(kept.texts)
                ids = {"token_ids": None, "prompt_token_ids": None} | self._prompt_ids(prompt) | self._reported_ids(kept.number)
                choice = self._choice(len(made), text, kept.lists, kept.finish_reason)
                made.append(choice | self._ending(kept.number) | self._prompt_logprobs(prompt) | ids)
        return made

    def _choice(self, number: int, text: str, lists: _Lists | None, reason: str | None) -> dict[str, Any]:
        return {"index": number, "text": text, "logprobs": lists and lists.body(), "finish_reason": reason}


# ---- chat


class _Message:
    """A message as a client puts it together from streamed deltas."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[tuple[dict[str, Any], list[str]]] = []  # and the pieces of their arguments
        self._function: dict[str, Any] | None = None  # called as before there were tools
        self._arguments: list[str] = []
        self.logprobs: list[bytes] = []
        self.finish_reason: str | None = None

    def add(self, delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if name == "function_call":
                self._function = self._function or value
                self._arguments.append(value["arguments"])
            elif name != "tool_calls":
                self._texts.setdefault(name, []).append(value)
            for call in value if name == "tool_calls" else ():
                if call["index"] == len(self._calls):
                    self._calls.append((call, []))
                if "function" in call:
                    self._calls[call["index"]][1].append(call["function"]["arguments"])

    def body(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": None if self._calls or self._function else ""}
        made |= {"refusal": None, "reasoning_content": None, "reasoning": None}
        made |= {name: "".join(texts) for name, texts in self._texts.items()}
        if self._function is not None:
            made["function_call"] = {"name": self._function["name"], "arguments": "".join(self._arguments)}
        if self._calls:
            made["tool_calls"] = [_whole_call(call, arguments) for call, arguments in self._calls]
        return made


def _whole_call(call: dict[str, Any], arguments: list[str]) -> dict[str, Any]:
    made = {"id": call["id"], "type": call["type"]}
    if call["type"] == "custom":
        return made | {"custom": call["custom"]}
    return made | {"function": {"name": call["function"]["name"], "arguments": "".join(arguments)}}


class ChatWriter(Writer):
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, tokenizer: Tokenizer, prompts: list[list[int]], params: SamplingParams, body: ChatRequest, reading: Reading
    ) -> None:
        super().__init__(tokenizer, prompts, params, body)
        self.num_prompt_copies = int(self._lists_prompts)
        self.writes_logprobs = bool(body.logprobs)
        one_call = body.parallel_tool_calls is False or body.functions is not None
        as_function = body.functions is not None
        self._readers = [
            _ChatReader(reading.parser(), one_call, as_function, body.custom_names, body.include_reasoning)
            for _ in range(params.n)
        ]
        self._echoed = body.echoed
        self.begins_with_null = False  # as llama.cpp's chats; OpenAI's with an empty text
        self._kept = [_Message() for _ in range(params.n)]
        for kept in self._kept if self._echoed else ():
            kept.add({"content": self._echoed})

    def first_chunk(self, number: int) -> dict[str, Any]:
        content = None if self.begins_with_null and not self._echoed else self._echoed
        return _delta(number, {"role": "assistant", "content": content})

    def without_text(self, number: int) -> dict[str, Any]:
        return _delta(number, {})

    def chunks(self, number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None) -> list[dict[str, Any]]:
        deltas = self._readers[number].read(text, reason is not None)
        if not deltas and (logprobs or reason):
            deltas = [{}]
        made = [_delta(number, delta) for delta in deltas]
        if made:
            if self.writes_logprobs:
                made[0]["logprobs"] = {"content": [self._entry(entry) for entry in logprobs]}
            made[0] |= self._reported_ids(number)
        if reason is not None:  # in a chunk without text, as in OpenAI's API: a client may stop reading at it
            if made[-1]["delta"]:
                made.append(_delta(number, {}) | self._without_new_ids())
            finish_reason = self._readers[number].reason(reason, self._stops.get(number)) or reason
            made[-1] |= {"finish_reason": finish_reason} | self._ending(number)
        for one in made:
            if "content" not in one["delta"]:  # SGLang's clients read one or the other
                one["delta"] = {"reasoning_content": None} | one["delta"]
        return made

    def prompt_ids(self) -> dict[str, Any]:
        return self.verbose | ({} if self._new_ids is None else {"prompt_token_ids": self._prompts[0]})

    def of_prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": None} | self.prompt_ids() | self._prompt_logprobs(0)

    def add(self, number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None) -> None:
        kept = self._kept[number]
        for delta in self._readers[number].read(text, reason is not None):
            kept.add(delta)
        if self.writes_logprobs and logprobs:
            kept.logprobs.append(_json([self._entry(entry) for entry in logprobs])[1:-1])
        kept.finish_reason = self._readers[number].reason(reason, self._stops.get(number))

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": number,
                "message": kept.body(),
                "logprobs": {"content": _list(kept.logprobs)} if self.writes_logprobs else None,
                "finish_reason": kept.finish_reason,
                **self._ending(number),
                "token_ids": None,
                **self._reported_ids(number),
            }
            for number, kept in enumerate(self._kept)
        ]

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        return self._cell(entry.token_id, entry.logprob) | {"top_logprobs": [self._cell(*pair) for pair in entry.top]}

    def _cell(self, token: int, value: float) -> dict[str, Any]:
        tokenizer = self._tokenizer
        return {"token": self._token_name(token), "logprob": _finite(value), "bytes": list(tokenizer.token_bytes(token))}


def _delta(number: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}


class _ChatReader:
    """One sample's text as deltas of a message: content, reasoning, tool calls."""

    def __init__(
        self,
        parser: OutputParser,
        one_call: bool,
        as_function: bool = False,
        custom: frozenset[str] = frozenset(),
        shows_reasoning: bool = True,
    ) -> None:
        """`as_function`: calls are written as before there were tools. `custom`: names of custom tools."""
        self._parser = parser
        self._one_call, self._as_function, self._custom_names = one_call, as_function, custom
        self._shows_reasoning = shows_reasoning
        self._has_calls = False
        self._arguments: list[str] = []  # of the last call
        self._custom: tuple[CallStart, list[str]] | None = None  # a call of a custom tool, and its arguments so far

    def read(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        pieces = self._parser.push(text)
        if is_last:
            pieces += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, TextPiece):
                if piece.is_reasoning and not self._shows_reasoning:
                    continue
                names = ("reasoning_content", "reasoning") if piece.is_reasoning else ("content",)  # clients know either name
                deltas.append(dict.fromkeys(names, piece.text))
            elif self._one_call and piece.index > 0:
                continue
            elif isinstance(piece, CallStart):
                deltas += self._end_custom()
                self._has_calls, self._arguments = True, []
                deltas += self._start_call(piece)
            else:
                self._arguments.append(piece.text)
                deltas += self._continue_call(piece)
        return deltas + self._end_custom() if is_last else deltas

    def _continue_call(self, piece: CallArguments) -> list[dict[str, Any]]:
        if self._custom is not None:
            self._custom[1].append(piece.text)
            return []
        if self._as_function:
            return [{"function_call": {"arguments": piece.text}}]
        return [{"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}]

    def _start_call(self, piece: CallStart) -> list[dict[str, Any]]:
        if piece.name in self._custom_names:
            self._custom = (piece, [])
            return []
        function = {"name": piece.name, "arguments": ""}
        if self._as_function:
            return [{"function_call": function}]
        return [{"tool_calls": [{"index": piece.index, "id": piece.call_id, "type": "function", "function": function}]}]

    def _end_custom(self) -> list[dict[str, Any]]:
        """A call of a custom tool is written when its input is complete, or cut off."""
        if self._custom is None:
            return []
        (start, pieces), self._custom = self._custom, None
        custom = {"name": start.name, "input": custom_input("".join(pieces))}
        return [{"tool_calls": [{"index": start.index, "id": start.call_id, "type": "custom", "custom": custom}]}]

    def reason(self, reason: str | None, stop: str | int | None) -> str | None:
        """The finish reason for clients. `stop`: what ended the text; a call that a stop string cuts is none to run."""
        if reason != "stop" or not self._has_calls or (isinstance(stop, str) and not self._is_whole()):
            return reason
        return "function_call" if self._as_function else "tool_calls"

    def _is_whole(self) -> bool:
        """Tells if the last call's arguments are complete."""
        with suppress(ValueError, RecursionError):
            msgspec.json.decode("".join(self._arguments) or "{}")
            return True
        return False
