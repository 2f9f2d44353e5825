"""Client libraries against a server of this tree: `make test-clients`, which prints the table of
docs/lab/clients.md.

Each library has an environment of its own under .venv-clients/, with the newest releases of what it
needs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = ROOT / ".venv-clients"
CHECKS = Path(__file__).parent / "checks"
PAGE = ROOT / "docs" / "lab" / "clients.md"
BEGIN, END = "<!-- Made by `make test-clients`. -->", "<!-- End of the table. -->"


@dataclass(frozen=True)
class Outcome:
    versions: str
    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0


@dataclass(frozen=True)
class Library:
    """A client library: its packages, the first of which is the library itself, and the file of its
    checks."""

    name: str
    checks: str
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        return self.checks.endswith(".mjs")

    @cached_property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    def install(self) -> None:
        """The newest releases that go together."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.is_node:
            latest = [f"{name}@latest" if "@" not in name[1:] else name for name in self.packages]
            if not (self.folder / "package.json").exists():
                (self.folder / "package.json").write_text('{"private": true}')
            _run(["npm", "install", "--silent", "--no-audit", "--no-fund", *latest], self.folder)
            return
        if not (self.folder / "bin" / "python").exists():
            _run([sys.executable, "-m", "venv", str(self.folder)])
        pip = [
            str(self.folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-compile",
            "--upgrade",
        ]
        _run(
            [
                *pip,
                "--upgrade-strategy",
                "eager",
                "pytest",
                "pytest-asyncio",
                "pytest-timeout",
                *self.packages,
            ]
        )

    def versions(self) -> str:
        names = [re.sub(r"(?<=.)@.*|\[.*", "", name) for name in self.packages]
        if self.is_node:
            manifests = [
                json.loads((self.folder / "node_modules" / name / "package.json").read_text())
                for name in names
            ]
            return ", ".join(
                f"{name} {one['version']}" for name, one in zip(names, manifests, strict=True)
            )
        code = "import sys\nfrom importlib.metadata import version\nprint(', '.join(f'{n} {version(n)}' for n in sys.argv[1:]))"
        done = subprocess.run(
            [self.folder / "bin" / "python", "-c", code, *names],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def check(self, url: str, words: Sequence[str]) -> Outcome:
        if self.is_node:
            return self._check_by_node(url)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [
                str(self.folder / "bin" / "python"),
                "-m",
                "pytest",
                "-c",
                str(CHECKS / "pytest.ini"),
            ]
            command += [
                "--rootdir",
                str(CHECKS),
                "--server",
                url,
                "--junitxml",
                str(report),
                *words,
                str(CHECKS / self.checks),
            ]
            subprocess.run(command, cwd=folder)
            if not report.exists():
                return Outcome(self.versions(), num_failed=1)
            suite = ElementTree.parse(report).getroot()[0]
        total, failed, skipped = (
            int(suite.get(name, 0)) for name in ("tests", "failures", "skipped")
        )
        failed += int(suite.get("errors", 0))
        return Outcome(self.versions(), total - failed - skipped, failed, skipped)

    def _check_by_node(self, url: str) -> Outcome:
        own = self.folder / self.checks  # beside its node_modules, where imports are looked for
        shutil.copyfile(CHECKS / self.checks, own)
        done = subprocess.run(
            ["node", "--test-reporter=tap", str(own), url], capture_output=True, text=True
        )
        print(done.stdout if done.returncode else "", done.stderr)
        numbers = {
            name: int(num)
            for name, num in re.findall(r"^# (pass|fail|skipped) (\d+)$", done.stdout, re.MULTILINE)
        }
        num_failed = numbers.get("fail", 0) or int(done.returncode != 0)
        return Outcome(
            self.versions(), numbers.get("pass", 0), num_failed, numbers.get("skipped", 0)
        )


LIBRARIES = (
    Library("openai", "check_openai.py", ("openai",)),
    Library("anthropic", "check_anthropic.py", ("anthropic",)),
    Library("google-genai", "check_google_genai.py", ("google-genai",)),
    Library("ollama", "check_ollama.py", ("ollama",)),
    Library("langchain", "check_langchain.py", ("langchain-openai",)),
    Library(
        "langchain-tests", "check_langchain_standard.py",
        ("langchain-tests", "langchain-openai", "langchain-anthropic", "langchain-ollama"),
    ),
    Library("instructor", "check_instructor.py", ("instructor", "openai", "anthropic")),
    Library("pydantic-ai", "check_pydantic_ai.py", ("pydantic-ai-slim[openai,anthropic]", "openai", "anthropic")),
    Library("openai-agents", "check_openai_agents.py", ("openai-agents", "openai")),
    Library("mcp", "check_mcp.py", ("mcp", "openai")),
    # it imports mcp for tool calls
    Library("litellm", "check_litellm.py", ("litellm", "openai", "mcp")),
    Library("litellm-proxy", "check_litellm_proxy.py", ("litellm[proxy]", "openai", "anthropic")),
    Library("node-openai", "check_openai.mjs", ("openai",)),
    Library("node-anthropic", "check_anthropic.mjs", ("@anthropic-ai/sdk",)),
    Library("node-ai-openai-compatible", "check_ai_openai_compatible.mjs", ("@ai-sdk/openai-compatible", "ai", "zod")),
    Library("node-ai-ollama", "check_ai_ollama.mjs", ("ollama-ai-provider-v2", "ai", "zod")),
)  # fmt: skip


def _run(command: list[str], folder: Path = ROOT) -> None:
    subprocess.run(command, cwd=folder, check=True)


@contextmanager
def served() -> Iterator[str]:
    """A server of this tree with the models that the checks ask for."""
    from tests.helpers import byte_tokenizer, make_llama
    from tests.server.conftest import Server
    from tests.server.scripted import make_scripted

    with tempfile.TemporaryDirectory() as folder:
        tiny, scripted = Path(folder) / "tiny", Path(folder) / "scripted"
        for path in (tiny, scripted):
            path.mkdir()
        make_llama(tiny, vocab_size=320, max_position_embeddings=8192)
        byte_tokenizer(tiny)
        make_scripted(scripted)
        # Without speculation: what the random model says soon repeats itself, and an answer would
        # be over before it is stopped.
        server = Server(
            None, f"tiny={tiny}", f"scripted={scripted}", "smollm2", "--speculate", "off"
        ).wait()
        try:
            yield server.url
        finally:
            server.stop()


def table(outcomes: dict[str, Outcome], earlier: str) -> str:
    """`earlier`: a table whose rows stay where there is no outcome."""
    rows = {line.split()[1]: line for line in earlier.splitlines() if line.startswith("| ")}
    for name, one in outcomes.items():
        counts = f"{one.num_passed} | {one.num_failed} | {one.num_skipped}"
        rows[name] = f"| {name} | {one.versions} | {counts} | {datetime.now(UTC):%Y-%m-%d} |"
    head = [
        "| environment | newest releases | passed | failed | skipped | on |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join(
        [BEGIN, "", *head, *(rows[one.name] for one in LIBRARIES if one.name in rows), "", END]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="environments; default: all")
    parser.add_argument("--keep", action="store_true", help="install nothing that is there already")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/lab/clients.md"
    )
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("-k", help="only these checks, as in pytest")
    given = parser.parse_args()
    if unknown := set(given.names) - {one.name for one in LIBRARIES}:
        parser.error(
            f"{', '.join(sorted(unknown))}: there are {', '.join(one.name for one in LIBRARIES)}"
        )
    chosen = [one for one in LIBRARIES if not given.names or one.name in given.names]
    if shutil.which("npm") is None:
        print("npm is not there: libraries of JavaScript are left out.")
        chosen = [one for one in chosen if not one.is_node]
    outcomes: dict[str, Outcome] = {}
    for one in chosen:
        if not given.keep or not one.folder.exists():
            print(f"installing {one.name}", flush=True)
            try:
                one.install()
            except subprocess.CalledProcessError as error:
                print(error)
                outcomes[one.name] = Outcome("cannot be installed", num_failed=1)

    def check_all(url: str) -> None:
        for one in chosen:
            if one.name not in outcomes:
                print(f"---- {one.name}", flush=True)
                outcomes[one.name] = one.check(url, ["-k", given.k] if given.k else [])

    if given.url:
        check_all(given.url)
    else:
        with served() as url:
            check_all(url)
    page = PAGE.read_text()
    begin, end = page.index(BEGIN), page.index(END) + len(END)
    made = table(outcomes, page[begin:end] if given.write else "")
    print(made)
    if given.write:
        PAGE.write_text(page[:begin] + made + page[end:])
    return int(any(one.num_failed or not one.num_passed for one in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
