"""The pages of the documentation, and what stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("start", "howto", "how", "reference", "extending")
_FENCE = re.compile(r"^( *)(```+|~~~+) *(\S*)[^\n]*\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
_EXCUSE = re.compile(r"<!-- not run: .+ -->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    is_excused: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def all_pages() -> list[Path]:
    """Every page: manual, laboratory, and those beside `docs/`."""
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def manual() -> list[Path]:
    """The pages of the manual."""
    pages = [DOCS / "index.md", DOCS / "architecture.md", DOCS / "troubleshooting.md"]
    pages += [page for folder in FOLDERS for page in sorted((DOCS / folder).rglob("*.md"))]
    return [page for page in pages if page.is_file()]


def name(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


def without_blocks(text: str) -> str:
    """A page without its fenced blocks and comments; lines keep their numbers."""
    for pattern in (_FENCE, re.compile(r"<!--.*?-->", re.DOTALL)):
        text = pattern.sub(lambda found: "\n" * found[0].count("\n"), text)
    return text


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        body = re.sub(rf"^{found[1]}", "", found[4], flags=re.MULTILINE)
        yield Block(
            name(page), before.count("\n") + 1, found[3], body, bool(_EXCUSE.search(before))
        )
