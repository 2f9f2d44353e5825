"""The laboratory's index: every page of it is listed there."""

from tests.docs.pages import DOCS
from tests.docs.test_links import links


def test_every_page_of_the_laboratory_is_listed():
    listed = set(links(DOCS / "lab" / "index.md"))
    assert {page.name for page in (DOCS / "lab").glob("*.md")} - listed == {"index.md"}
