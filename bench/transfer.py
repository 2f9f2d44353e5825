"""KV pages between two engines: what each transport makes of the copy rate of this machine, and
what of a transfer is hidden behind the prefill.

    python -m bench.transfer [--model smollm2] [--tokens 2048] [--rounds 5] [--transports shm,tcp]
    [--no-engines]

Rates: pages of the model's size go into the slots of an exporter in another process, and from there
into this one, by turns with plain copies of the same bytes. Shares of the copy rate are by CPU
time, where nothing is waited for. Hidden: an engine of another process computes a prompt and
exports its pages, this one fetches them meanwhile and goes on with the request.
"""

from __future__ import annotations

import argparse
import json
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tidemill.config import EngineOptions
from tidemill.distributed.transfer.open import open_exporter, open_importer
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Resumed, Submit

_PORT = 29731


class Rate(NamedTuple):
    wall: float  # GB/s
    cpu: float  # by the time that the thread had a core: other work on the machine does not count


def slots(given: argparse.Namespace) -> None:
    """The other process: fills its slots for each line that it reads, and writes how fast."""
    source = _pages(given)
    plain = np.ones_like(source)
    exporter = open_exporter(given.slots, given.pages, given.page_bytes, {}, given.key_file)
    print("ready", flush=True)
    for line in sys.stdin:
        keys = _keys(int(line), given.pages)
        copy = _copy_rate(plain, source)
        export = _rate(
            source.nbytes,
            lambda keys=keys: [exporter.write(i, keys[i], source[i]) for i in range(len(keys))],
        )
        print(
            json.dumps({"export": export.wall, "export_of_copy": export.cpu / copy.cpu}), flush=True
        )
    exporter.close()


def rates(
    given: argparse.Namespace, transport: str, page_bytes: int, key_file: str
) -> dict[str, float]:
    """GB/s, and shares of a plain copy made by the same process in the same round."""
    given = argparse.Namespace(**vars(given) | {"page_bytes": page_bytes, "key_file": key_file})
    source = _pages(given)
    target, plain = np.ones_like(source), np.ones_like(source)
    address = "shm:bench" if transport == "shm" else f"{transport}:127.0.0.1:{_PORT}"
    found: dict[str, list[float]] = {}
    more = [
        "--slots",
        address,
        "--key-file",
        key_file,
        "--page-bytes",
        str(page_bytes),
        "--pages",
        str(given.pages),
    ]
    with other(more) as ask:
        importer = open_importer([address], page_bytes, {}, key_file)
        for number in range(given.rounds + 1):
            keys, known = _keys(number, given.pages), dict[int, bytes]()
            theirs = json.loads(ask(str(number)))
            while known != dict(enumerate(keys)):
                known.update(learned.slots if (learned := importer.take()) else ())
                time.sleep(0.001)
            copy = _copy_rate(plain, source)
            fetch = _rate(
                source.nbytes,
                lambda keys=keys: [importer.fetch(i, keys[i], target[i]) for i in range(len(keys))],
            )
            assert (target == source).all()
            values = {
                "copy_GB_s": copy.wall,
                "export_GB_s": theirs["export"],
                "fetch_GB_s": fetch.wall,
            }
            values |= {"export_of_copy": theirs["export_of_copy"]}
            values |= {
                "fetch_of_copy": fetch.cpu / copy.cpu
                if transport == "shm"
                else fetch.wall / copy.wall
            }
            for name, value in values.items() if number else ():  # the first maps the memory
                found.setdefault(name, []).append(value)
        importer.close()
    return {name: statistics.median(each) for name, each in found.items()}


def _pages(given: argparse.Namespace) -> np.ndarray:
    return np.random.default_rng(0).integers(
        0, 256, (given.pages, given.page_bytes), dtype=np.uint8
    )


def _keys(number: int, num: int) -> list[bytes]:
    return [number.to_bytes(4, "little") + i.to_bytes(28, "little") for i in range(num)]


def _copy_rate(target: np.ndarray, source: np.ndarray) -> Rate:
    """Page by page, as they are moved."""
    return _rate(
        source.nbytes, lambda: [np.copyto(target[i], source[i]) for i in range(len(source))]
    )


def _rate(num_bytes: int, make: Callable[[], object]) -> Rate:
    began, began_cpu = time.perf_counter(), time.thread_time()
    make()
    return Rate(
        num_bytes / (time.perf_counter() - began) / 1e9,
        num_bytes / (time.thread_time() - began_cpu) / 1e9,
    )


# ---- what is hidden


def options(given: argparse.Namespace, **own: Any) -> EngineOptions:
    return EngineOptions(
        model=given.model,
        max_context=given.tokens + 64,
        max_requests=8,
        token_budget=given.token_budget,
        speculate="off",
        threads=1,  # each engine has a core
        device="cpu",
        **own,
    )


def prompt(core: EngineCore, num: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, core.model_config.vocab_size), k=num)


def export(given: argparse.Namespace) -> None:
    """The other process: computes a prompt for each line that it reads, and writes when it was done
    with what."""
    core = load_core(options(given, kv_export="shm:bench-engines:1G"))
    print("ready", flush=True)
    for line in sys.stdin:
        tokens, happened, first = prompt(core, given.tokens, int(line)), list[events.Event](), -1
        core.submit(
            Submit("x", tokens, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        )
        while core.has_work or core.has_moves:
            output, _ = core.step()
            happened += output.events
            first = next((delta.token_ids[0] for delta in output.deltas if delta.token_ids), first)
        moved = [
            (one.time_s, one.num_bytes, one.seconds)
            for one in happened
            if isinstance(one, events.PagesMoved)
        ]
        began = next(one.time_s for one in happened if isinstance(one, events.Admitted))
        ended = next(one.time_s for one in happened if isinstance(one, events.FirstToken))
        print(
            json.dumps({"first": first, "began": began, "ended": ended, "moved": moved}), flush=True
        )
    core.close()


class _Ask:
    """Another process of this benchmark: a line to it, a line from it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, line: str) -> str:
        self.send(line)
        return self.answer()

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    @property
    def has_answered(self) -> bool:
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], 0)[0])

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextmanager
def other(more: list[str]) -> Iterator[_Ask]:
    how = [sys.executable, "-m", "bench.transfer", *more]
    with subprocess.Popen(how, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        ask = _Ask(process)
        assert ask.answer() == "ready\n"
        try:
            yield ask
        finally:
            process.stdin.close()


def hidden(given: argparse.Namespace) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    more = [
        "--exports",
        "--model",
        given.model,
        "--tokens",
        str(given.tokens),
        "--token-budget",
        str(given.token_budget),
    ]
    with other(more) as ask:
        core = load_core(options(given, kv_import="shm:bench-engines"))
        for number in range(given.rounds):
            ask.send(str(number))
            happened = list[events.Event]()
            while not ask.has_answered:
                # as an engine process does when its peers announce something
                happened += core.step()[0].events
                if not core.has_moves:
                    time.sleep(0.0005)
            done = json.loads(ask.answer())
            arrived = time.monotonic()
            tokens = prompt(core, given.tokens, number)
            params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
            core.submit(Submit(f"r{number}", tokens, params, resumed=[Resumed(0, [done["first"]])]))
            while core.has_work:
                happened += core.step()[0].events
            for name, value in _figures(done, happened, arrived, given.tokens).items():
                found.setdefault(name, []).append(value)
        core.close()
    return {name: statistics.median(each) for name, each in found.items()}


def _figures(
    done: dict, happened: list[events.Event], arrived: float, num_tokens: int
) -> dict[str, float]:
    fetched = [
        (one.time_s, one.num_bytes, one.seconds)
        for one in happened
        if isinstance(one, events.PagesMoved) and one.is_load
    ]
    moved, end = [*done["moved"], *fetched], done["ended"]
    started = next(one for one in happened if isinstance(one, events.Admitted))
    assert started.num_peer > num_tokens - 64, started
    loaded = max(time_s for time_s, _, _ in fetched)
    whole = sum(seconds for _, _, seconds in moved)
    return {
        "prefill_s": end - done["began"],
        "moved_MB": sum(num for _, num, _ in moved) / 1e6,
        "transfer_ms": 1000 * whole,
        "left_at_the_end_ms": 1000 * sum(seconds for time_s, _, seconds in moved if time_s > end),
        "hidden": sum(seconds for time_s, _, seconds in moved if time_s <= end) / whole,
        "hidden_bytes": sum(num for time_s, num, _ in moved if time_s <= end)
        / sum(num for _, num, _ in moved),
        "first_token_to_pages_there_ms": 1000 * max(0.0, loaded - end),
        "request_waited_for_pages_ms": 1000 * max(0.0, loaded - arrived),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--token-budget", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--page-bytes", type=int, default=0, help="default: the model's")
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--no-engines", action="store_true")
    for name in ("--slots", "--key-file"):  # of the other process
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--exports", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.exports or given.slots:
        export(given) if given.exports else slots(given)
        return
    page_bytes = given.page_bytes or load_core(options(given)).config.page_bytes
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "key"
        key_file.write_text(random.SystemRandom().randbytes(32).hex())
        for transport in filter(None, given.transports.split(",")):
            found = rates(given, transport, page_bytes, str(key_file))
            _print({"transport": transport, "page_bytes": page_bytes, "pages": given.pages} | found)
    if not given.no_engines:
        _print(
            {"model": given.model, "tokens": given.tokens, "token_budget": given.token_budget}
            | hidden(given)
        )


def _print(result: dict) -> None:
    rounded = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in result.items()
    }
    print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
    main()
