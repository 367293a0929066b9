"""The gRPC API on a plain grpc.aio server and an engine whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]  # has no types

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.grpc_service import SERVICE_NAME, GrpcService
from kvorum.cluster.vllm_engine import VLLM_SERVICE_NAME
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvtest.servers import Unchecked, assert_refused, failure_of, grpc_channel, grpc_stub
from kvtest.stack import Stack, running_stack
from kvtest.waiting import eventually

Scenario = Callable[[Unchecked, Stack], Awaitable[None]]


def run(scenario: Scenario, config: ClusterConfig | None = None, *, step_delay_s: float = 0.0) -> None:
    async def main() -> None:
        async with running_stack(config, step_delay_s=step_delay_s) as stack, grpc_stub(stack) as stub:
            await scenario(stub, stack)
            await stack.wait_until_idle()

    asyncio.run(main())


def request(text: str = "abc", *, max_tokens: int = 5, **fields: Unchecked) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(max_tokens=max_tokens), **fields)


async def answer(stub: Unchecked, message: pb.GenerateRequest, **call: Unchecked) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(message, **call)]


def test_an_answer_streams_tokens_text_and_at_last_the_receipt() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        *pieces, last = await answer(stub, request())
        assert [token for piece in [*pieces, last] for token in piece.token_ids] == list(b"abcab")
        assert "".join(piece.text for piece in [*pieces, last]) == "abcab"
        assert len({piece.request_id for piece in [*pieces, last]}) == 1
        assert not any(piece.HasField("completion") for piece in pieces)
        assert last.completion.finish_reason == pb.FINISH_REASON_LENGTH
        assert last.completion.usage == pb.Usage(prompt_tokens=3, completion_tokens=5)
        receipt = last.completion.receipt
        assert (receipt.engine, receipt.policy, receipt.kv_tokens_held) == ("engine-0", "full", 7)
        assert not receipt.HasField("kv_budget")

    run(scenario)


def test_input_may_be_ids_or_a_conversation() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        sampling = pb.SamplingParams(max_tokens=4)
        by_ids = await answer(stub, pb.GenerateRequest(token_ids=pb.TokenIds(ids=b"xy"), sampling=sampling))
        assert "".join(piece.text for piece in by_ids) == "xyxy"
        chat = pb.Conversation(messages=[pb.Message(role="user", content="hi")])
        by_chat = await answer(stub, pb.GenerateRequest(chat=chat, sampling=sampling))
        assert "".join(piece.text for piece in by_chat) == "user"

    run(scenario)


def test_stop_strings_logprobs_and_special_tokens_work_as_over_http() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        stopped = await answer(stub, request("abcdef", max_tokens=100, stop=["de"]))
        assert "".join(piece.text for piece in stopped) == "abc"
        assert stopped[-1].completion.finish_reason == pb.FINISH_REASON_STOP
        message = request("a<end>", max_tokens=3, skip_special_tokens=False)
        message.sampling.ignore_eos = True
        message.sampling.logprobs = 1
        pieces = await answer(stub, message)
        assert "".join(piece.text for piece in pieces) == "a<end>a"
        logprobs = [entry for piece in pieces for entry in piece.logprobs]
        assert [entry.top[0].token_id for entry in logprobs] == [97, 256, 97]

    run(scenario, step_delay_s=0.005)


def test_cancelling_frees_the_blocks_within_a_step() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        call = stub.Generate(request(max_tokens=400))
        await call.read()
        assert stack.host.engine.stats().blocks_held > 0
        call.cancel()
        steps = stack.host.engine.stats().steps_total
        await eventually(lambda: stack.host.engine.stats().blocks_held == 0)
        assert stack.host.engine.stats().steps_total - steps <= 3

    run(scenario, step_delay_s=0.02)


def test_the_clients_deadline_ends_the_request() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        error = await failure_of(stub.Generate(request(max_tokens=400), timeout=0.2))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stack.wait_until_idle()

    run(scenario, step_delay_s=0.02)


def test_the_servers_deadline_is_a_typed_error() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        call = stub.Generate(request(max_tokens=400))
        details = await assert_refused(call, grpc.StatusCode.DEADLINE_EXCEEDED, param=None)
        assert details["ErrorInfo"].reason == "TIMEOUT"

    run(scenario, ClusterConfig(request_timeout_s=0.2), step_delay_s=0.02)


@pytest.mark.parametrize("stop", [[], ["bca"]])
def test_an_answer_goes_on_after_what_came_of_it(stop: list[str]) -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        whole = await answer(stub, request(max_tokens=9, stop=stop))
        token_ids = [token for piece in whole for token in piece.token_ids]
        assert len(token_ids) == (4 if stop else 9)
        for count in range(1, len(token_ids)):
            rest = await answer(stub, request(max_tokens=9, stop=stop, answer_token_ids=token_ids[:count]))
            assert [token for piece in rest for token in piece.token_ids] == token_ids[count:]
            # The engine of these tests sends a token at a time.
            assert [piece.text for piece in rest] == [piece.text for piece in whole[count:]]
            assert rest[-1].completion.usage == whole[-1].completion.usage
            assert rest[-1].completion.finish_reason == whole[-1].completion.finish_reason

    run(scenario)


@pytest.mark.parametrize(("came", "why"), [([97] * 5, "all of the 5 tokens"), ([97, 10**6], "not in the vocabulary")])
def test_what_cannot_have_come_of_an_answer_is_refused(came: list[int], why: str) -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        call = stub.Generate(request(max_tokens=5, answer_token_ids=came))
        await assert_refused(call, grpc.StatusCode.INVALID_ARGUMENT, param="answer_token_ids")
        assert why in str((await failure_of(call)).details())

    run(scenario)


def test_a_full_cluster_says_when_to_come_back() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        calls = [stub.Generate(request(max_tokens=300)) for _ in range(4)]
        await eventually(lambda: stack.host.engine.stats().num_running == 4)
        calls += [stub.Generate(request(max_tokens=300)) for _ in range(4)]
        await eventually(lambda: stack.frontend.num_running == 8)
        details = await assert_refused(stub.Generate(request()), grpc.StatusCode.UNAVAILABLE, param=None)
        assert details["ErrorInfo"].reason == "KV_CAPACITY_EXHAUSTED"
        assert details["RetryInfo"].retry_delay.ToMilliseconds() == 1000
        for call in calls:
            call.cancel()

    run(scenario, step_delay_s=0.02)


def test_abort_ends_a_request_by_its_id() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        call = stub.Generate(request(max_tokens=400, request_id="mine"))
        assert (await call.read()).request_id == "mine"
        twice = await assert_refused(
            stub.Generate(request(request_id="mine")), grpc.StatusCode.INVALID_ARGUMENT, param="request_id"
        )
        assert twice["ErrorInfo"].reason == "INVALID_VALUE"
        await stub.Abort(pb.AbortRequest(request_id="mine"))
        assert (await failure_of(call)).code() is grpc.StatusCode.CANCELLED
        error = await failure_of(stub.Abort(pb.AbortRequest(request_id="mine")))
        assert error.code() is grpc.StatusCode.NOT_FOUND

    run(scenario, step_delay_s=0.01)


def test_tokenize_and_list_models() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        response = await stub.Tokenize(pb.TokenizeRequest(text="hé"))
        assert bytes(response.token_ids).decode() == "hé"
        assert response.max_model_len == 512
        chat = pb.Conversation(messages=[pb.Message(role="user", content="x")])
        response = await stub.Tokenize(pb.TokenizeRequest(chat=chat))
        assert bytes(response.token_ids) == b"user: x\nassistant:"
        await assert_refused(stub.Tokenize(pb.TokenizeRequest()), grpc.StatusCode.INVALID_ARGUMENT, param="input")
        models = (await stub.ListModels(pb.ListModelsRequest())).models
        assert models == [pb.Model(id="tiny", max_model_len=512)]
        unknown = await assert_refused(stub.Generate(request(model="x")), grpc.StatusCode.NOT_FOUND, param=None)
        assert unknown["ErrorInfo"].reason == "MODEL_NOT_FOUND"

    run(scenario)


def test_a_key_is_needed_on_every_inference_call_when_one_is_set() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        calls: list[Callable[..., Unchecked]] = [
            lambda **how: stub.Generate(request(), **how),
            lambda **how: stub.Tokenize(pb.TokenizeRequest(text="x"), **how),
            lambda **how: stub.ListModels(pb.ListModelsRequest(), **how),
            lambda **how: stub.Abort(pb.AbortRequest(request_id="x"), **how),
        ]
        for call in calls:
            for metadata in ([], [("authorization", "Bearer wrong")]):
                details = await assert_refused(call(metadata=metadata), grpc.StatusCode.UNAUTHENTICATED, param=None)
                assert details["ErrorInfo"].reason == "INVALID_API_KEY"
        await answer(stub, request(), metadata=[("authorization", "Bearer s3cret")])

    run(scenario, ClusterConfig(api_key="s3cret"))


def test_a_lost_engine_is_unavailable() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        call = stub.Generate(request(max_tokens=400))
        await call.read()
        await stack.host.server.stop()
        details = await assert_refused(call, grpc.StatusCode.UNAVAILABLE, param=None)
        assert details["ErrorInfo"].reason == "ENGINE_LOST"
        details = await assert_refused(stub.Generate(request()), grpc.StatusCode.UNAVAILABLE, param=None)
        assert details["ErrorInfo"].reason == "ENGINE_LOST"

    run(scenario, ClusterConfig(resume_timeout_s=0.5), step_delay_s=0.01)


def test_an_unforeseen_error_is_internal_and_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        def explode(*_: object) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(stack.frontend, "plan", explode)
        error = await failure_of(stub.Generate(request()))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(error)

    run(scenario)


def test_health_is_checked_watched_and_listed() -> None:
    async def main() -> None:
        async with running_stack() as stack, grpc_channel(stack) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            serving = health_pb2.HealthCheckResponse.SERVING
            services = {"", SERVICE_NAME, VLLM_SERVICE_NAME}
            for service in services:
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == serving
            error = await failure_of(stub.Check(health_pb2.HealthCheckRequest(service="other")))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert set((await stub.List(health_pb2.HealthListRequest())).statuses) == services
            unknown = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
            assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            unknown.cancel()
            watching = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watching.read()).status == serving
            await stack.frontend.drain(0.0)
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await watching.read() is grpc.aio.EOF

    asyncio.run(main())


def test_a_server_for_this_machine_alone_refuses_others() -> None:
    class FarAway:
        code: grpc.StatusCode | None = None

        def peer(self) -> str:
            return "ipv4:192.0.2.7:1234"

        def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
            return []

        def set_code(self, code: grpc.StatusCode) -> None:
            self.code = code

        def set_details(self, details: str) -> None:
            pass

        def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Unchecked]]) -> None:
            pass

    async def main(host: str, code: grpc.StatusCode | None) -> None:
        async with running_stack(ClusterConfig(host=host)) as stack:
            context = FarAway()
            await GrpcService(stack.frontend).ListModels(pb.ListModelsRequest(), context)
            assert context.code is code

    asyncio.run(main("127.0.0.1", grpc.StatusCode.PERMISSION_DENIED))
    asyncio.run(main("0.0.0.0", None))
