"""The gateways' service over real sockets: on an engine whose answers are known, and on the real model."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import grpc.aio
import pytest
import tokenizers
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from kvorum.cluster import vllm_messages
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.model import ServedModel, load_model
from kvorum.cluster.tenants import Tenant, hash_key
from kvorum.cluster.tokenizer_archive import tokenizer_archive
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc
from kvtest.counting import samples_of
from kvtest.managed import managed_cluster
from kvtest.served import embedded_model_served
from kvtest.servers import Unchecked, assert_refused, failure_of, grpc_channel
from kvtest.stack import DEFAULT_INFO, Stack, running_stack
from kvtest.tiny_model import byte_tokenizer, tiny_model
from kvtest.waiting import eventually

Scenario = Callable[[Unchecked, Stack], Awaitable[None]]
TENANTS = ClusterConfig(
    tenants={
        "owner": Tenant(api_key_sha256=(hash_key("owner"),), is_operator=True),
        "acme": Tenant(api_key_sha256=(hash_key("acme"),)),
        "other": Tenant(api_key_sha256=(hash_key("other"),)),
    }
)


def stub_of(channel: grpc.aio.Channel) -> Unchecked:
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)  # type: ignore[no-untyped-call]  # generated code


def run(scenario: Scenario, config: ClusterConfig | None = None, *, step_delay_s: float = 0.0) -> None:
    async def main() -> None:
        async with running_stack(config, step_delay_s=step_delay_s) as stack, grpc_channel(stack) as channel:
            await scenario(stub_of(channel), stack)
            await stack.wait_until_idle()

    asyncio.run(main())


def request(
    ids: bytes = b"abc", *, request_id: str = "", stream: bool = False, max_tokens: int = 5, **params: Unchecked
) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id=request_id,
        tokenized=vllm.TokenizedInput(input_ids=ids),
        stream=stream,
        sampling_params=vllm.SamplingParams(max_tokens=max_tokens, **params),
    )


def key_of(tenant: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {tenant}")]


async def answer(stub: Unchecked, message: vllm.GenerateRequest, **call: Unchecked) -> list[vllm.GenerateResponse]:
    return [response async for response in stub.Generate(message, **call)]


def test_an_answer_comes_whole_or_in_chunks() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        (whole,) = await answer(stub, request())
        assert whole.complete == vllm.GenerateComplete(
            output_ids=b"abcab", finish_reason="length", prompt_tokens=3, completion_tokens=5
        )
        *chunks, last = await answer(stub, request(stream=True))
        assert [token for each in chunks for token in each.chunk.token_ids] == list(b"abcab")
        assert last == whole

    run(scenario)


def test_a_prompt_may_be_text() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        params = vllm.SamplingParams(max_tokens=4)
        (whole,) = await answer(stub, vllm.GenerateRequest(text="xy", sampling_params=params))
        assert bytes(whole.complete.output_ids) == b"xyxy"

    run(scenario)


def test_each_of_n_choices_ends() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        responses = await answer(stub, request(n=3))
        ends = {response.complete.index: bytes(response.complete.output_ids) for response in responses}
        assert ends == dict.fromkeys(range(3), b"abcab")

    run(scenario)


def test_stops_are_named_and_their_tokens_sent() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        (by_string,) = await answer(stub, request(b"abcdef", max_tokens=100, stop=["x", "de"]))
        assert (bytes(by_string.complete.output_ids), by_string.complete.matched_stop_str) == (b"abcde", "de")
        (by_token,) = await answer(stub, request(b"abcdef", max_tokens=100, stop_token_ids=[ord("c")]))
        assert (bytes(by_token.complete.output_ids), by_token.complete.matched_token_id) == (b"abc", ord("c"))
        (at_end,) = await answer(stub, vllm.GenerateRequest(text="ab<end>"))
        assert list(at_end.complete.output_ids) == [*b"ab", 256]
        assert at_end.complete.WhichOneof("matched_stop") is None
        assert {each.complete.finish_reason for each in (by_string, by_token, at_end)} == {"stop"}

    run(scenario)


def test_a_second_answer_finds_the_prefix_cached() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        found = [(await answer(stub, request(b"x" * 40)))[-1].complete.cached_tokens for _ in range(2)]
        assert found == [0, 32]

    run(scenario)


@pytest.mark.parametrize(
    ("constraint", "ours"),
    [
        ({"regex": "[0-9]{3}"}, {"regex": "[0-9]{3}"}),
        ({"choice": vllm.ChoiceConstraint(choices=["x", "y"])}, {"choice": pb.Choice(texts=["x", "y"])}),
        ({"json_schema": '{"type": "integer"}'}, {"json": '{"type": "integer"}'}),
        ({"json_object": True}, {"json": '{"type": "object"}'}),
    ],
)
def test_constraints_are_the_grammars_of_our_own_service(
    constraint: dict[str, Unchecked], ours: dict[str, Unchecked]
) -> None:
    async def main() -> None:
        async with running_stack(step_delay_s=0.01) as stack, grpc_channel(stack) as channel:
            engine = stack.host.engine
            theirs = stub_of(channel).Generate(request(max_tokens=300, **constraint))
            await eventually(lambda: engine.stats().num_running == 1)
            message = pb.GenerateRequest(
                text="abc", sampling=pb.SamplingParams(max_tokens=300), structured_outputs=pb.StructuredOutputs(**ours)
            )
            call = pb_grpc.InferenceServiceStub(channel).Generate(message)  # type: ignore[no-untyped-call]  # generated code
            await eventually(lambda: engine.stats().num_running == 2)
            first, second = (sequence.request.sampling.grammar for sequence in engine.scheduler.sequences())
            assert first == second != ""
            theirs.cancel()
            call.cancel()
            await stack.wait_until_idle()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (vllm.GenerateRequest(), "input"),
        (request(bytes([1]), temperature=9.0), "temperature"),
        (vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[257])), "tokenized.input_ids"),
        (vllm.GenerateRequest(tokenized=vllm.TokenizedInput()), "tokenized.input_ids"),
        (request(max_tokens=5000), "max_tokens"),
        (request(structural_tag="{}"), "structural_tag"),
        (request(json_schema="{"), "structured_outputs.json"),
        (request(regex="("), "structured_outputs.regex"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(message: vllm.GenerateRequest, param: str) -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        await assert_refused(stub.Generate(message), grpc.StatusCode.INVALID_ARGUMENT, param=param)

    run(scenario)


def test_an_answer_that_fails_midway_is_a_failure_of_a_stream_and_a_refusal_of_a_whole() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        for stream in (True, False):
            call = stub.Generate(request(stream=stream, max_tokens=400))
            await assert_refused(call, grpc.StatusCode.DEADLINE_EXCEEDED, param=None)
        samples = samples_of((await stack.frontend.render_metrics()).decode())
        assert samples["kvorum_request_failures_total", (("reason", "timeout"),)] == 1
        assert samples["kvorum_admission_rejections_total", (("reason", "timeout"), ("tenant", "default"))] == 1

    run(scenario, ClusterConfig(request_timeout_s=0.3), step_delay_s=0.02)


def test_cancelling_frees_the_blocks() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        call = stub.Generate(request(stream=True, max_tokens=400))
        await call.read()
        assert stack.host.engine.stats().blocks_held > 0
        call.cancel()
        await eventually(lambda: stack.host.engine.stats().blocks_held == 0)

    run(scenario, step_delay_s=0.02)


def test_abort_ends_ones_own_requests_and_nobody_elses() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        calls = {
            tenant: stub.Generate(request(request_id="same", stream=True, max_tokens=400), metadata=key_of(tenant))
            for tenant in ("acme", "other")
        }
        for call in calls.values():
            await call.read()
        await stub.Abort(vllm.AbortRequest(request_ids=["unknown", "same"]), metadata=key_of("acme"))
        assert (await failure_of(calls["acme"])).code() is grpc.StatusCode.CANCELLED
        assert stack.frontend.num_running == 1
        assert await calls["other"].read() is not grpc.aio.EOF
        calls["other"].cancel()

    run(scenario, TENANTS, step_delay_s=0.01)


def test_more_aborts_than_can_be_meant_are_refused() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        await stub.Abort(vllm.AbortRequest(request_ids=[""] * 10_000))
        too_many = stub.Abort(vllm.AbortRequest(request_ids=[""] * 10_001))
        await assert_refused(too_many, grpc.StatusCode.INVALID_ARGUMENT, param="request_ids")

    run(scenario)


def test_every_call_but_the_health_check_needs_a_key() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        messages = {
            "Generate": request(),
            "Abort": vllm.AbortRequest(),
            "GetModelInfo": vllm.GetModelInfoRequest(),
            "GetServerInfo": vllm.GetServerInfoRequest(),
            "GetLoads": vllm.GetLoadsRequest(),
            "GetTokenizer": common_pb2.GetTokenizerRequest(),
            "Embed": vllm.EmbedRequest(),
            "FlushCache": common_pb2.FlushCacheRequest(),
            "StartProfile": common_pb2.StartProfileRequest(),
            "StopProfile": common_pb2.StopProfileRequest(),
            "SubscribeKvEvents": common_pb2.SubscribeKvEventsRequest(),
        }
        names = vllm.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name
        assert messages.keys() | {"HealthCheck"} == set(names)
        for name, message in messages.items():
            for metadata in ([], key_of("wrong")):
                call = getattr(stub, name)(message, metadata=metadata)
                await assert_refused(call, grpc.StatusCode.UNAUTHENTICATED, param=None, about=name)
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy

    run(scenario, TENANTS)


def test_what_shows_others_doings_is_an_operators_to_see() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        for rpc, message in (
            (stub.GetServerInfo, vllm.GetServerInfoRequest()),
            (stub.GetLoads, vllm.GetLoadsRequest()),
        ):
            await assert_refused(rpc(message, metadata=key_of("acme")), grpc.StatusCode.PERMISSION_DENIED, param=None)
            await rpc(message, metadata=key_of("owner"))

    run(scenario, TENANTS)


def test_rpcs_that_a_cluster_does_not_have_say_so() -> None:
    async def scenario(stub: Unchecked, _: Stack) -> None:
        for rpc, message in (
            (stub.Embed, vllm.EmbedRequest()),
            (stub.FlushCache, common_pb2.FlushCacheRequest()),
            (stub.StartProfile, common_pb2.StartProfileRequest()),
            (stub.StopProfile, common_pb2.StopProfileRequest()),
            (stub.SubscribeKvEvents, common_pb2.SubscribeKvEventsRequest()),
        ):
            details = await assert_refused(rpc(message), grpc.StatusCode.UNIMPLEMENTED, param=None)
            assert details["ErrorInfo"].reason == "UNIMPLEMENTED"

    run(scenario)


def test_model_and_server_are_described() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        model = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("tiny", 512, 257)
        call = stub.Generate(request(stream=True, max_tokens=400))
        await call.read()
        server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.server_type, server.active_requests, server.data_parallel_size) == ("kvorum", 1, 1)
        assert (server.max_num_seqs, server.block_size) == (DEFAULT_INFO.max_num_seqs, DEFAULT_INFO.block_size)
        call.cancel()

    run(scenario, step_delay_s=0.01)


def test_health_follows_the_engines() -> None:
    async def scenario(stub: Unchecked, stack: Stack) -> None:
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
        await stack.frontend.drain(0.0)
        unhealthy = await stub.HealthCheck(vllm.HealthCheckRequest())
        assert (unhealthy.healthy, unhealthy.message) == (False, "no engine is ready")

    run(scenario)


def test_loads_are_those_of_all_engines_and_of_the_line_before_them() -> None:
    tiny = replace(DEFAULT_INFO, max_num_seqs=1, num_blocks=8)

    async def main() -> None:
        async with (
            managed_cluster(engines={"engine-0": tiny}, step_delay_s=0.02) as cluster,
            grpc_channel(cluster) as channel,
        ):
            stub = stub_of(channel)
            calls = [stub.Generate(request(stream=True, max_tokens=90)) for _ in range(3)]

            async def load() -> Unchecked:
                (found,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
                return found

            async with asyncio.timeout(10):
                while (found := await load()).num_total_reqs < 3 or not found.num_running_reqs:
                    pass
            assert found.max_total_num_tokens == 128
            assert (found.num_running_reqs, found.max_running_requests) == (1, 1)
            assert 0 < found.token_usage <= 1
            for call in calls:
                call.cancel()
            await cluster.wait_until_idle()

    asyncio.run(main())


def test_the_tokenizer_comes_as_an_archive() -> None:
    model = replace(load_model(ClusterConfig(model="smollm2-135m")), name="other")

    async def scenario(stub: Unchecked, stack: Stack) -> None:
        stack.frontend.model = model
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        archive = b"".join(chunk.data for chunk in chunks)
        assert len(chunks) > 1
        assert all(len(chunk.data) <= 64 * 1024 for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks if chunk.sha256] == [hashlib.sha256(archive).hexdigest()]
        assert chunks[-1].sha256
        files = zipfile.ZipFile(io.BytesIO(archive))
        read = tokenizers.Tokenizer.from_str(files.read("tokenizer.json").decode())
        assert read.encode("Hello <|im_end|>").ids == model.tokenizer.encode("Hello <|im_end|>")
        config = json.loads(files.read("tokenizer_config.json"))
        assert config["chat_template"] == model.tokenizer.chat_template
        assert config["eos_token"] == "<|im_end|>"
        assert json.loads(files.read("config.json"))["eos_token_id"] == list(model.eos_token_ids)

    run(scenario)


def test_the_tokenizer_is_written_once_however_many_ask_or_hang_up(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = [], threading.Event()

    def write(model: ServedModel) -> bytes:
        begun.append(model)
        assert may_end.wait(10)
        return b"archive"

    async def scenario(stub: Unchecked, _: Stack) -> None:
        calls = [stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=20) for _ in range(3)]
        await eventually(lambda: bool(begun))
        calls[0].cancel()
        await stub.HealthCheck(vllm.HealthCheckRequest())  # the server has heard of it
        may_end.set()
        for call in (*calls[1:], stub.GetTokenizer(common_pb2.GetTokenizerRequest())):
            assert b"".join([chunk.data async for chunk in call]) == b"archive"
        assert len(begun) == 1

    monkeypatch.setattr(vllm_messages, "tokenizer_archive", write)
    run(scenario)


def test_an_archive_of_a_model_without_a_chat_template_has_none() -> None:
    model = replace(tiny_model(), tokenizer=byte_tokenizer(chat_template=None))
    files = zipfile.ZipFile(io.BytesIO(tokenizer_archive(model)))
    assert "chat_template" not in json.loads(files.read("tokenizer_config.json"))
    assert tokenizer_archive(model) == tokenizer_archive(model)


@pytest.mark.model
def test_the_real_model_answers_both_services_alike() -> None:
    async def main() -> None:
        async with embedded_model_served() as served, grpc_channel(served) as channel:
            ours = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
            prompt = await served.frontend.model.encode_chat([{"role": "user", "content": "Name three colours."}])
            sampling = pb.SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)
            call = ours.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling))
            pieces = [piece async for piece in call]
            expected = [token for piece in pieces for token in piece.token_ids]
            logprobs = [entry for piece in pieces for entry in piece.logprobs]
            for stream in (False, True):
                params = vllm.SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)
                responses = await answer(
                    stub_of(channel),
                    vllm.GenerateRequest(
                        tokenized=vllm.TokenizedInput(input_ids=prompt), sampling_params=params, stream=stream
                    ),
                )
                *chunks, last = responses
                assert list(last.complete.output_ids) == expected
                assert last.complete.completion_tokens == pieces[-1].completion.usage.completion_tokens
                parts = [each.chunk.output_logprobs for each in chunks] or [last.complete.output_logprobs]
                assert [token for part in parts for token in part.token_ids] == expected
                assert [value for part in parts for value in part.token_logprobs] == pytest.approx(
                    [entry.logprob for entry in logprobs], abs=1e-3
                )
                assert [list(top.token_ids) for part in parts for top in part.top_logprobs] == [
                    [alternative.token_id for alternative in entry.top] for entry in logprobs
                ]

    asyncio.run(main())
