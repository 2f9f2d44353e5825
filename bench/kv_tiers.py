"""What host memory and disk behind the KV cache bring: time to the first token of a long prefix,
bandwidth, and what others lose.

    python -m bench.kv_tiers [--model smollm2] [--device cpu|cuda] [--tokens 4096] [--rounds 3]

Each round computes the prefix anew, brings it from host memory and brings it from disk, one after
the other, so that all three see the same machine. For others: streams decode while the prefix is
restored, and without that, in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time

from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


class Engine:
    def __init__(self, given: argparse.Namespace, folder: str) -> None:
        context = given.tokens + 512
        options = EngineOptions(
            model=given.model,
            device=given.device,
            load_format=given.load_format,
            max_context=context,
            max_requests=8,
            kv_host_memory_bytes=given.host,
            kv_disk=f"{folder}:{given.disk}",
            speculate="off",
        )
        self.core = load_core(options)
        self.vocab = self.core.model_config.vocab_size
        self.chance = random.Random(0)
        self.num = 0

    def prompt(self, num: int) -> list[int]:
        return self.chance.choices(range(100, self.vocab), k=num)

    def submit(self, prompt: list[int], num_output: int) -> str:
        self.num += 1
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        self.core.submit(Submit(f"r{self.num}", prompt, params))
        return f"r{self.num}"

    def run(self) -> list[events.Event]:
        happened = []
        while self.core.has_work:
            output, failed = self.core.step()
            assert not failed, failed
            happened += output.events
        return happened

    def settle(self) -> None:
        while self.core.has_moves:
            self.core.step()

    def first_token(self, prompt: list[int]) -> tuple[float, events.Admitted, list[events.Event]]:
        self.submit(prompt, 1)
        happened = self.run()
        ttft = next(one.since_arrival_s for one in happened if isinstance(one, events.FirstToken))
        return ttft, next(one for one in happened if isinstance(one, events.Admitted)), happened

    def forget(self, host: bool) -> None:
        """All pages leave the device for host memory; `host`: and host memory, for disk."""
        kv = self.core.scheduler.kv
        for page in kv.cached_pages():
            kv.save(page)
        self.settle()
        for page in list(kv.cached_pages()):
            kv._forget(page)
        if host:
            assert kv.offload.tiers is not None
            assert kv.offload.tiers.host is not None
            for key in list(kv.offload.tiers.host._at):
                kv.offload.tiers.host.drop(key)


def measure(engine: Engine, num_tokens: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {"compute": [], "host": [], "disk": []}
    rates: dict[str, list[float]] = {"host": [], "disk": [], "copy": []}
    for _ in range(rounds):
        prompt = engine.prompt(num_tokens + 1)
        seconds, started, _ = engine.first_token(prompt)
        assert started.num_cached == 0
        times["compute"].append(seconds)
        for tier in ("host", "disk"):
            engine.forget(host=tier == "disk")
            seconds, started, happened = engine.first_token(prompt)
            found = started.num_host if tier == "host" else started.num_disk
            if tier == "disk" and not found:  # to compute it again is measured to be faster
                print(f"disk: not read: {started.reason}", flush=True)
                continue
            assert found >= num_tokens - 64, (tier, started)
            moved = [one for one in happened if isinstance(one, events.PagesMoved) and one.is_load]
            times[tier].append(seconds)
            rates[tier].append(
                sum(one.num_bytes for one in moved) / sum(one.seconds for one in moved)
            )
            if tier == "host":
                assert engine.core.runner.mover is not None
                rates["copy"].append(
                    engine.core.runner.mover.copy_rate(sum(one.num_pages for one in moved))
                )
    best, rate = (
        {name: statistics.median(each) if each else math.nan for name, each in one.items()}
        for one in (times, rates)
    )
    return {
        "tokens": num_tokens,
        "ttft_compute_ms": 1000 * best["compute"],
        "ttft_host_ms": 1000 * best["host"],
        "ttft_disk_ms": 1000 * best["disk"],
        "host_speedup": best["compute"] / best["host"],
        "disk_speedup": best["compute"] / best["disk"],
        "host_GB_s": rate["host"] / 1e9,
        "disk_GB_s": rate["disk"] / 1e9,
        "copy_GB_s": rate["copy"] / 1e9,
        "host_rate_of_copy": rate["host"] / rate["copy"],
    }


def others(
    engine: Engine, num_tokens: int, rounds: int, num_streams: int = 4, num_output: int = 200
) -> dict[str, float]:
    """Tokens a second of streams, alone and while a prefix is restored from host memory (and
    computes its last tokens)."""
    prompt = engine.prompt(num_tokens + 1)
    engine.first_token(prompt)
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * rounds):
        restores = number % 2 == 1
        engine.forget(host=False)
        names = {engine.submit(engine.prompt(32), num_output) for _ in range(num_streams)}
        started = done = 0
        began = None
        while names:
            output, _ = engine.core.step()
            for delta in output.deltas:
                done += delta.request_id in names and len(delta.token_ids)
                if delta.finish_reason:
                    names.discard(delta.request_id)
            if began is None and done >= num_streams * 8:
                began, started = time.perf_counter(), done
                if restores:
                    engine.submit(prompt, 1)
        assert began is not None
        took[restores].append((time.perf_counter() - began) / (done - started))
        engine.run()
    return {"others_slower": statistics.median(took[True]) / statistics.median(took[False]) - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--host", type=int, default=2 * 2**30, help="bytes of host memory")
    parser.add_argument("--disk", type=int, default=4 * 2**30, help="bytes on disk")
    parser.add_argument(
        "--folder", help="where the file of pages goes; default: a new one in the temporary folder"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        engine = Engine(given, folder)
        engine.first_token(engine.prompt(64))
        result = {
            "model": given.model,
            "device": engine.core.config.device,
            "kv_dtype": engine.core.config.kv_dtype,
        }
        result |= measure(engine, given.tokens, given.rounds) | others(
            engine, given.tokens, given.rounds
        )
        engine.core.close()
    print(
        json.dumps(
            {
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in result.items()
            }
        )
    )


if __name__ == "__main__":
    main()
