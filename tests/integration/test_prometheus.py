"""A real Prometheus scrapes a real cluster: every panel and every alert has something to look at."""

from __future__ import annotations

import random
import time
from pathlib import Path

import httpx
import pytest

from kvtest.cluster import VISITOR_KEY, ClusterUnderTest
from kvtest.promql import alert_expressions, dashboard_expressions, has_prometheus, promtool, running_prometheus

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(not has_prometheus(), reason="there is no Prometheus (Debian: prometheus)"),
]


def make_load(cluster: ClusterUnderTest, rng: random.Random) -> None:
    """Move everything that can move."""
    for _ in range(2):  # more prompts than the pool has room for: cached prefixes go
        prompts = [[rng.randrange(1000, 9000) for _ in range(400)] for _ in range(6)]
        assert cluster.completion(prompt=prompts, max_tokens=2).status_code == 200
        assert cluster.completion(prompt=prompts[0], max_tokens=2).status_code == 200  # it is cached
    assert cluster.completion(max_tokens=60, kvorum={"policy": "h2o", "kv_budget": 16}).status_code == 200
    body = {"prompt": "Hello world", "max_tokens": 400}
    with cluster.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as cancelled:
        next(cancelled.iter_lines())
    visitor = {"Authorization": f"Bearer {VISITOR_KEY}"}
    while (refused := cluster.http.post("/v1/completions", json=body, headers=visitor)).status_code == 200:
        pass
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    cluster.wait_until_idle()


def test_every_panel_and_alert_returns_data(cluster: ClusterUnderTest, tmp_path: Path) -> None:
    queries = [(expression.where, expression.runnable) for expression in dashboard_expressions()]
    queries += [(expression.where, expression.without_threshold) for expression in alert_expressions()]
    rng = random.Random(0)
    with running_prometheus(tmp_path, httpx.URL(cluster.url).netloc.decode()) as prometheus:
        make_load(cluster, rng)  # so that all series are there, and what follows is seen to raise them
        deadline_s = time.monotonic() + 20
        while not prometheus.values('kvorum_request_failures_total{reason="cancelled"}'):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        make_load(cluster, rng)
        while silent := [(where, query) for where, query in queries if not prometheus.values(query)]:
            assert time.monotonic() < deadline_s, silent
            time.sleep(0.5)
        assert {rule["health"] for group in prometheus.get("rules")["groups"] for rule in group["rules"]} == {"ok"}


def test_what_a_router_shows_passes_prometheus_own_lint(cluster: ClusterUnderTest) -> None:
    checked = promtool("check", "metrics", text=cluster.http.get("/metrics").text)
    assert checked.returncode == 0, checked.stdout + checked.stderr
