"""The parsers that a model's output needs: chosen from its chat template, or named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidemill.errors import ConfigError, InvalidRequest
from tidemill.frontend.parsers.families import HARMONY, JSON, TOOL_PARSERS, Family, family_of
from tidemill.frontend.parsers.harmony import HarmonyParser
from tidemill.frontend.parsers.pieces import OutputParser
from tidemill.frontend.parsers.reasoning import (
    REASONING_PARSERS,
    THINK,
    Markers,
    ReasoningCounter,
    markers_of,
)
from tidemill.frontend.parsers.tagged import TaggedParser
from tidemill.types.sampling import Reasoning, SamplingParams

AUTO, NONE = "auto", "none"
SWITCHES = ("enable_thinking", "thinking")  # what templates call it: Qwen, GLM; DeepSeek, Granite


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The form of a model's tool calls and reasoning. `is_expected`: its template knows reasoning,
    or it was asked for by name. `budget`: reasoning is ended after so many tokens if a request does
    not say."""

    family: Family | None
    markers: Markers | None
    is_expected: bool
    budget: int | None = None

    @staticmethod
    def of(
        template: str,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        budget: int | None = None,
    ) -> ModelFormat:
        family = (
            family_of(template)
            if tool_parser == AUTO
            else _named(TOOL_PARSERS, tool_parser, "tool-parser")
        )
        if reasoning_parser != AUTO:
            markers = _named(REASONING_PARSERS, reasoning_parser, "reasoning-parser")
            return ModelFormat(family, markers, markers is not None, budget)
        found = markers_of(template)
        return ModelFormat(family, found or THINK, found is not None, budget)

    def output_format(
        self,
        prompt_end: str,
        functions: Iterable[Mapping[str, Any]] = (),
        only_calls: bool = False,
        continued: str = "",
        variables: Mapping[str, Any] | None = None,
    ) -> OutputFormat:
        """The output format of one request. `prompt_end`: how its prompt ends; `continued`: the
        message that the output continues, if it does; `functions`: what it may call; `only_calls`:
        it must; `variables`: of its template, which may turn reasoning off."""
        markers, is_open = self.markers, False
        is_off = any((variables or {}).get(name) is False for name in SWITCHES)
        if markers is not None and not markers.is_repeated:
            end = prompt_end.rstrip()
            is_open = end.endswith(markers.opening) or continued.rfind(
                markers.opening
            ) > continued.rfind(markers.ending)
            if not is_open and (continued or end.endswith(markers.ending)):
                markers = None  # the reasoning is over, or skipped
            elif markers.starts_open and not is_off:
                is_open = True
        is_expected = self.is_expected and (is_open or not is_off)  # else nothing waits for it
        tools = {function["name"]: function.get("parameters") or {} for function in functions}
        return OutputFormat(
            self.family, markers, is_open, is_expected, tools, only_calls, self.budget
        )


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format of one request's output, and how it is read."""

    family: Family | None
    markers: Markers | None
    is_open: bool  # the prompt has opened the reasoning
    is_expected: bool
    functions: Mapping[str, dict[str, Any]]
    only_calls: bool
    budget: int | None = None  # if the request does not say
    parsers: list[OutputParser] = field(default_factory=list, compare=False)  # that were made

    @property
    def has_called(self) -> bool:
        """A sample has called a function."""
        return any(parser.has_called for parser in self.parsers)

    def parser(self) -> OutputParser:
        """The parser of one sample."""
        self.parsers.append(self._parser())
        return self.parsers[-1]

    def _parser(self) -> OutputParser:
        looks_for_calls = bool(self.functions) and (self.family is not None or self.only_calls)
        functions = self.functions if looks_for_calls else {}
        if self.family is HARMONY or (self.markers is not None and self.markers.is_repeated):
            return HarmonyParser(functions, self.markers is not None, self.only_calls)
        family = JSON if self.only_calls else self.family  # a grammar writes forced calls as JSON
        return TaggedParser(
            family if looks_for_calls else None,
            functions,
            self.markers,
            self.is_open,
            self.only_calls,
        )

    def counter(self) -> ReasoningCounter | None:
        """The counter of the tokens of one sample's reasoning."""
        return ReasoningCounter(self.markers, self.is_open) if self.markers is not None else None

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the parser must see."""
        if self.family is HARMONY or (self.markers is not None and self.markers.is_repeated):
            return frozenset(HARMONY.marks)
        reasoning = (self.markers.opening, self.markers.ending) if self.markers is not None else ()
        calls = self.family.marks if self.family is not None and self.functions else ()
        return frozenset((*reasoning, *calls))

    @property
    def can_end(self) -> bool:
        """Its reasoning, if there is any, is between marks, so that it can be ended."""
        return self.markers is not None and not self.markers.is_repeated

    @property
    def takes_budget(self) -> bool:
        """The model reasons, and its reasoning can be ended."""
        return self.is_expected and self.can_end

    def drops_budget(self, params: SamplingParams) -> bool:
        """Nothing is there that a budget could end: the model does not reason, or not before this
        grammar."""
        return self.markers is None or (params.grammar is not None and not self.is_expected)

    def gated(self, params: SamplingParams, budget: int | None = None) -> SamplingParams:
        """The grammar applies to what follows the reasoning, which is ended after `budget` tokens;
        -1: it is not ended, None: as the server has it."""
        markers = self.markers
        if markers is not None and markers.is_repeated and budget is not None and budget >= 0:
            what = "A budget of reasoning is not supported for a model that writes channels."
            raise InvalidRequest(
                what, fix="Give reasoning_effort instead.", param="thinking_token_budget"
            )
        if budget is None and self.takes_budget and params.beams is None:
            budget = self.budget
        if budget == -1:
            budget = None
        is_gated = budget is not None if params.grammar is None else self.is_expected
        if markers is None or not is_gated:
            return params
        gate = Reasoning(
            markers.opening,
            markers.answer or markers.ending,
            self.is_open or markers.is_repeated,
            budget,
        )
        return msgspec.structs.replace(params, reasoning=gate)


def _named(table: Mapping[str, Any], name: str, option: str) -> Any:
    if name == NONE:
        return None
    if name not in table:
        raise ConfigError(
            f"There is no {option} {name[:40]!r}.",
            fix=f"Choose one of {', '.join((AUTO, NONE, *table))}.",
        )
    return table[name]
