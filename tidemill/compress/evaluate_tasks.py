"""Small tasks: multiple choice by likelihood from a JSONL file, and suites that a seed generates."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tidemill.engine.llm import LLM
from tidemill.errors import ConfigError
from tidemill.types.sampling import SamplingParams

_MAX_FILE_BYTES = 2**28
_MAX_CHOICES = 64
_GROUP = 32  # items that are run together
_LENGTHS = (256, 512, 1024)  # tokens of passkey prompts
Tick = Callable[[int], None]  # items done
QUESTIONS = {  # and what a right answer says
    "What is the capital of France?": r"\bParis\b",
    "How many days are there in a week?": r"\b(7|seven)\b",
    "Who wrote Romeo and Juliet?": r"\bShakespeare\b",
    "What is the chemical formula of water?": r"\bH2O\b|\bH₂O\b",
}


@dataclass(frozen=True, slots=True)
class Score:
    """`acc`: the share of items that are right. `acc_norm`: of multiple choice, by likelihood per
    character."""

    num_items: int
    acc: float
    acc_norm: float | None = None


class Suite(Protocol):
    name: str

    @property
    def num_items(self) -> int: ...
    def run(self, llm: LLM, tick: Tick) -> dict[str, Score]: ...


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt that is answered greedily."""

    prompt: str
    is_right: Callable[[str], bool]
    max_tokens: int
    stop: tuple[str, ...] = ("\n",)
    is_chat: bool = False


@dataclass(slots=True)
class Generated:
    """Items by the name under which they are counted; made for a model, whose tokens they may be
    measured in."""

    name: str
    num_items: int
    make: Callable[[LLM], dict[str, list[Item]]]

    def run(self, llm: LLM, tick: Tick) -> dict[str, Score]:
        scores, done = {}, 0
        for name, items in self.make(llm).items():
            num_right = 0
            for first in range(0, len(items), _GROUP):
                some = items[first : first + _GROUP]
                num_right += sum(
                    item.is_right(text)
                    for item, text in zip(some, _answers(llm, some), strict=True)
                )
                done += len(some)
                tick(done)
            scores[name] = Score(len(items), num_right / len(items))
        return scores


def _answers(llm: LLM, items: list[Item]) -> list[str]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=item.max_tokens, stop=item.stop)
        for item in items
    ]
    if items[0].is_chat and llm.tokenizer.chat_template is not None:
        conversations = [[{"role": "user", "content": item.prompt}] for item in items]
        return [output.text for output in llm.chat(conversations, params, progress=False)]
    return [
        output.text
        for output in llm.generate([item.prompt for item in items], params, progress=False)
    ]


# ---- generated suites


def arithmetic(num: int, seed: int) -> Generated:
    """Sums and differences of numbers of one and of two digits, after four examples."""
    draw = random.Random(f"arithmetic {seed}")

    def line(below: int) -> tuple[str, int]:
        a, b, sign = draw.randrange(below), draw.randrange(below), draw.choice("+-")
        return f"{a} {sign} {b} =", a + b if sign == "+" else a - b

    def item(below: int) -> Item:
        shots = "".join(f"{text} {value}\n" for text, value in (line(below) for _ in range(4)))
        text, value = line(below)
        return Item(shots + text, _first_number_is(value), 8)

    items = {f"arithmetic@{digits}": [item(10**digits) for _ in range(num)] for digits in (1, 2)}
    return Generated("arithmetic", 2 * num, lambda _: items)


def _first_number_is(value: int) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        found = re.match(r"\s*(-?\d+)", text)
        return found is not None and int(found[1]) == value

    return check


_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)


def passkey(num: int, seed: int, lengths: tuple[int, ...] = ()) -> Generated:
    """A number of four digits in text of a certain length, at depths that are spread evenly, is to
    be repeated."""

    def make(llm: LLM) -> dict[str, list[Item]]:
        most = llm.config.max_context - 16
        chosen = lengths or tuple(length for length in _LENGTHS if length <= most)
        if not chosen or max(chosen) > most:
            raise ConfigError(
                f"Passkeys at {max(lengths or _LENGTHS[:1])} tokens do not fit the context of {llm.config.max_context}.",
                fix=f"Give lengths up to {most}.",
                param="lengths",
            )
        return {
            f"passkey@{length}": [_passkey(llm, length, i, num, seed) for i in range(num)]
            for length in chosen
        }

    return Generated("passkey", num * len(lengths or _LENGTHS), make)


def _passkey(llm: LLM, length: int, number: int, num: int, seed: int) -> Item:
    key = random.Random(f"passkey {seed} {length} {number}").randrange(1000, 10_000)
    count = lambda text: len(llm.tokenizer.encode(text))  # noqa: E731
    middle = f"The pass key is {key}. Remember it. {key} is the pass key. "
    ending = "What is the pass key? The pass key is"
    room = max(1, (length - count(middle + ending)) // max(1, count(_FILLER * 8) // 8))
    before = round(room * (number + 0.5) / num)
    return Item(
        _FILLER * before + middle + _FILLER * (room - before) + ending,
        lambda text: str(key) in text,
        12,
    )


_KINDS = ("string", "integer", "boolean")
_FIELDS = ("name", "city", "age", "count", "active", "color", "year", "title", "open", "level")
_VALUES: dict[str, tuple[Any, ...]] = {
    "string": ("red", "Oslo", "Anna"),
    "integer": (7, 12, 1999),
    "boolean": (True, False),
}


def json_following(num: int, seed: int) -> Generated:
    """Facts as a JSON object with just the fields of a schema, after two examples. It is not
    constrained to be JSON."""
    draw = random.Random(f"json {seed}")

    def task() -> tuple[str, dict[str, str], dict[str, Any]]:
        fields = {name: draw.choice(_KINDS) for name in draw.sample(_FIELDS, draw.randint(2, 4))}
        value = {name: draw.choice(_VALUES[kind]) for name, kind in fields.items()}
        facts = ", ".join(
            f"{name} is {str(fact).lower() if fact in (True, False) else fact}"
            for name, fact in value.items()
        )
        return f"Schema: {json.dumps(fields)}\nFacts: {facts}\nObject:", fields, value

    items = []
    for _ in range(num):
        shots = "".join(
            f"{text} {json.dumps(value)}\n\n" for text, _, value in (task() for _ in range(2))
        )
        text, fields, _ = task()
        items.append(Item(shots + text, _follows(fields), 64))
    return Generated("json", num, lambda _: {"json": items})


def _follows(fields: dict[str, str]) -> Callable[[str], bool]:
    kinds = {"string": str, "integer": int, "boolean": bool}

    def check(text: str) -> bool:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return (
            isinstance(value, dict)
            and value.keys() == fields.keys()
            and all(type(value[name]) is kinds[kind] for name, kind in fields.items())
        )

    return check


def questions(num: int, seed: int) -> Generated:
    """A few facts, asked as in a chat where the model has a chat template."""
    del num, seed  # they are always the same

    def check(pattern: str) -> Callable[[str], bool]:
        return lambda text: re.search(pattern, text) is not None

    items = [
        Item(question, check(right), 64, (), is_chat=True) for question, right in QUESTIONS.items()
    ]
    return Generated("questions", len(items), lambda _: {"questions": items})


SUITES: dict[str, Callable[[int, int], Generated]] = {
    "arithmetic": arithmetic,
    "passkey": passkey,
    "json": json_following,
    "questions": questions,
}


# ---- multiple choice


@dataclass(frozen=True, slots=True)
class Choice:
    """`context` and one of `choices`, which begin with the space that separates them."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(slots=True)
class MultipleChoice:
    """The likeliest continuation counts, as in lm-evaluation-harness."""

    name: str
    items: list[Choice]

    @property
    def num_items(self) -> int:
        return len(self.items)

    def run(self, llm: LLM, tick: Tick) -> dict[str, Score]:
        right = right_norm = 0
        for first in range(0, len(self.items), _GROUP):
            some = self.items[first : first + _GROUP]
            for question, sums in zip(some, _likelihoods(llm, some), strict=True):
                lengths = [max(1, len(choice.strip())) for choice in question.choices]
                right += _best(sums) == question.answer
                right_norm += (
                    _best([total / length for total, length in zip(sums, lengths, strict=True)])
                    == question.answer
                )
            tick(first + len(some))
        return {
            self.name: Score(len(self.items), right / len(self.items), right_norm / len(self.items))
        }


def _best(values: list[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


def _likelihoods(llm: LLM, items: list[Choice]) -> list[list[float]]:
    """Sums of log probabilities of the choices' tokens."""
    prompts, params = [], []
    for question in items:
        start = len(llm.tokenizer.encode(question.context))
        for choice in question.choices:
            ids = llm.tokenizer.encode(question.context + choice)
            prompts.append(ids)
            first = max(1, min(start, len(ids) - 1))
            params.append(
                SamplingParams(
                    max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=first
                )
            )
    outputs = iter(llm.generate(prompts, params, progress=False))
    return [[_total(next(outputs)) for _ in question.choices] for question in items]


def _total(output: Any) -> float:
    if output.error is not None:
        raise output.error
    return sum(entry.logprob for entry in output.prompt_logprobs or () if entry)


def read_choices(path: Path) -> MultipleChoice:
    """An object a line: `question` or `context`, `choices`, and `answer`, the index, the letter or
    the text of one of them."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} is larger than {_MAX_FILE_BYTES} bytes.",
                fix="Give a part of it.",
                param="tasks",
            )
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", param="tasks") from error
    items = [
        _choice(line, f"Line {number} of {path}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not items:
        raise ConfigError(f"{path} holds no items.", param="tasks")
    return MultipleChoice(path.stem, items)


def _choice(line: str, where: str) -> Choice:
    fix = 'Write {"question": "...", "choices": ["...", "..."], "answer": 0}.'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}.", fix=fix, param="tasks") from error
    value = value if isinstance(value, dict) else {}
    question, context = value.get("question"), value.get("context")
    choices: list[Any] = value["choices"] if isinstance(value.get("choices"), list) else []
    text = question if isinstance(question, str) else context
    has_choices = 2 <= len(choices) <= _MAX_CHOICES and all(
        isinstance(text, str) and text for text in choices
    )
    if not isinstance(text, str) or not text or not has_choices:
        raise ConfigError(f"{where} is no item of multiple choice.", fix=fix, param="tasks")
    number = _answer(value.get("answer"), choices)
    if number is None:
        what = f"{where}: the answer is {str(value.get('answer'))[:100]!r}."
        raise ConfigError(
            what, fix="It must be the index, the letter or the text of a choice.", param="tasks"
        )
    context = f"Question: {question}\nAnswer:" if isinstance(question, str) else text.rstrip()
    return Choice(context, tuple(f" {text}" for text in choices), number)


def _answer(label: Any, choices: list[str]) -> int | None:
    if label in choices:
        return choices.index(label)
    if isinstance(label, str) and len(label) == 1:
        label = ord(label.upper()) - ord("A")
    is_index = type(label) is int and 0 <= label < len(choices)
    return label if is_index else None
