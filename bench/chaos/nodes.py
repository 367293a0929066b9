"""A Ray cluster of several nodes on one machine: each node is a raylet with an address of its own on the loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
from ray.cluster_utils import Cluster

ROUTER_RESOURCE = "router"

# Ray notices a dead node after 14 s by default. A node that lives may be slow to say so on a few cores, all busy.
_SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 3_000,
    "health_check_failure_threshold": 4,
}
_OBJECT_STORE_BYTES = 100 * 2**20


@dataclass
class Nodes:
    """The head, which has the routers and cannot be lost, and workers, each with room for one engine."""

    cluster: Cluster
    cpus_per_worker: int
    workers: list[object] = field(default_factory=list)
    _num_started: int = 0

    @property
    def address(self) -> str:
        """Where drivers join."""
        address: str = self.cluster.address
        return address

    def add_worker(self) -> None:
        """Start a node, as a cloud does in place of one that was lost."""
        self._num_started += 1
        self.workers.append(
            self.cluster.add_node(
                num_cpus=self.cpus_per_worker,
                object_store_memory=_OBJECT_STORE_BYTES,
                node_ip_address=f"127.0.1.{self._num_started}",
            )
        )

    def lose_worker(self, index: int) -> None:
        """Kill a node's raylet; its workers die with it."""
        node = self.workers.pop(index)
        raylet = node.all_processes["raylet"][0].process.pid  # type: ignore[attr-defined]
        os.kill(raylet, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)


@contextmanager
def running_nodes(*, num_workers: int, cpus_per_worker: int) -> Iterator[Nodes]:
    """Start a head and workers; stop all of them, and whatever they started, at the end."""
    cluster = Cluster(
        initialize_head=True,
        shutdown_at_exit=False,  # it is shut down below; the hook could not be set while a thread adds a node
        head_node_args={
            "num_cpus": 0,
            "resources": {ROUTER_RESOURCE: 1.0},
            "object_store_memory": _OBJECT_STORE_BYTES,
            "node_ip_address": "127.0.0.2",
            "include_dashboard": False,
            "_system_config": _SYSTEM_CONFIG,
        },
    )
    nodes = Nodes(cluster, cpus_per_worker)
    try:
        for _ in range(num_workers):
            nodes.add_worker()
        yield nodes
    finally:
        cluster.shutdown()


def processes(title: str) -> list[psutil.Process]:
    """Return this run's processes whose title contains a text, oldest first."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.create_time())
