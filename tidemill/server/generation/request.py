"""Generation: what a request asks the engine for, whatever API it came through, and what it
gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import OutputFormat
from tidemill.server.generation.figures import Figures
from tidemill.server.generation.logprobs import check_size
from tidemill.server.generation.message import MessageReader, PartEvent
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Delta, Hold, TokenLogprobs

UNLIMITED = 2**31 - 1  # as max_tokens of a generation that ends with the context


@dataclass(slots=True)
class Choice:
    """One sample of one prompt, and what is known of its output."""

    number: int  # over all prompts
    prompt: Prompt
    reader: MessageReader | None  # None: the output is plain text
    finish_reason: str | None = None
    stop: str | int | None = None  # the string or token that ended it
    num_output: int = 0
    num_cached: int = 0
    texts: list[str] = field(default_factory=list)  # for a whole response
    token_ids: list[int] = field(default_factory=list)
    cells: list[bytes] = field(
        default_factory=list
    )  # log-probabilities as JSON lists without brackets
    sum_logprobs: float = 0.0

    def take(self, delta: Delta, text: TextDelta) -> list[PartEvent]:
        self.num_output += text.num_tokens
        self.num_cached = max(self.num_cached, delta.num_cached)
        self.stop = text.stop if self.stop is None else self.stop
        self.finish_reason = text.finish_reason
        if self.reader is None or not (text.text or text.finish_reason):
            return []
        return self.reader.read(text.text, text.finish_reason is not None)

    def stop_reason(self) -> str | int | None:
        """The stop string or token that the request asked for, if one ended the output."""
        is_asked = isinstance(self.stop, str) or self.stop in self.prompt.params.stop_token_ids
        return self.stop if is_asked else None

    @property
    def ends_with_calls(self) -> bool:
        return self.reader is not None and self.reader.ends_with_calls(
            self.finish_reason, self.stop
        )


class Output(NamedTuple):
    """New output of a choice."""

    choice: Choice
    delta: Delta
    text: TextDelta
    events: Sequence[PartEvent]

    @property
    def token_ids(self) -> list[int]:
        """The tokens up to a stop string."""
        return self.delta.token_ids[: self.text.num_tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return (self.delta.logprobs or [])[: self.text.num_tokens]

    @property
    def is_last(self) -> bool:
        return self.text.finish_reason is not None


@dataclass(slots=True)
class Prompt:
    """A prompt, how it is continued, and how its output is read."""

    ids: list[int]
    params: SamplingParams
    output_format: OutputFormat | None = None  # None: the output is plain text
    prefix_leases: Sequence[Hold] = ()
    salt: str = ""
    number: int = 0
    figures: Figures = field(default_factory=Figures)
    choices: list[Choice] = field(default_factory=list)


@dataclass(slots=True)
class Generation:
    """All prompts of a request."""

    service: Service
    caller: Caller
    prompts: list[Prompt]
    one_call: bool = False  # of each choice; the others are left out
    must_call: bool = False  # the grammar was made of the tools
    ends_with_context: bool = False  # a limit that is larger than the context is none
    one_by_one: bool = False  # tokens
    tells_progress: bool = False
    priority: int | None = None
    timeout_s: float | None = None
    # What the log-probabilities of one response are counted by.
    keeps_logprobs: bool = False  # those of the whole output are in one response
    num_prompt_copies: int = 0  # how often those of a prompt are in it
    num_echoed: int = 0  # prompt tokens that it has as text
    prompt_param: str = "prompt_logprobs"  # asks for those of the prompt

    @property
    def choices(self) -> Iterator[Choice]:
        return (choice for prompt in self.prompts for choice in prompt.choices)

    @property
    def figures(self) -> Figures:
        return Figures.total(prompt.figures for prompt in self.prompts)

    def prepare(self, keeps_text: bool) -> None:
        """Checks and completes the parameters, and makes the choices. `keeps_text`: for a whole
        response."""
        number = 0
        for i, prompt in enumerate(self.prompts):
            prompt.number, prompt.figures.num_prompt = i, len(prompt.ids)
            most = prompt.params.max_tokens
            if self.ends_with_context and most is not None:
                room = max(self.service.context_of(prompt.params) - len(prompt.ids), 1)
                prompt.params = msgspec.structs.replace(
                    prompt.params, max_tokens=max(min(most, room), 1)
                )
        check_size(self)
        for prompt in self.prompts:
            prompt.params = self.service.with_defaults(prompt.params, prompt.ids)
            for _ in range(prompt.params.n):
                reader = None
                if prompt.output_format is not None:
                    reader = MessageReader(prompt.output_format.parser(), self.one_call, keeps_text)
                prompt.choices.append(Choice(number, prompt, reader))
                number += 1
