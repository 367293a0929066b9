"""Traces: a tree of spans for each request, over a real OTLP connection and out of an exporter in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent import futures
from dataclasses import replace

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from pydantic import ValidationError
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.tracing import Tracing
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvtest.managed import managed_cluster
from kvtest.servers import HasFrontend, Unchecked, failure_of, grpc_channel, grpc_stub, http_client
from kvtest.stack import DEFAULT_INFO, Stack, running_stack
from kvtest.waiting import eventually

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"


class Collector(otlp_grpc.TraceServiceServicer):
    """A collector on a socket of its own, which keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[Unchecked] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=1))
        otlp_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]  # generated code
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(self, request: Unchecked, context: object) -> Unchecked:
        self.requests.append(request)
        return otlp.ExportTraceServiceResponse()

    @property
    def spans(self) -> dict[str, Unchecked]:
        """All spans by their names."""
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(grace=None).wait()


@contextlib.asynccontextmanager
async def traced(
    config: ClusterConfig | None = None, **settings: Unchecked
) -> AsyncIterator[tuple[Stack, InMemorySpanExporter]]:
    async with running_stack(config, **settings) as stack:
        yield stack, trace_in_memory(stack)


def trace_in_memory(router: HasFrontend) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    router.frontend._tracing = Tracing(SimpleSpanProcessor(exporter))
    return exporter


def spans_of(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def times(spans: Sequence[ReadableSpan]) -> list[tuple[int, int]]:
    return [(span.start_time or 0, span.end_time or 0) for span in spans]


def test_spans_reach_a_collector_and_go_on_with_the_clients_traces() -> None:
    async def main(collector: Collector) -> None:
        config = ClusterConfig(otlp_endpoint=collector.url)
        async with running_stack(config) as stack, http_client(stack) as http, grpc_stub(stack) as stub:
            body = {"prompt": "abc", "max_tokens": 4}
            headers = {"traceparent": TRACEPARENT, "x-request-id": "mine"}
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            message = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=2), request_id="yours")
            async for _ in stub.Generate(message, metadata=(("traceparent", TRACEPARENT),)):
                pass

    with Collector() as collector:
        asyncio.run(main(collector))
    spans = collector.spans
    assert set(spans) == {
        "POST /v1/completions",
        "kvorum.inference.v1.InferenceService/Generate",
        *("admit", "queue", "prefill", "decode"),
    }
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    over_http, over_grpc = spans["POST /v1/completions"], spans["kvorum.inference.v1.InferenceService/Generate"]
    assert over_http.parent_span_id.hex() == over_grpc.parent_span_id.hex() == PARENT_ID
    assert spans["decode"].parent_span_id in (over_http.span_id, over_grpc.span_id)
    attributes = {each.key: each.value for each in over_http.attributes}
    assert attributes["kvorum.tenant"].string_value == "default"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 4
    assert attributes["http.request.header.x-request-id"].string_value == "mine"
    assert {each.key: each.value for each in over_grpc.attributes}["kvorum.request_id"].string_value == "yours"
    resource = {each.key: each.value for each in collector.requests[0].resource_spans[0].resource.attributes}
    assert resource["service.name"].string_value == "kvorum"


def test_a_request_is_admitted_queued_prefilled_and_decoded_one_after_the_other() -> None:
    async def main() -> dict[str, ReadableSpan]:
        async with traced(step_delay_s=0.01) as (stack, exporter), http_client(stack) as http:
            body = {"prompt": "abc" * 20, "max_tokens": 60, "kvorum": {"policy": "h2o", "kv_budget": 16}}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            return spans_of(exporter)

    spans = asyncio.run(main())
    whole, parts = spans["POST /v1/completions"], [spans[name] for name in ("admit", "queue", "prefill", "decode")]
    edges = [moment for pair in times(parts) for moment in pair]
    assert edges == sorted(edges)
    (start_ns, end_ns), (decode_start_ns, decode_end_ns) = times([whole, parts[-1]])
    assert start_ns <= edges[0]
    assert decode_end_ns == end_ns
    assert decode_end_ns - decode_start_ns > 59 * 0.01 * 1e9
    assert whole.context
    assert all(part.parent and part.parent.span_id == whole.context.span_id for part in parts)
    finished = parts[-1].events[-1]
    assert finished.name == "kvorum.finished"
    assert finished.attributes
    assert finished.attributes["kvorum.policy"] == "h2o"
    assert finished.attributes["kvorum.kv_tokens_evicted"] == 60 + 59 - 16
    assert any(event.name == "kvorum.cut" for part in parts for event in part.events)


def test_a_gateways_request_is_named_after_its_service() -> None:
    async def main() -> dict[str, ReadableSpan]:
        async with traced() as (stack, exporter), grpc_channel(stack) as channel:
            stub = VllmEngineStub(channel)  # type: ignore[no-untyped-call]  # generated code
            async for _ in stub.Generate(vllm.GenerateRequest(text="abc", request_id="theirs")):
                pass
            return spans_of(exporter)

    whole = asyncio.run(main())["vllm.grpc.engine.VllmEngine/Generate"]
    assert whole.attributes
    assert whole.attributes["kvorum.request_id"] == "theirs"


def test_a_hit_in_the_prefix_cache_is_an_event() -> None:
    async def main() -> list[ReadableSpan]:
        async with traced() as (stack, exporter), http_client(stack) as http:
            for _ in range(2):
                await http.post("/v1/completions", json={"prompt": "abcd" * 10, "max_tokens": 2})
            return [span for span in exporter.get_finished_spans() if span.name == "prefill"]

    cold, warm = asyncio.run(main())
    assert "kvorum.cache_hit" not in [event.name for event in cold.events]
    (hit,) = (event for event in warm.events if event.name == "kvorum.cache_hit")
    assert hit.attributes
    assert hit.attributes["kvorum.kv_tokens"] == 32


def test_an_error_is_the_status_of_its_request() -> None:
    async def main() -> list[ReadableSpan]:
        async with (
            traced(ClusterConfig(request_timeout_s=0.2), step_delay_s=0.02) as (stack, exporter),
            http_client(stack) as http,
            grpc_stub(stack) as stub,
        ):
            await http.post("/v1/completions", json={"prompt": "abc", "temperature": 9})
            await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 400})
            await http.post("/tokenize", json={"prompt": "abc"})
            message = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=400))
            call = stub.Generate(message)
            await call.read()
            call.cancel()
            await failure_of(stub.Generate(pb.GenerateRequest()))
            await stack.wait_until_idle()
            return list(exporter.get_finished_spans())

    spans = asyncio.run(main())
    roots = [span for span in spans if span.parent is None]
    codes = [(span.attributes or {}).get("error.type") for span in roots]
    assert codes == ["invalid_value", "timeout", "cancelled", "invalid_value"]
    is_error = [span.status.status_code is StatusCode.ERROR for span in roots]
    assert is_error == [True, True, False, True]
    late = [span.name for span in spans if span.parent and roots[1].context and span.parent == roots[1].context]
    assert late == ["admit", "prefill", "decode"]


def test_a_request_that_moved_has_the_spans_of_both_engines() -> None:
    engines = {name: replace(DEFAULT_INFO, engine_id=name) for name in ("first", "second")}

    async def main() -> list[ReadableSpan]:
        async with (
            managed_cluster(engines=engines, step_delay_s=0.005) as cluster,
            http_client(cluster) as http,
        ):
            exporter = trace_in_memory(cluster)
            asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 60}))
            hosts: list[Unchecked] = list(cluster.engines.values())
            await eventually(lambda: any(each.host.engine.stats().generation_tokens_total > 5 for each in hosts))
            (lost,) = (each for each in hosts if each.host.engine.stats().num_running)
            lost.agent.cancel()
            await lost.host.server.stop()
            assert (await asking).status_code == 200
            return list(exporter.get_finished_spans())

    *parts, whole = asyncio.run(main())
    served = [(span.name, (span.attributes or {})["kvorum.engine"]) for span in parts if span.name != "admit"]
    (_, lost), (_, other) = served[0], served[-1]
    assert served == [("prefill", lost), ("decode", lost), ("queue", other), ("prefill", other), ("decode", other)]
    assert lost != other
    assert [event.name for event in whole.events] == ["engine_lost"]
    edges = [moment for pair in times(parts) for moment in pair]
    assert edges == sorted(edges)


def test_a_trace_that_its_client_does_not_sample_is_not_written() -> None:
    async def main() -> None:
        async with traced() as (stack, exporter), http_client(stack) as http:
            body = {"prompt": "abc", "max_tokens": 2}
            await http.post("/v1/completions", json=body, headers={"traceparent": UNSAMPLED})
            assert not exporter.get_finished_spans()
            await http.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
            assert exporter.get_finished_spans()

    asyncio.run(main())


def test_a_collector_that_is_not_there_disturbs_nothing() -> None:
    async def main() -> None:
        config = ClusterConfig(otlp_endpoint="http://127.0.0.1:1")
        async with running_stack(config) as stack, http_client(stack) as http:
            assert (await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})).status_code == 200

    asyncio.run(main())


def test_a_router_that_is_drained_has_sent_its_traces() -> None:
    async def main(collector: Collector) -> None:
        async with running_stack(ClusterConfig(otlp_endpoint=collector.url)) as stack, http_client(stack) as http:
            await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2})
            await stack.frontend.drain(timeout_s=5.0)
            assert "POST /v1/completions" in collector.spans

    with Collector() as collector:
        asyncio.run(main(collector))


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, json, kvorum.cluster.router; "
        "print(json.dumps([m for m in sys.modules if m.startswith(('opentelemetry.exporter.otlp', "
        "'kvorum.cluster.tracing'))]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("is_parent_there", [True, False])
def test_an_endpoint_without_opentelemetry_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, *, is_parent_there: bool
) -> None:
    def find_spec(name: str) -> None:
        if not is_parent_there:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert ClusterConfig().otlp_endpoint is None
    with pytest.raises(ValidationError, match=r"pip install 'kvorum\[otel\]'"):
        ClusterConfig(otlp_endpoint="http://127.0.0.1:4317")


def test_an_endpoint_is_a_url_of_scheme_and_host() -> None:
    with pytest.raises(ValidationError, match="otlp_endpoint"):
        ClusterConfig(otlp_endpoint="127.0.0.1:4317")
