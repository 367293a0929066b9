"""A running cluster as its clients see it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvorum.cluster.launcher import RunningCluster
from kvtest.servers import Unchecked

API_KEY = "integration"
VISITOR_KEY = "visitor"
METADATA = (("authorization", f"Bearer {API_KEY}"),)


@dataclass(frozen=True)
class ClusterUnderTest:
    running: RunningCluster
    http: httpx.Client
    channel: grpc.Channel

    @property
    def url(self) -> str:
        return self.running.http_urls[0]

    @property
    def grpc_target(self) -> str:
        return self.running.grpc_targets[0]

    def completion(self, **fields: Unchecked) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "Hello world", "max_tokens": 4} | fields)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the only engine and the router, by name, labels other than the engine's added up."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        return values

    def wait_until_idle(self, *, timeout_s: float = 5.0) -> dict[str, float]:
        """Wait until the engine runs nothing and holds nothing; return the metrics."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            busy = ("kvorum_num_requests_running", "kvorum_num_requests_waiting", "kvorum_kv_blocks_held")
            if not any(metrics[name] for name in busy):
                return metrics
            assert time.monotonic() < deadline_s, f"blocks or requests leaked: {metrics}"
            time.sleep(0.05)
