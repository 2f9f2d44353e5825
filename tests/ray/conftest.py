"""Two local nodes, each of which a process of Ray thinks is a machine."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest

MARK = f"TEST_RUN={uuid4()}"  # in the environment of all that a run starts


@pytest.fixture
def nodes():
    """A head without CPUs, and two nodes with two each: what one of them has is enough for all."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    os.environ["TEST_RUN"] = MARK.partition("=")[2]
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_agent_register_timeout_ms", "600000")  # of a node, on a busy machine
    # on a busy machine, its proxy would never be ready
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
    made = started(
        lambda: Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
    )
    try:
        for _ in range(2):
            started(lambda: made.add_node(num_cpus=2))
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def started(start):
    """Ray gives a node 30 s to start, whatever else the machine does, and leaves what it has
    started of it."""
    for _ in range(9):
        before = children()
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            for pid in children() - before:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    return start()


def children() -> set[int]:
    """Processes that this one has started."""
    found = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in found for pid in path.read_text().split()}
