"""Stock clients against a real cluster: exact streams, cancels, deadlines, overload, leaks."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import openai
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # has no types
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # type: ignore[import-untyped]  # has no types
    ProtoReflectionDescriptorDatabase,
)

from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc
from kvtest.cluster import API_KEY, METADATA, ClusterUnderTest
from kvtest.servers import Unchecked, details_of

pytestmark = pytest.mark.ray

SERVICE = "kvorum.inference.v1.InferenceService"


def stub_of(cluster: ClusterUnderTest) -> Unchecked:
    return pb_grpc.InferenceServiceStub(cluster.channel)  # type: ignore[no-untyped-call]  # generated code


def request(text: str = "Hello world", *, max_tokens: int = 4, **fields: Unchecked) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(max_tokens=max_tokens), **fields)


def test_a_stock_openai_client_chats_and_streams(cluster: ClusterUnderTest) -> None:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=API_KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["smollm2-135m"]
        answer = client.chat.completions.create(
            model="smollm2-135m", messages=[{"role": "user", "content": "Hi"}], max_tokens=3
        )
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage
        assert answer.usage.completion_tokens == 3
        chunks = list(client.completions.create(model="smollm2-135m", prompt="Hello world", max_tokens=4, stream=True))
        assert [chunk.choices[0].text for chunk in chunks] == ["Hello", " world", "Hello", " world", ""]
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt-4", prompt="x")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="smollm2-135m", prompt="x", temperature=9)
        assert bad.value.param == "temperature"


def test_the_openapi_document_describes_the_api_and_not_the_console(cluster: ClusterUnderTest) -> None:
    paths = cluster.http.get("/openapi.json").json()["paths"]
    assert "/v1/chat/completions" in paths
    assert not any(path.startswith("/console") for path in paths)


def test_a_client_built_from_reflection_streams(cluster: ClusterUnderTest) -> None:
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(cluster.channel))
    method = pool.FindServiceByName(SERVICE).methods_by_name["Generate"]
    request_class = message_factory.GetMessageClass(method.input_type)
    generate = cluster.channel.unary_stream(
        f"/{SERVICE}/Generate",
        request_serializer=request_class.SerializeToString,
        response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
    )
    message: Unchecked = request_class()
    message.text = "Hello world"
    message.sampling.max_tokens = 3
    pieces: list[Unchecked] = list(generate(message, metadata=METADATA))
    assert "".join(piece.text for piece in pieces) == "Hello worldHello"
    assert pieces[-1].completion.receipt.engine.startswith("engine-")


def test_health_is_served_beside_it(cluster: ClusterUnderTest) -> None:
    stub = health_pb2_grpc.HealthStub(cluster.channel)
    for service in ("", SERVICE):
        assert stub.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
    watching = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert next(watching).status == 1
    watching.cancel()
    assert cluster.http.get("/health").status_code == 200


def test_the_request_id_is_echoed_once(cluster: ClusterUnderTest) -> None:
    response = cluster.http.post("/tokenize", json={"prompt": "x"}, headers={"X-Request-Id": "mine"})
    assert response.headers.get_list("x-request-id") == ["mine"]


def test_sse_is_written_as_specified(cluster: ClusterUnderTest) -> None:
    body = {"prompt": "Hello world", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = list(response.iter_lines())
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line == "" or line.startswith("data: ") for line in lines)


def test_n_seeded_choices_are_streamed_side_by_side(cluster: ClusterUnderTest) -> None:
    body = cluster.completion(n=3, seed=7, max_tokens=3).json()
    assert [choice["text"] for choice in body["choices"]] == ["Hello worldHello"] * 3


def test_an_http_client_that_hangs_up_frees_its_blocks(cluster: ClusterUnderTest) -> None:
    cluster.wait_until_idle()
    body = {"prompt": "Hello world " * 50, "max_tokens": 800, "stream": True}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # without a name it would be closed at once, and the response with it
        next(lines)
        held = cluster.metrics()
        assert held["kvorum_kv_blocks_held"] > 0
    freed = cluster.wait_until_idle()
    # Far fewer steps than the answer would have had: the hang-up ended it, not its length.
    assert freed["kvorum_engine_steps_total"] - held["kvorum_engine_steps_total"] < 100


def test_a_whole_answer_is_cancelled_too_when_its_client_hangs_up(cluster: ClusterUnderTest) -> None:
    cluster.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        cluster.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 800}, timeout=0.3)
    cluster.wait_until_idle(timeout_s=2.0)


def test_cancelling_a_grpc_call_frees_its_blocks(cluster: ClusterUnderTest) -> None:
    cluster.wait_until_idle()
    call = stub_of(cluster).Generate(request(max_tokens=800), metadata=METADATA)
    next(call)
    held = cluster.metrics()
    assert held["kvorum_kv_blocks_held"] > 0
    call.cancel()
    freed = cluster.wait_until_idle()
    assert freed["kvorum_engine_steps_total"] - held["kvorum_engine_steps_total"] < 100


def test_deadlines_end_requests_in_either_protocol(cluster: ClusterUnderTest) -> None:
    stub = stub_of(cluster)
    with pytest.raises(grpc.RpcError) as by_client:
        list(stub.Generate(request(max_tokens=1000), metadata=METADATA, timeout=0.3))
    assert by_client.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.wait_until_idle(timeout_s=2.0)
    with ThreadPoolExecutor() as threads:
        # All three find room at once, so that each is in the middle of its answer when its time is over.
        by_server = threads.submit(list, stub.Generate(request(max_tokens=1000), metadata=METADATA)).exception
        whole = threads.submit(cluster.completion, max_tokens=1000).result
        streamed = threads.submit(cluster.completion, max_tokens=1000, stream=True).result
        error: Unchecked = by_server()
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details_of(error)["ErrorInfo"].reason == "TIMEOUT"
        assert (whole().status_code, whole().json()["error"]["code"]) == (504, "timeout")
        assert streamed().status_code == 200
        assert '"code":"timeout"' in streamed().text.splitlines()[-2]
        assert "[DONE]" not in streamed().text
        assert '"finish_reason":"' not in streamed().text


def test_overload_is_answered_at_once_in_either_protocol(cluster: ClusterUnderTest) -> None:
    cluster.wait_until_idle()
    stub = stub_of(cluster)
    # One request reserves the whole pool until its deadline, others fill the tenant's line.
    running = [stub.Generate(request(max_tokens=4000), metadata=METADATA)]
    next(running[0])
    waiting = [stub.Generate(request(max_tokens=4000), metadata=METADATA) for _ in range(16)]
    while cluster.http.get("/operator/cluster").json()["tenants"][0]["num_waiting"] < 16:
        time.sleep(0.02)
    refused = cluster.completion()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "kv_capacity_exhausted")
    assert int(refused.headers["retry-after"]) >= 1
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.Generate(request(), metadata=METADATA))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details_of(caught.value)["RetryInfo"].retry_delay.ToMilliseconds() > 0
    for call in running + waiting:
        call.cancel()
    cluster.wait_until_idle()
    assert cluster.completion().status_code == 200


def test_two_hundred_clients_that_vanish_leak_nothing(cluster: ClusterUnderTest) -> None:
    before = cluster.wait_until_idle()

    async def vanish(client: httpx.AsyncClient, slots: asyncio.Semaphore, number: int) -> None:
        body = {"prompt": f"Client {number} says hello", "max_tokens": 600, "stream": True}
        async with slots, client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 503:
                return
            lines = response.aiter_lines()
            for _ in range(number % 5):
                await anext(lines)

    async def scenario() -> None:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        slots = asyncio.Semaphore(24)
        async with httpx.AsyncClient(base_url=cluster.url, headers=headers, timeout=30) as client:
            await asyncio.gather(*(vanish(client, slots, number) for number in range(200)))

    asyncio.run(scenario())
    after = cluster.wait_until_idle()
    assert after["kvorum_kv_blocks_held"] == 0
    assert after["kvorum_prompt_tokens_total"] > before["kvorum_prompt_tokens_total"]
    total = after["kvorum_kv_blocks_free"] + after["kvorum_kv_blocks_cached"]
    assert total == before["kvorum_kv_blocks_free"] + before["kvorum_kv_blocks_cached"]
    assert cluster.completion().json()["choices"][0]["text"] == "Hello worldHello world"
