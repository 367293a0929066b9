"""Metrics of a real cluster: a load run's own counts, and Ray's exporter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import grpc
import httpx
import pytest
import ray

from kvorum.cluster.bench_client import Target, send_closed_loop
from kvorum.cluster.bench_workload import BenchRequest, Tenant
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc
from kvtest.cluster import API_KEY, METADATA, ClusterUnderTest
from kvtest.counting import Books, Samples, booked, samples_of

pytestmark = pytest.mark.ray


def scrape(cluster: ClusterUnderTest) -> Samples:
    return samples_of(cluster.http.get("/metrics").text)


def test_what_bench_counts_is_what_the_metrics_count(cluster: ClusterUnderTest) -> None:
    cluster.wait_until_idle()
    before, books = scrape(cluster), Books("test")
    tenant = Tenant("test", API_KEY)
    requests = [BenchRequest(tuple(range(100, 120 + number % 3)), 5 + number % 7, tenant) for number in range(40)]
    target = Target(cluster.url, "smollm2-135m", extra={"ignore_eos": True})
    results = asyncio.run(send_closed_loop(target, requests, concurrency=8, on_done=lambda _: None))
    for result in results:
        assert result.error is None
        assert result.receipt
        books.sent("http", "/v1/completions")
        books.began(result.prompt_tokens, result.output_tokens)
        books.ended()
        books.finished("length", result.receipt["policy"], result.receipt["kv_tokens_evicted"])
    assert any(result.cached_tokens for result in results)
    stub = pb_grpc.InferenceServiceStub(cluster.channel)  # type: ignore[no-untyped-call]  # generated code
    pieces = list(stub.Generate(pb.GenerateRequest(text="Hello world", stop=["world"]), metadata=METADATA))
    books.sent("grpc", "Generate")
    books.began(pieces[-1].completion.usage.prompt_tokens, pieces[-1].completion.usage.completion_tokens)
    books.ended()
    books.finished("stop", "full", 0)
    with pytest.raises(grpc.RpcError):
        list(stub.Generate(pb.GenerateRequest(text="Hello world")))
    books.sent("grpc", "Generate")
    books.refused("invalid_api_key", tenant="")
    assert cluster.completion(temperature=9).status_code == 400
    books.sent("http", "/v1/completions")
    books.refused("invalid_value")
    assert booked(scrape(cluster), before) == books.entries


def test_rays_exporter_has_the_same_without_a_dashboard(cluster: ClusterUnderTest) -> None:
    own = {name for name, _ in scrape(cluster)}
    deadline_s = time.monotonic() + 40
    while not own <= (exported := exported_by_ray()).keys() and time.monotonic() < deadline_s:
        time.sleep(0.5)
    assert exported.keys() >= own
    assert exported["kvorum_engine_up"] == 1
    assert exported["kvorum_manager_up"] == 1


def exported_by_ray() -> Mapping[str, float]:
    """Return the samples of kvorum that Ray's nodes export, without Ray's prefix, labels added up."""
    values: dict[str, float] = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for (name, _), value in samples_of(httpx.get(url, timeout=10).text).items():
            if name.startswith("ray_kvorum_"):
                values[name.removeprefix("ray_")] = values.get(name.removeprefix("ray_"), 0.0) + value
    return values
