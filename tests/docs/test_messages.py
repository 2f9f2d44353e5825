"""Messages that the manual quotes are those of the code."""

import re

import pytest

from tests.docs.pages import DOCS, ROOT, name, without_blocks

PAGES = [
    DOCS / "troubleshooting.md",
    *(DOCS / "howto" / f"{page}.md" for page in ("disk-full", "out-of-memory-at-start")),
]
_OF_THE_SYSTEM = {"Address already in use", "No space left on device"}


def quoted(text: str) -> list[str]:
    """Parts of quoted messages between the places that differ each time (… and capital letters)."""
    messages = re.findall(r'"([^"\n]+)"', without_blocks(text))
    parts = (part.strip(" .:;,") for text in messages for part in re.split("…|NAME|\\bN\\b", text))
    return [part for part in parts if len(part) > 7 and part not in _OF_THE_SYSTEM]


def source() -> str:
    """The code, with strings over several lines as one."""
    texts = (path.read_text() for path in sorted((ROOT / "tidemill").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_messages_are_those_of_the_code(page):
    parts, code = quoted(page.read_text()), source()
    assert parts
    assert not [part for part in parts if part not in code]


def test_other_messages_are_noticed():
    assert quoted('It says "The sea of … is rough today."') == ["The sea of", "is rough today"]
    assert "is rough today" not in source()
