"""What the client decides by itself, and what it sends to go on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.client import (
    Answer,
    AsyncClient,
    BrokenStreamError,
    Client,
    ClientError,
    Options,
    QuotaError,
    RetryPolicy,
    UnavailableError,
)
from kvorum.cluster.errors import grpc_status_of
from kvorum.kvstore.errors import CapacityError, KvorumError
from kvorum.kvstore.errors import QuotaError as ServerQuotaError
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc
from kvtest.servers import Unchecked

POLICY = RetryPolicy(max_retries=3, first_wait_s=0.01, longest_wait_s=0.02)
END = pb.Completion(finish_reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=9, completion_tokens=2))


def error(status: grpc.StatusCode, *, retry_after_s: float | None = None) -> ClientError:
    return ClientError("no", code="x", status=status, retry_after_s=retry_after_s)


@given(num_retries=st.integers(0, 60), seed=st.integers(0, 2**32))
def test_waits_grow_to_a_limit_and_scatter(num_retries: int, seed: int) -> None:
    policy = RetryPolicy(max_retries=61, first_wait_s=0.1, longest_wait_s=5.0)
    wait_s = policy.wait_s(error(grpc.StatusCode.UNAVAILABLE), num_retries=num_retries, rng=random.Random(seed))
    longest_s = min(0.1 * 2.0**num_retries, 5.0)
    assert wait_s is not None
    assert longest_s / 2 <= wait_s <= longest_s


@given(told_s=st.floats(0.0, 1000.0), seed=st.integers(0, 2**32))
def test_what_the_server_says_is_obeyed(told_s: float, seed: int) -> None:
    for status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        wait_s = POLICY.wait_s(error(status, retry_after_s=told_s), num_retries=0, rng=random.Random(seed))
        assert wait_s is not None
        assert told_s <= wait_s <= told_s * 1.25


@pytest.mark.parametrize(
    "status",
    [
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
    ],
)
def test_what_would_fail_again_is_not_tried_again(status: grpc.StatusCode) -> None:
    assert POLICY.wait_s(error(status), num_retries=0, rng=random.Random(0)) is None


@dataclass
class Scripted(pb_grpc.InferenceServiceServicer):
    """A server that plays one act for each call of Generate, and notes what it was asked."""

    acts: list[tuple[pb.GenerateResponse, ...] | KvorumError]
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Unchecked, Unchecked]
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.times_s.append(asyncio.get_running_loop().time())
        act = self.acts.pop(0)
        if isinstance(act, KvorumError):
            await context.abort_with_status(grpc_status_of(act))
        for response in act:
            yield response
        if self.acts:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def asked_async(target: str) -> Answer:
    async with AsyncClient(target, retry=POLICY) as client:
        return await client.complete("hi", Options(temperature=0.0))


async def asked_blocking(target: str) -> Answer:
    with Client(target, retry=POLICY) as client:
        return await asyncio.to_thread(client.complete, "hi", Options(temperature=0.0))


def play(script: Scripted, scenario: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with served(script) as target, AsyncClient(target, retry=POLICY) as client:
            await scenario(client)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def served(script: Scripted) -> AsyncIterator[str]:
    server = grpc.aio.server()
    pb_grpc.add_InferenceServiceServicer_to_server(script, server)  # type: ignore[no-untyped-call]  # generated code
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)
        await asyncio.sleep(0.01)  # cancelled calls of grpc.aio need a turn of the loop


def tokens(*token_ids: int, completion: pb.Completion | None = None) -> pb.GenerateResponse:
    return pb.GenerateResponse(token_ids=token_ids, text="x" * len(token_ids), completion=completion)


def test_a_broken_stream_goes_on_with_the_tokens_that_came() -> None:
    script = Scripted([(tokens(3), tokens(4, 5)), (tokens(6),), (tokens(7), tokens(8, completion=END))])
    options = Options(max_tokens=20, min_tokens=4, stop=("x",), policy="h2o", request_id="mine", model="m")

    async def scenario(client: AsyncClient) -> None:
        answer = await client.chat("hi", options)
        assert answer.token_ids == (3, 4, 5, 6, 7, 8)
        assert answer.text == "x" * 6
        ending = answer.completion
        assert (ending.reconnects, ending.prompt_tokens, ending.completion_tokens) == (2, 9, 2)

    play(script, scenario)
    first, second, third = script.requests
    assert first.request_id == "mine"
    assert first.sampling.HasField("seed")
    for request, came in ((second, [3, 4, 5]), (third, [3, 4, 5, 6])):
        expected = pb.GenerateRequest()
        expected.CopyFrom(first)
        expected.request_id = ""  # its name may still be taken
        expected.answer_token_ids[:] = came
        assert request == expected


def test_a_seed_is_kept() -> None:
    script = Scripted([(tokens(completion=END),)])

    async def scenario(client: AsyncClient) -> None:
        await client.complete("hi", Options(seed=0))

    play(script, scenario)
    assert script.requests[0].sampling.seed == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Options(json_schema="{}"), pb.StructuredOutputs(json="{}")),
        (Options(regex="a+"), pb.StructuredOutputs(regex="a+")),
        (Options(choices=("yes", "no")), pb.StructuredOutputs(choice=pb.Choice(texts=["yes", "no"]))),
    ],
)
def test_what_an_answer_must_look_like_is_sent(options: Options, expected: pb.StructuredOutputs) -> None:
    script = Scripted([(tokens(completion=END),)])

    async def scenario(client: AsyncClient) -> None:
        await client.complete("hi", options)

    play(script, scenario)
    assert script.requests[0].structured_outputs == expected


def test_a_stream_that_broke_at_its_last_token_has_nothing_left_to_ask_for() -> None:
    script = Scripted([(tokens(3), tokens(4)), ()])

    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(BrokenStreamError, match="after its last token, 2 in all"):
            await client.complete("hi", Options(max_tokens=2, temperature=0.0))

    play(script, scenario)


@pytest.mark.parametrize("stream", [asked_async, asked_blocking])
def test_a_stream_that_breaks_after_its_end_is_whole(stream: Callable[[str], Awaitable[Answer]]) -> None:
    script = Scripted([(tokens(3), tokens(4, completion=END)), ()])

    async def main() -> None:
        async with served(script) as target:
            assert (await stream(target)).token_ids == (3, 4)

    asyncio.run(main())
    assert len(script.requests) == 1


def test_a_stream_without_an_end_is_no_answer() -> None:
    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(BrokenStreamError, match="without the answer's end"):
            await client.complete("hi")

    play(Scripted([(tokens(3),)]), scenario)


def test_retry_info_says_when() -> None:
    script = Scripted(
        [
            CapacityError("full", retry_after_s=0.1),
            ServerQuotaError("over", retry_after_s=0.1),
            (tokens(completion=END),),
        ]
    )

    async def scenario(client: AsyncClient) -> None:
        await client.complete("hi")

    play(script, scenario)
    first_s, second_s, third_s = script.times_s
    assert second_s - first_s >= 0.1
    assert third_s - second_s >= 0.1


def test_a_wait_longer_than_the_deadline_is_not_begun() -> None:
    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(QuotaError, match="over") as caught:
            await client.complete("hi", timeout_s=5.0)
        assert (caught.value.code, caught.value.retry_after_s) == ("kv_quota_exceeded", 60.0)

    play(Scripted([ServerQuotaError("over", retry_after_s=60.0)]), scenario)


def test_retries_come_to_an_end() -> None:
    script = Scripted([CapacityError("full", retry_after_s=0.0)] * 5)

    async def scenario(client: AsyncClient) -> None:
        with pytest.raises(UnavailableError, match="full") as caught:
            await client.complete("hi")
        assert caught.value.code == "kv_capacity_exhausted"

    play(script, scenario)
    assert len(script.requests) == 1 + POLICY.max_retries


def test_the_channel_may_be_encrypted() -> None:
    """Whoever speaks no TLS is not believed."""

    async def main() -> None:
        async with served(Scripted([])) as target:
            credentials, once = grpc.ssl_channel_credentials(), RetryPolicy(max_retries=0)
            async with AsyncClient(target, credentials=credentials, retry=once) as client:
                with pytest.raises(UnavailableError):
                    await client.models()
            with Client(target, credentials=credentials, retry=once) as blocking, pytest.raises(UnavailableError):
                await asyncio.to_thread(blocking.models)

    asyncio.run(main())
