"""Ray nodes that start as KubeRay's pods do, and get their application over REST as from KubeRay's operator."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvorum.cluster.addresses import choose_ports
from kvtest.commands import Command, command

RAY = str(Path(sys.executable).with_name("ray"))
_HEAD_IP = "127.0.0.7"
_APPLICATIONS = "/api/serve/applications/"
# KubeRay makes one for each cluster and hands it to all pods.
_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "token-of-the-test"}


@dataclass(frozen=True)
class RayPods:
    """A head with nodes that joined it.

    operator: asks the head with the pods' token. kubelet: asks the head's agent without one.
    """

    stack: contextlib.ExitStack
    environment: Mapping[str, str]
    address: str
    logs: Path
    operator: httpx.Client
    kubelet: httpx.Client

    def join(self, ip: str, *, resources: Mapping[str, int]) -> Command:
        """Start another node, with an address of its own; it ends as a pod does: by SIGTERM."""
        (agent,) = free_ports(1)
        return _start(self.stack, self.environment, {"address": self.address} | _node(ip, agent, resources))

    def apply(self, serve_config: Mapping[str, Any]) -> None:
        """Hand over what a RayService's serveConfigV2 holds."""
        self.operator.put(_APPLICATIONS, json=serve_config).raise_for_status()

    def application(self) -> dict[str, Any]:
        """Return what Serve says of the only application."""
        answer = self.operator.get(_APPLICATIONS).raise_for_status().json()
        return dict(answer["applications"].get("kvorum", {"status": "ABSENT", "message": ""}))

    def wait_for_log(self, text: str, *, timeout_s: float = 30.0) -> None:
        """Wait until a process has logged a text."""
        deadline_s = time.monotonic() + timeout_s
        while not any(text in path.read_text(errors="replace") for path in self.logs.glob("worker-*.err")):
            assert time.monotonic() < deadline_s, f"nobody logged {text!r}"
            time.sleep(0.1)

    def wait_for_status(self, status: str, *, timeout_s: float = 180.0) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while (found := self.application())["status"] != status:
            assert time.monotonic() < deadline_s, found
            time.sleep(0.1)
        return found


def free_ports(count: int) -> list[int]:
    return choose_ports("127.0.0.1", wanted=(0,) * count, count=1, names=("port",) * count)


@contextlib.contextmanager
def ray_pods(environment: Mapping[str, str], *, resources: Mapping[str, int]) -> Iterator[RayPods]:
    """Start a head with a pod's environment; everything is killed at the end."""
    gcs, dashboard, agent, client = free_ports(4)
    # Paths of sockets below it must be short.
    folder = tempfile.mkdtemp(prefix="kv", dir="/tmp")
    environment = {**environment, **_TOKEN}
    head = {
        "port": gcs,
        "dashboard-host": "127.0.0.1",
        "dashboard-port": dashboard,
        "ray-client-server-port": client,
        "temp-dir": folder,
    }
    bearer = {"Authorization": f"Bearer {_TOKEN['RAY_AUTH_TOKEN']}"}
    try:
        with contextlib.ExitStack() as stack:
            _start(stack, environment, head | _node(_HEAD_IP, agent, resources), "--head")
            yield RayPods(
                stack,
                environment,
                f"{_HEAD_IP}:{gcs}",
                Path(folder, "session_latest", "logs"),
                stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{dashboard}", headers=bearer, timeout=30)),
                stack.enter_context(httpx.Client(base_url=f"http://{_HEAD_IP}:{agent}", timeout=5)),
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _node(ip: str, agent_port: int, resources: Mapping[str, int]) -> dict[str, object]:
    return {
        "node-ip-address": ip,
        "dashboard-agent-listen-port": agent_port,
        "num-cpus": 0,
        "resources": json.dumps(resources),
        "object-store-memory": 100 * 2**20,
    }


def _start(
    stack: contextlib.ExitStack, environment: Mapping[str, str], options: Mapping[str, object], *flags: str
) -> Command:
    arguments = [f"--{name}={value}" for name, value in options.items()]
    node = stack.enter_context(
        command("start", "--block", *flags, *arguments, program=RAY, environment=dict(environment))
    )
    stack.callback(_kill, node)
    node.wait_for("--block")
    return node


def _kill(node: Command) -> None:
    for process_id, _ in node.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
