"""What the Helm chart renders starts, answers, changes and ends on Ray nodes, as under KubeRay."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # has no types

from kvorum.client import Client, Options
from kvorum.cluster.tenants import hash_key
from kvtest.charts import environment, pods, ray_container, render, serve_config
from kvtest.kuberay import RayPods, free_ports, ray_pods

pytestmark = pytest.mark.ray

OLD_KEY, NEW_KEY = "kv-old", "kv-new"
OLD_TENANT = {"old": {"api_key_sha256": [hash_key(OLD_KEY)]}}


class Ports(NamedTuple):
    """A router's, and those of the proxy that the head has in a pod of its own."""

    http: int
    grpc: int
    proxy_http: int
    proxy_grpc: int


@dataclass(frozen=True)
class Release:
    """A release of the chart on Ray nodes. settings: those of kvorum that stay."""

    nodes: RayPods
    ports: Ports
    settings: dict[str, Any]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.http}"

    def upgrade(self, **settings: Any) -> None:  # noqa: ANN401  # settings of kvorum
        """Do what KubeRay does after `helm upgrade`, but for listening on the loopback, and for the proxy's ports."""
        config = serve_config(render({"config": self.settings | settings}))
        config["http_options"] = {"host": "127.0.0.1", "port": self.ports.proxy_http}
        config["grpc_options"]["port"] = self.ports.proxy_grpc
        config["applications"][0]["args"]["host"] = "127.0.0.1"
        self.nodes.apply(config)

    def wait_until_ready(self) -> None:
        """Wait as Kubernetes does: until Serve says that the application runs, and its router that it has an engine."""
        self.nodes.wait_for_status("RUNNING")
        wait_for_status_code(f"{self.url}/health", 200)

    def complete(self, key: str) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/completions",
            json={"prompt": "Hello world", "max_tokens": 4},
            headers={"Authorization": f"Bearer {key}"},
            timeout=30,
        )


def wait_for_status_code(url: str, status_code: int) -> None:
    deadline_s = time.monotonic() + 30
    while (answer := httpx.get(url, timeout=5)).status_code != status_code:
        assert time.monotonic() < deadline_s, answer.text
        time.sleep(0.1)


@contextlib.contextmanager
def released(*, resources: dict[str, int], **settings: Any) -> Iterator[Release]:  # noqa: ANN401  # settings of kvorum
    """Start a head with the environment of the chart's pods, and install the release there."""
    ports = Ports(*free_ports(4))
    settings = {"executor": "fake", "num_routers": 1, "port": ports.http, "grpc_port": ports.grpc, **settings}
    _, head = next(pods(render({"config": settings})))
    with ray_pods(environment(head), resources=resources) as nodes:
        release = Release(nodes, ports, settings)
        release.upgrade(tenants=OLD_TENANT)
        yield release


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with released(resources={"kvorum_router": 1, "kvorum_engine": 1}) as running:
        running.wait_until_ready()
        yield running


def test_it_answers_over_both_protocols(release: Release) -> None:
    answer = release.complete(OLD_KEY)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert release.complete("wrong").status_code == 401
    with Client(f"127.0.0.1:{release.ports.grpc}", api_key=OLD_KEY) as client:
        text = client.complete("Hello world", Options(max_tokens=4)).text
    assert text == answer.json()["choices"][0]["text"]


def test_its_probes_succeed_without_a_token(release: Release) -> None:
    manifests = dict(pods(render({})))
    probes = {name: ray_container(pod)["readinessProbe"]["httpGet"]["path"] for name, pod in manifests.items()}
    for path in (probes["routers"], "/-/healthz"):
        assert httpx.get(f"{release.url}{path}", timeout=5).status_code == 200
    assert release.nodes.kubelet.get(probes["cpu"]).status_code == 200
    assert httpx.get(release.nodes.operator.base_url.join(probes["head"]), timeout=5).status_code == 200
    with grpc.insecure_channel(f"127.0.0.1:{release.ports.grpc}") as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_tenants_change_in_place_and_wrong_ones_do_not_hold(release: Release) -> None:
    before = release.complete(OLD_KEY).json()["kvorum"]["engine"]
    release.upgrade(tenants=OLD_TENANT | {"new": {"api_key_sha256": [hash_key(NEW_KEY)]}})
    deadline_s = time.monotonic() + 30
    while (answer := release.complete(NEW_KEY)).status_code != 200:
        assert time.monotonic() < deadline_s, answer.text
    assert answer.json()["kvorum"]["engine"] == before, "an engine that starts anew has an id of its own"

    release.upgrade(tenants={"other": {"default_policy": "lru"}})
    release.nodes.wait_for_log("the new tenants are wrong")
    assert [release.complete(key).status_code for key in (OLD_KEY, NEW_KEY)] == [200, 200]
    release.nodes.wait_for_status("RUNNING")


def test_wrong_settings_are_shown_to_the_operator_while_the_old_ones_serve(release: Release) -> None:
    before = release.complete(OLD_KEY).json()["kvorum"]["engine"]
    release.upgrade(default_policy="lru", tenants=OLD_TENANT)
    failed = release.nodes.wait_for_status("DEPLOY_FAILED")
    assert "default_policy: unknown policy 'lru'" in failed["message"]
    assert release.complete(OLD_KEY).json()["kvorum"]["engine"] == before


class RunningStream:
    """A request whose answer is read in a thread."""

    def __init__(self, url: str, key: str, *, tokens: int) -> None:
        self._url = url
        self._tokens = tokens
        self._headers = {"Authorization": f"Bearer {key}"}
        self._lines: list[str] = []
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._has_begun.wait(30)

    def _read(self) -> None:
        body = {"prompt": "Hello world", "max_tokens": self._tokens, "stream": True}
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=body, headers=self._headers, timeout=60
        ) as response:
            for line in filter(None, response.iter_lines()):
                self._lines.append(line.removeprefix("data: "))
                self._has_begun.set()

    def receipt(self) -> dict[str, Any]:
        """Wait for the end, which must be complete, and return the receipt."""
        self._thread.join()
        assert self._lines[-1] == "[DONE]", self._lines[-3:]
        found: dict[str, Any] = json.loads(self._lines[-2])["kvorum"]
        return found


@pytest.mark.slow
def test_pods_that_are_deleted_end_no_stream() -> None:
    settings = {"drain_timeout_s": 3, "fake_step_delay_s": 0.05, "num_engines": 1}
    with released(resources={}, **settings) as release:
        router = release.nodes.join("127.0.0.8", resources={"kvorum_router": 1})
        first_engine = release.nodes.join("127.0.0.9", resources={"kvorum_engine": 1})
        release.wait_until_ready()

        release.nodes.join("127.0.0.10", resources={"kvorum_engine": 1})
        outlives_its_engine = RunningStream(release.url, OLD_KEY, tokens=900)
        first_engine.process.terminate()
        assert outlives_its_engine.receipt()["resumes"] == 1, "it goes on in the other pod"
        first_engine.process.wait(timeout=60)

        stays = RunningStream(release.url, OLD_KEY, tokens=200)
        router.process.terminate()
        wait_for_status_code(f"{release.url}/-/healthz", 503)
        assert release.complete(OLD_KEY).status_code == 200, "it answers who does not know yet that it stops"
        assert stays.receipt()["resumes"] == 0
        router.process.wait(timeout=60)
