"""A batch on a Ray cluster of two local nodes, with a worker and, if asked for, a node that are killed on the way.

    python -m bench.ray_batch --lines 10000 --kill-node

Checks that each line has one result, and that equal prompts have equal greedy answers: those of an engine in this process. The
model is a tiny random one, unless --model names another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tidemill.batch.local import Local
from tidemill.batch.run import Batch, Progress
from tidemill.config import EngineOptions
from tidemill.ray.batch import RayWorkers, WorkerOptions
from tidemill.ray.cluster import Cluster, import_ray
from tidemill.server.generation.models import Served

NUM_PROMPTS = 50


def results(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By custom_id."""
    found: dict[str, list[dict[str, Any]]] = {}
    for text in path.read_text().splitlines():
        one = json.loads(text)
        found.setdefault(one["custom_id"], []).append(one)
    return found


def text_of(result: dict[str, Any]) -> str:
    assert result["response"]["status_code"] == 200, result
    return str(result["response"]["body"]["choices"][0]["text"])


async def expected(engine: EngineOptions, folder: Path, max_tokens: int) -> dict[int, str]:
    """The answers to all prompts, by an engine in this process."""
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps(line_of(number, max_tokens)) + "\n" for number in range(NUM_PROMPTS)))
    local = Local(Served(engine))
    await local.start()
    try:
        files = Batch(source, folder / "expected.jsonl")
        await files.run(local)
        files.close()
    finally:
        await local.close()
    return {int(name): text_of(one) for name, (one,) in results(folder / "expected.jsonl").items()}


def line_of(number: int, max_tokens: int) -> dict[str, Any]:
    prompt = f"The tide of day {number % NUM_PROMPTS} was"
    return {"custom_id": str(number), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


async def run(nodes: Any, engine: EngineOptions, args: argparse.Namespace, folder: Path) -> RayWorkers:
    cluster = Cluster(nodes.address, wait_s=120)
    needs = cluster.needs_of(engine, 2)
    workers = RayWorkers(cluster, WorkerOptions(engine=needs.limit(engine), num_workers=2, needs=needs))
    await workers.start()
    files = Batch(folder / "in.jsonl", folder / "out.jsonl")
    abouts = [await actor.about.remote() for actor in workers.actors.values()]
    killed: set[str] = set()

    def on_progress(done: Progress) -> None:
        if "worker" not in killed and done.num_done >= args.lines * 0.3:
            killed.add("worker")
            print(f"{done.num_done:,} lines are written: a worker is killed", flush=True)
            os.kill(abouts[0].pid, signal.SIGKILL)
        if args.kill_node and "node" not in killed and done.num_done >= args.lines * 0.6:
            killed.add("node")
            print(f"{done.num_done:,} lines are written: a node is killed", flush=True)
            nodes.remove_node(
                next(node for node in nodes.worker_nodes if node.node_id == abouts[1].node_id), allow_graceful=False
            )

    try:
        await files.run(workers, on_progress)
    finally:
        files.close()
        await workers.close()
    return workers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--max-tokens", type=int, default=2)
    parser.add_argument("--model")
    parser.add_argument("--kill-node", action="store_true")
    args = parser.parse_args()
    import_ray()
    from ray.cluster_utils import Cluster as LocalNodes

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model
        if model is None:
            from tests.helpers import byte_tokenizer, make_llama

            (folder / "tiny").mkdir()
            make_llama(folder / "tiny", vocab_size=320, max_position_embeddings=512)
            byte_tokenizer(folder / "tiny")
            model = str(folder / "tiny")
        engine = EngineOptions(model=model, device="cpu", threads=1, kv_memory_bytes=2**26)
        answers = asyncio.run(expected(engine, folder, args.max_tokens))
        with (folder / "in.jsonl").open("w") as file:
            file.writelines(json.dumps(line_of(number, args.max_tokens)) + "\n" for number in range(args.lines))
        nodes = LocalNodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                nodes.add_node(num_cpus=2)
            began = time.monotonic()
            workers = asyncio.run(run(nodes, engine, args, folder))
            took_s = time.monotonic() - began
        finally:
            nodes.shutdown()
        found = results(folder / "out.jsonl")
        counts = Counter(len(each) for each in found.values())
        assert counts == {1: args.lines}, counts
        wrong = [name for name, (one,) in found.items() if text_of(one) != answers[int(name) % NUM_PROMPTS]]
        assert not wrong, wrong[:5]
        print(f"{args.lines:,} lines once each, all answers equal; {workers.num_lost} workers lost; {took_s:.1f} s")


if __name__ == "__main__":
    main()
