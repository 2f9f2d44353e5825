"""The server tests of llama.cpp, vLLM and SGLang, unmodified, against `tidemill serve`.

    python -m bench.foreign_suites llama.cpp|vllm|sglang --checkout PATH [--only REGEX] [--work FOLDER]

PATH is a git checkout of that project; without one, it is cloned at the commit of
docs/lab/foreign-suites.md measured with. Tests, clients and assertions are read from the checkout;
what starts a server is replaced, and what their tests import of the project itself (bench/foreign/;
the page lists it). Their models are not here: the packaged one and small random ones stand for
them, so tests of a model's words, of a tokenizer's numbers, of images or of a project's Python
classes are skipped, each with its reason.

Each file is a pytest process of its own. The table counts what passed, what failed by design
(docs/reference/api/vllm.md and llamacpp.md say why), what failed without such a reason, and what
was not applicable. The exit code is 1 if less than 90 % of what is applicable passed, with
differences by design counted as failures.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from bench.foreign.models import make_models
from bench.foreign.serving import REPOSITORY
from bench.foreign.tally import Outcome, append, judge, read_outcomes, share_passed, table

ADAPTERS = {"llama.cpp": "llamacpp", "vllm": "vllm", "sglang": "sglang"}
NEEDED = 0.9
TEST_S, FILE_S = 400, 2400


def check_out(repository: str, commit: str, path: Path) -> None:
    """If it fails, nothing is left that would be taken for a checkout."""
    path.mkdir(parents=True)
    try:
        _clone(repository, commit, path)
    except subprocess.CalledProcessError:
        shutil.rmtree(path)
        raise


def _clone(repository: str, commit: str, path: Path) -> None:
    for command in (
        ["init", "-q"],
        ["fetch", "-q", "--depth", "1", repository, commit],
        ["checkout", "-q", "FETCH_HEAD"],
    ):
        subprocess.run(["git", "-C", str(path), *command], check=True)


def commit_of(checkout: Path) -> str:
    """Of a checkout that git made."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    made = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return made if made and (checkout / ".git").exists() else "unknown"


def run_file(
    name: str, model: str, adapter: str, folder: Path, checkout: Path, work: Path, results: Path
) -> None:
    """One file of the suite; its outcomes are appended to `results`."""
    print(f"{name} ({model})", flush=True)
    env = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TIDEMILL_FOREIGN_ADAPTER": adapter,
        "TIDEMILL_FOREIGN_CHECKOUT": str(checkout),
        "TIDEMILL_FOREIGN_MODEL": model,
        "TIDEMILL_FOREIGN_RESULTS": str(results),
        "TIDEMILL_FOREIGN_WORK": str(work),
    }
    options = [
        "-p",
        "bench.foreign.plugin",
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_mode=auto",
        "-q",
        "--tb=short",
    ]
    command = [sys.executable, "-m", "pytest", *options, "--timeout", str(TEST_S), name]
    with (work / "pytest.log").open("a") as log:
        running = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = running.wait(FILE_S)
            ended = "" if code in (0, 1) else f"pytest ended with code {code}"
        except subprocess.TimeoutExpired:
            ended = f"not finished after {FILE_S} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # its servers, too
            running.wait()
    if ended:  # not every test of the file has an outcome
        append(results, Outcome(name, "failed", ended))


def forget(results: Path, only: str) -> None:
    """Outcomes of files that are run again."""
    kept = [
        one for one in read_outcomes(results) if not re.search(only, one.test.partition("::")[0])
    ]
    results.unlink(missing_ok=True)
    for one in kept:
        append(results, one)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", choices=ADAPTERS)
    parser.add_argument("--checkout", type=Path, help="of that project; cloned if not given")
    parser.add_argument(
        "--only", default="", help="files whose path matches this regular expression"
    )
    default = Path(tempfile.gettempdir()) / "tidemill-foreign-suites"
    parser.add_argument("--work", type=Path, default=default, help="for models, logs and results")
    parser.add_argument("--jobs", type=int, default=1, help="files at the same time")
    parser.add_argument("--report", action="store_true", help="print the table of the last run")
    given = parser.parse_args()
    name = ADAPTERS[given.project]
    work = given.work.resolve() / name
    os.environ["TIDEMILL_FOREIGN_WORK"] = str(work)
    adapter = importlib.import_module(f"bench.foreign.{name}")
    checkout = (given.checkout or work / "checkout").resolve()
    results = work / "results.jsonl"
    first = checkout / adapter.FOLDER / next(iter(adapter.FILES))
    if given.checkout and not first.exists():
        parser.error(f"{checkout} is no checkout of {given.project}: there is no {first}.")
    if given.report and not results.exists():
        parser.error(f"There was no run: {results} is not there.")
    if not given.report:
        work.mkdir(parents=True, exist_ok=True)
        if not checkout.exists():
            check_out(adapter.REPOSITORY, adapter.COMMIT, checkout)
        make_models(work.parent / "models")
        for old in (work / "pytest.log", work / "server.log"):
            old.unlink(missing_ok=True)
        forget(results, given.only)
        places = (name, checkout / adapter.FOLDER, checkout, work, results)
        with ThreadPoolExecutor(given.jobs) as pool:
            files = [
                (file, model)
                for file, model in adapter.FILES.items()
                if re.search(given.only, file)
            ]
            for running in [pool.submit(run_file, file, model, *places) for file, model in files]:
                running.result()
    outcomes = read_outcomes(results)
    verdicts = judge(outcomes, adapter.BY_DESIGN, adapter.NOT_APPLICABLE)
    commit = commit_of(checkout)
    other = (
        ""
        if commit == adapter.COMMIT
        else f" (the figures in docs/lab/foreign-suites.md are of {adapter.COMMIT[:8]})"
    )
    print(f"\n{given.project} at {commit[:8]}{other}")
    print(table(verdicts))
    print(
        "\nFiles that were not run:\n"
        + "\n".join(f"  {files}: {why}" for files, why in adapter.LEFT_OUT.items())
    )
    cut_off = [one.test for one in outcomes if "::" not in one.test]
    if cut_off:
        print(
            "\nIncomplete: not every test of these files was run:\n"
            + "\n".join(f"  {name}" for name in cut_off)
        )
    return 0 if share_passed(verdicts) >= NEEDED and not cut_off else 1


if __name__ == "__main__":
    sys.exit(main())
