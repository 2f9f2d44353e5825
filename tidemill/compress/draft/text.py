"""Text that draft heads learn from, as tokens: what the model itself writes, or a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tidemill.compress.draft.prompts import seed_prompts
from tidemill.engine.llm import LLM
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.sampling import SamplingParams, sample_seed

_MIN_TOKENS = 8  # of a sequence: shorter ones teach nothing
_GROUP = 32  # answers between two writes, at most
_ANSWER = 192  # tokens of an answer at most
_MAX_FILE_BYTES = 2**30
Tick = Callable[[int], None]  # tokens there are so far


class _Sized(Protocol):
    @property
    def vocab_size(self) -> int: ...


class Reporter(Protocol):
    """The receiver of a run's progress: a stage with its total, and how far it is."""

    def stage(self, name: str, total: int) -> None: ...
    def at(self, done: int) -> None: ...


class Texts(Protocol):
    """The part of a model that reading text needs: an LLM, or less."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def model_config(self) -> _Sized: ...


class Example(msgspec.Struct, frozen=True):
    """Tokens, of which those from `start` on are learned from; the others are a prompt."""

    ids: list[int]
    start: int = 0

    @property
    def num_learned(self) -> int:
        return len(self.ids) - self.start


@dataclass(slots=True)
class TextFile:
    """First the model's digest, then an example a line. A line that was being written when the
    process ended is dropped."""

    path: Path
    model: str

    def read(self) -> list[Example]:
        if not self.path.exists():
            self.path.write_bytes(msgspec.json.encode({"model": self.model}) + b"\n")
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self.path.write_bytes(whole)
        try:
            first, *lines = whole.splitlines()
            if msgspec.json.decode(first) != {"model": self.model}:
                raise ConfigError(
                    f"{self.path} is the text of another model.",
                    fix="Give another --out.",
                    param="out",
                )
            return [msgspec.json.decode(line, type=Example) for line in lines]
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(
                f"{self.path} is corrupt: {error}.", fix="Delete it, and start again."
            ) from error

    def append(self, sequences: list[Example]) -> None:
        with self.path.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(example) + b"\n" for example in sequences))


def write_text(llm: LLM, file: TextFile, num_tokens: int, seed: int, tick: Tick) -> list[Example]:
    """Writes the model's answers to the seed prompts, until there are so many tokens. Goes on where
    the file ends."""
    examples = file.read()
    prompts = seed_prompts(seed)
    total = sum(example.num_learned for example in examples)
    tick(total)
    while total < num_tokens:
        first, num = len(examples), min(_GROUP, -(-(num_tokens - total) // _ANSWER))
        some = [prompts[number % len(prompts)] for number in range(first, first + num)]
        params = [_params(llm, sample_seed(seed, first + i), first + i) for i in range(len(some))]
        answers = _answer(llm, some, params)
        examples += answers
        file.append(answers)
        total += sum(example.num_learned for example in answers)
        tick(total)
    return examples


def _params(llm: LLM, seed: int, number: int) -> SamplingParams:
    """The sampling parameters that people use: half with the model's own defaults, half greedy."""
    most = max(1, min(_ANSWER, llm.config.max_context // 2))
    return (
        SamplingParams(max_tokens=most, seed=seed)
        if number % 2
        else SamplingParams(max_tokens=most, temperature=0.0)
    )


def _answer(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[Example]:
    if llm.tokenizer.chat_template is None:
        outputs = llm.generate(prompts, params, progress=False)
    else:
        outputs = llm.chat(
            [[{"role": "user", "content": prompt}] for prompt in prompts], params, progress=False
        )
    return [
        Example(output.prompt_token_ids + output.outputs[0].token_ids, len(output.prompt_token_ids))
        for output in outputs
    ]


def text_for(
    llm: LLM,
    data: Path | None,
    num_tokens: int,
    length: int,
    seed: int,
    file: TextFile,
    report: Reporter,
) -> list[Example]:
    """The text of a file, or else what the model writes, which `file` keeps; sequences of at most
    so many tokens."""
    length = min(length, llm.config.max_context)
    if data is not None:
        report.stage("Reading text", 1)
        examples = read_text(llm, data, num_tokens, length)
        report.at(1)
        return examples
    report.stage("Writing text", num_tokens)
    examples = write_text(llm, file, num_tokens, seed, report.at)
    cut = (Example(example.ids[:length], example.start) for example in examples)
    return [example for example in cut if example.num_learned > 0]


def read_text(llm: Texts, path: Path, num_tokens: int, max_len: int) -> list[Example]:
    """A .txt file, cut into pieces; or .jsonl with an object a line: `text`, `messages`, or `ids`
    as this command writes them."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"{path} is neither .txt nor .jsonl.",
            fix="Give a text, or a JSON object a line.",
            param="calibration",
        )
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} is larger than {_MAX_FILE_BYTES} bytes.",
                fix="Give a part of it.",
                param="calibration",
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", param="calibration") from error
    examples: list[Example] = []
    total = 0
    for example in _pieces(llm, path, text, max_len):
        examples.append(example)
        total += example.num_learned
        if total >= num_tokens:
            break
    if total < _MIN_TOKENS * 4:
        raise ConfigError(
            f"{path} holds {total} tokens to learn from.",
            fix="Give more text.",
            param="calibration",
        )
    return examples


def _pieces(llm: Texts, path: Path, text: str, max_len: int) -> Iterator[Example]:
    is_text = path.suffix == ".txt"
    documents = (
        [_encoded(llm, text)]
        if is_text
        else (_line(llm, *line) for line in _objects(path, text) if "model" not in line[1])
    )
    for whole in documents:
        for first in range(0, len(whole.ids), max_len):
            piece = Example(whole.ids[first : first + max_len], max(0, whole.start - first))
            if piece.num_learned >= _MIN_TOKENS:
                yield piece


def _encoded(llm: Texts, text: str) -> Example:
    return Example(llm.tokenizer.encode(text))


def _objects(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"Line {number} of {path} is not JSON: {error}.", param="calibration"
                ) from error
            if not isinstance(value, dict):
                raise ConfigError(
                    f"Line {number} of {path} is not a JSON object.", param="calibration"
                )
            yield f"line {number} of {path}", value


def _line(llm: Texts, where: str, value: dict[str, Any]) -> Example:
    if "ids" in value:
        try:
            example = msgspec.convert(value, Example)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}.", param="calibration") from error
        are_known = all(0 <= token < llm.model_config.vocab_size for token in example.ids)
        if not are_known or not 0 <= example.start <= len(example.ids):
            raise ConfigError(f"{where}: ids are tokens of another model.", param="calibration")
        return example
    try:
        if isinstance(value.get("messages"), list):
            return Example(
                llm.tokenizer.encode_chat(value["messages"], add_generation_prompt=False)
            )
        if isinstance(value.get("text"), str):
            return _encoded(llm, value["text"])
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error}", param="calibration") from error
    raise ConfigError(f"{where} has no text, messages or ids.", param="calibration")
