"""The table of modules, from the first sentence of each module's docstring.

    python -m tools.module_map

It writes docs/reference/modules.md.
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "modules.md"
_HEAD = """# Modules

What each module is for, by package. How packages depend on each other: [architecture](../architecture.md).

<!-- Made by `python -m tools.module_map`. -->
"""


def purpose(module: Path) -> str:
    """The first sentence of a module's docstring, as a cell of a table."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]
    return sentence.rstrip(".:").replace("|", "\\|")


def packages() -> dict[Path, list[Path]]:
    """The modules of each package, beginning with the package's own."""
    found: dict[Path, list[Path]] = {}
    for module in sorted((ROOT / "tidemill").rglob("*.py")):
        found.setdefault(module.parent, []).append(module)
    return {folder: sorted(found[folder], key=_rank) for folder in sorted(found)}


def _rank(module: Path) -> tuple[bool, str]:
    return module.name != "__init__.py", module.name


def page() -> str:
    parts = [_HEAD]
    for folder, modules in packages().items():
        parts += [f"\n## {folder.relative_to(ROOT)}\n\n", "| module | purpose |\n|---|---|\n"]
        parts += [f"| `{module.name}` | {purpose(module)} |\n" for module in modules]
    return "".join(parts)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
