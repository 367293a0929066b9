"""Tenants and the cache manager on a real cluster: changed while it runs, killed while it works."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvorum.cluster.launcher import update_cluster
from kvorum.cluster.tenants import Tenant, hash_key
from kvtest.cluster import ClusterUnderTest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


def test_tenants_change_while_requests_run_and_no_process_starts_anew(cluster: ClusterUnderTest) -> None:
    def status_with(key: str) -> int:
        return cluster.http.post(
            "/v1/completions",
            json={"prompt": "Hello", "max_tokens": 4},
            headers={"Authorization": f"Bearer {key}"},
        ).status_code

    config = cluster.running.config
    newcomer = Tenant(api_key_sha256=(hash_key("new"),), max_requests_per_minute=1, max_waiting=0)

    def engine_ids() -> set[str]:
        deadline_s = time.monotonic() + 10
        while (seen := cluster.http.get("/operator/cluster")).status_code == 503 and time.monotonic() < deadline_s:
            time.sleep(0.1)  # the manager is just being found
        return {engine["engine_id"] for engine in seen.json()["engines"]}

    before = engine_ids()
    assert status_with("new") == 401
    with cluster.http.stream(
        "POST", "/v1/completions", json={"prompt": "Hello", "max_tokens": 300, "stream": True}
    ) as running:
        lines = running.iter_lines()
        next(lines)
        update_cluster(cluster.running, config.model_copy(update={"tenants": {**config.tenants, "newcomer": newcomer}}))
        try:
            assert [status_with("new"), status_with("new")] == [200, 429]
            assert status_with("wrong") == 401
            tenants = cluster.http.get("/operator/cluster").json()["tenants"]
            assert [tenant["tenant"] for tenant in tenants] == ["newcomer", "test", "visitor"]
        finally:
            update_cluster(cluster.running, config)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert status_with("new") == 401
    assert engine_ids() == before, "an engine that starts anew has an id of its own"
    assert cluster.running.config == config


def test_nobody_notices_that_the_manager_is_killed_and_stopped(tmp_path: Path) -> None:
    result = tmp_path / "chaos.json"
    options = {"duration-s": 16, "period-s": 2, "clients": 8, "json": result}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "bench" / "manager_chaos.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert report["answers"] > 10
    assert report["strikes"][:1] == ["killed"]
