"""What the Helm chart renders starts, answers and changes on a Ray node, as under KubeRay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # has no types

from kvorum.cluster.addresses import choose_ports
from kvorum.cluster.client import Options, connected
from kvorum.cluster.tenants import hash_key
from kvtest.charts import environment, pods, ray_container, render, serve_config
from kvtest.kuberay import RayNode, ray_node

pytestmark = pytest.mark.ray

OLD_KEY, NEW_KEY = "kv-old", "kv-new"


@dataclass(frozen=True)
class Release:
    """A release of the chart on a node: its ports, and those of the proxy that a head has in a pod of its own."""

    node: RayNode
    ports: tuple[int, ...]

    def values(self, **config: Any) -> dict[str, Any]:  # noqa: ANN401  # values of the chart
        port, grpc_port, _, _ = self.ports
        return {"config": {"executor": "fake", "num_routers": 1, "port": port, "grpc_port": grpc_port} | config}

    def upgrade(self, **config: Any) -> None:  # noqa: ANN401  # values of the chart
        """Do what KubeRay does after `helm upgrade`."""
        rendered = serve_config(render(self.values(drain_timeout_s=0, **config)))
        rendered["http_options"] = {"host": "127.0.0.1", "port": self.ports[2]}
        rendered["grpc_options"]["port"] = self.ports[3]
        rendered["applications"][0]["args"]["host"] = "127.0.0.1"
        self.node.apply(rendered)

    def complete(self, key: str) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{self.ports[0]}/v1/completions",
            json={"prompt": "Hello world", "max_tokens": 4},
            headers={"Authorization": f"Bearer {key}"},
            timeout=30,
        )


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    names = ("port", "grpc_port", "proxy", "proxy_grpc")
    ports = tuple(choose_ports("127.0.0.1", wanted=(0,) * len(names), count=1, names=names))
    values = {"config": {"port": ports[0], "grpc_port": ports[1]}}
    _, head = next(pods(render(values)))
    with ray_node(environment(head), resources={"kvorum_router": 1, "kvorum_engine": 1}) as node:
        running = Release(node, ports)
        running.upgrade(tenants={"old": {"api_key_sha256": [hash_key(OLD_KEY)]}})
        node.wait_for_status("RUNNING")
        yield running


def test_it_answers_over_both_protocols(release: Release) -> None:
    answer = release.complete(OLD_KEY)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert release.complete("wrong").status_code == 401
    with connected(f"127.0.0.1:{release.ports[1]}", api_key=OLD_KEY) as client:
        pieces = list(client.complete("Hello world", Options(max_tokens=4)))
    assert "".join(piece.text for piece in pieces) == answer.json()["choices"][0]["text"]


def test_its_probes_succeed_without_a_token(release: Release) -> None:
    port, grpc_port, _, _ = release.ports
    manifests = dict(pods(render(release.values())))
    probes = {name: ray_container(pod)["readinessProbe"]["httpGet"]["path"] for name, pod in manifests.items()}
    assert httpx.get(f"http://127.0.0.1:{port}{probes['routers']}", timeout=5).status_code == 200
    assert release.node.kubelet.get(probes["cpu"]).status_code == 200
    assert httpx.get(release.node.operator.base_url.join(probes["head"]), timeout=5).status_code == 200
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_tenants_change_in_place_and_wrong_ones_do_not_hold(release: Release) -> None:
    before = release.complete(OLD_KEY).json()["kvorum"]["engine"]
    release.upgrade(
        tenants={"old": {"api_key_sha256": [hash_key(OLD_KEY)]}, "new": {"api_key_sha256": [hash_key(NEW_KEY)]}}
    )
    deadline_s = time.monotonic() + 30
    while (answer := release.complete(NEW_KEY)).status_code != 200:
        assert time.monotonic() < deadline_s, answer.text
    assert answer.json()["kvorum"]["engine"] == before, "an engine that starts anew has an id of its own"

    release.upgrade(tenants={"other": {"default_policy": "lru"}})
    release.node.wait_for_log("the new tenants are wrong")
    assert [release.complete(key).status_code for key in (OLD_KEY, NEW_KEY)] == [200, 200]
    assert release.node.application()["status"] == "RUNNING"


def test_wrong_settings_are_shown_to_the_operator_while_the_old_ones_serve(release: Release) -> None:
    before = release.complete(OLD_KEY).json()["kvorum"]["engine"]
    release.upgrade(default_policy="lru", tenants={"old": {"api_key_sha256": [hash_key(OLD_KEY)]}})
    failed = release.node.wait_for_status("DEPLOY_FAILED")
    assert "default_policy: unknown policy 'lru'" in failed["message"]
    assert release.complete(OLD_KEY).json()["kvorum"]["engine"] == before
