"""The manual's language: no dates, no machines of the laboratory, no long sentences."""

import re

import pytest

from tests.docs.pages import ROOT, manual, name, without_blocks

LONGEST_SENTENCE = 50  # words
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = re.compile(
    rf"\b20\d\d-\d\d-\d\d\b|\b\d{{1,2}} (?:{_MONTHS})\b|\b(?:{_MONTHS}) (?:\d{{1,2}}, )?20\d\d\b"
)
_MACHINE = re.compile(r"\b[Mm]achines? [A-D]\b")


def plain(text: str) -> str:
    """A page's words: code and the targets of links are one word each."""
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "code", without_blocks(text), flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(text: str) -> list[str]:
    """The sentences of paragraphs, list items and table cells."""
    parts = re.split(r"\n\s*\n|^\s*(?:[-*+]|\d+\.)\s|^#+ .*$|\|", text, flags=re.MULTILINE)
    return [
        sentence
        for part in parts
        for sentence in re.split(r"(?<=[.!?])[\"')*_]*\s+", part)
        if sentence.strip()
    ]


def faults(text: str) -> list[str]:
    words = plain(text)
    found = [f"a date: {date}" for date in _DATE.findall(words)]
    found += [f"a machine of the laboratory: {machine}" for machine in _MACHINE.findall(words)]
    long = (
        " ".join(sentence.split())
        for sentence in sentences(words)
        if len(sentence.split()) > LONGEST_SENTENCE
    )
    return [*found, *(f"{len(sentence.split())} words: {sentence}" for sentence in long)]


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *manual()],
    ids=name,
)
def test_style(page):
    assert not faults(page.read_text())


def test_faults_are_noticed():
    assert (
        len(faults("On 18 November it was slow.\n\nIt ran on 2026-11-18.\n\nMachine B was fast."))
        == 3
    )
    assert len(faults("- " + "word " * 51 + "end.\n- short")) == 1
    assert not faults(
        "```\n2026-11-18\n```\n\nThe header `anthropic-version: 2023-06-01`. " + "word. " * 60
    )
