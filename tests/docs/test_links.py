"""Links inside the documentation: every file and every heading that one names exists."""

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import DOCS, FOLDERS, ROOT, all_pages, name, without_blocks

_LINK = re.compile(r"\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)|(?:href|src)=\"([^\"]+)\"")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs.yml make them."""
    found: dict[str, int] = {}
    text = page.read_text()
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)? *$", without_blocks(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return {*found, *re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)}


def links(page: Path) -> list[str]:
    text = _CODE.sub("", without_blocks(page.read_text()))
    found = (one or other for one, other in _LINK.findall(text))
    return [link for link in found if not re.match(r"[a-z][a-z+.-]*:", link)]


def broken(page: Path, link: str) -> str:
    """What is wrong with a link; empty: nothing."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return "no such file"
    if not target.is_relative_to(DOCS if page.is_relative_to(DOCS) else ROOT):
        return "outside the site" if page.is_relative_to(DOCS) else "outside the repository"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return "no such heading"
    return ""


@pytest.mark.parametrize("page", all_pages(), ids=name)
def test_links(page):
    wrong = [f"{link}: {why}" for link in links(page) if (why := broken(page, link))]
    assert not wrong


def test_a_wrong_link_is_noticed():
    page = ROOT / "README.md"
    assert broken(page, "docs/no-such-page.md") == "no such file"
    assert broken(page, "README.md#no-such-heading") == "no such heading"
    assert not broken(page, "LICENSE")
    assert broken(DOCS / "index.md", "../LICENSE") == "outside the site"


def test_every_page_is_two_clicks_from_the_readme():
    def pages_linked(page: Path) -> set[Path]:
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        return {target for target in targets if target.suffix == ".md"}

    one = pages_linked(ROOT / "README.md")
    reached = one.union(*map(pages_linked, one))
    assert not [name(page) for page in all_pages() if page not in reached | {ROOT / "README.md"}]


def _nav(entry) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [
        page
        for part in (entry.values() if isinstance(entry, dict) else entry)
        for page in _nav(part)
    ]


def test_every_page_of_the_manual_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """YAML with the names of Python functions that the theme's extensions need."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    listed = _nav(settings["nav"])
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert not [page for page in listed if page not in there], (
        "pages of mkdocs.yml that do not exist"
    )
    manual = {
        page
        for page in there
        if page.split("/")[0] in FOLDERS or page in ("index.md", "troubleshooting.md")
    }
    assert not sorted(manual - set(listed)), "add these pages to the nav of mkdocs.yml"
    assert len(listed) == len(set(listed))
