"""A Ray node that starts as a pod of KubeRay does, and takes its application over REST as from KubeRay's operator."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvorum.cluster.addresses import choose_ports
from kvtest.commands import command, wait_until_gone

RAY = str(Path(sys.executable).with_name("ray"))
_NODE_IP = "127.0.0.7"
_TOKEN = "token-of-the-test"
_APPLICATIONS = "/api/serve/applications/"


@dataclass(frozen=True)
class RayNode:
    """operator: asks the head with the token that KubeRay hands to all. kubelet: asks the node's agent without one."""

    operator: httpx.Client
    kubelet: httpx.Client
    logs: Path

    def apply(self, serve_config: Mapping[str, Any]) -> None:
        """Hand over what a RayService's serveConfigV2 holds."""
        self.operator.put(_APPLICATIONS, json=serve_config).raise_for_status()

    def application(self) -> dict[str, Any]:
        """Return what Serve says of the only application."""
        answer = self.operator.get(_APPLICATIONS).raise_for_status().json()
        return dict(answer["applications"].get("kvorum", {"status": "ABSENT", "message": ""}))

    def wait_for_log(self, text: str, *, timeout_s: float = 30.0) -> None:
        """Wait until a process of the node has logged a text."""
        deadline_s = time.monotonic() + timeout_s
        while not any(
            text in path.read_text(errors="replace") for path in self.logs.glob("session_latest/logs/**/*.err")
        ):
            assert time.monotonic() < deadline_s, f"nobody logged {text!r}"
            time.sleep(0.1)

    def wait_for_status(self, status: str, *, timeout_s: float = 90.0) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while (found := self.application())["status"] != status:
            assert time.monotonic() < deadline_s, found
            time.sleep(0.1)
        return found


@contextlib.contextmanager
def ray_node(environment: Mapping[str, str], *, resources: Mapping[str, int]) -> Iterator[RayNode]:
    """Start a head with a pod's environment, and the resources of all pods."""
    names = ("gcs", "dashboard", "agent", "client")
    gcs, dashboard, agent, client = choose_ports("127.0.0.1", wanted=(0,) * len(names), count=1, names=names)
    # Paths of sockets below it must be short.
    folder = tempfile.mkdtemp(prefix="kv", dir="/tmp")
    arguments = {
        "node-ip-address": _NODE_IP,
        "port": gcs,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": agent,
        "ray-client-server-port": client,
        "num-cpus": 0,
        "resources": json.dumps(resources),
        "object-store-memory": 100 * 2**20,
        "temp-dir": folder,
    }
    flags = [f"--{name}={value}" for name, value in arguments.items()]
    # KubeRay adds the token; there is no other node to which this one could be drained.
    more = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    try:
        with contextlib.ExitStack() as stack:
            ray = stack.enter_context(
                command("start", "--head", "--block", *flags, program=RAY, environment={**environment, **more})
            )
            ray.wait_for("--block")
            bearer = {"Authorization": f"Bearer {_TOKEN}"}
            operator = httpx.Client(base_url=f"http://127.0.0.1:{dashboard}", headers=bearer, timeout=30)
            kubelet = httpx.Client(base_url=f"http://{_NODE_IP}:{agent}", timeout=5)
            yield RayNode(stack.enter_context(operator), stack.enter_context(kubelet), Path(folder))
            ray.process.terminate()
            ray.process.wait(timeout=30)
            wait_until_gone(ray)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
