"""Whatever is sent, the answer is a clean refusal that names the field, and the next request is served."""

from __future__ import annotations

import asyncio

import grpc
import httpx

from kvorum.cluster.config import MAX_REQUEST_BYTES
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvtest.garbage import BAD_BODIES, BAD_CALLS
from kvtest.servers import assert_refused, grpc_stub, http_client
from kvtest.stack import running_stack


def test_garbage_over_http_gets_a_clean_400() -> None:
    async def scenario() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            for bad in BAD_BODIES:
                response = await client.post("/v1/completions", content=bad.body)
                assert response.status_code == 400, (bad.name, response.text)
                error = response.json()["error"]
                assert (error["param"], error["code"]) == (bad.param, bad.code), (bad.name, error)
                assert error["type"] == "invalid_request_error"
                assert len(error["message"]) < 500, bad.name
            assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
            await stack.wait_until_idle()

    asyncio.run(scenario())


def test_garbage_in_a_conversation_is_named_by_its_place() -> None:
    cases: list[tuple[object, str]] = [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "pope", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": "x" * 2_000_000}], "messages"),
    ]

    async def scenario() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            for messages, param in cases:
                response = await client.post("/v1/chat/completions", json={"messages": messages})
                assert response.status_code == 400, response.text
                assert response.json()["error"]["param"] == param, response.text

    asyncio.run(scenario())


def test_what_is_not_built_is_refused_by_name() -> None:
    cases: dict[str, object] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "functions": [{"name": "f"}],
        "tool_choice": "auto",
        "response_format.type": {"type": "grammar"},
    }

    async def scenario() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            for param, value in cases.items():
                body = {"messages": [{"role": "user", "content": "x"}], param.partition(".")[0]: value}
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 400, response.text
                assert response.json()["error"]["param"] == param, response.text

    asyncio.run(scenario())


def test_a_body_without_end_is_cut_off() -> None:
    async def scenario() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            response = await client.post("/v1/completions", content=b" " * (MAX_REQUEST_BYTES + 1))
            assert response.status_code == 400
            assert "larger than" in response.json()["error"]["message"]

    asyncio.run(scenario())


def test_garbage_over_grpc_gets_a_clean_invalid_argument() -> None:
    async def scenario() -> None:
        async with running_stack() as stack, grpc_stub(stack) as stub:
            for bad in BAD_CALLS:
                await assert_refused(
                    stub.Generate(bad.request), grpc.StatusCode.INVALID_ARGUMENT, param=bad.param, about=bad.name
                )
            answer = [response async for response in stub.Generate(pb.GenerateRequest(text="a"))]
            assert answer[-1].HasField("completion")
            await stack.wait_until_idle()

    asyncio.run(scenario())


def test_text_that_only_json_can_spell_is_refused() -> None:
    async def scenario() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            body = b'{"prompt": "ok", "max_tokens": 1, "stop": "\\ud800"}'
            response = await client.post("/v1/completions", content=body)
            assert response.status_code == 400
            assert isinstance(response, httpx.Response)

    asyncio.run(scenario())
