"""Two local nodes, each of which a process of Ray thinks is a machine."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def nodes():
    """A head without CPUs, and two nodes with two each: what one of them has is enough for all."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")  # on a busy machine, its proxy would never be ready
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=2)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
