"""The gateways' service behind Ray Serve, which calls methods by the last part of an RPC's path alone."""

from __future__ import annotations

import io
import zipfile

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (  # type: ignore[import-untyped]  # has no types
    ProtoReflectionDescriptorDatabase,
)
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc
from kvtest.cluster import METADATA, VISITOR_KEY, ClusterUnderTest
from kvtest.servers import Unchecked, details_of

pytestmark = pytest.mark.ray


def stub_of(cluster: ClusterUnderTest) -> Unchecked:
    return VllmEngineStub(cluster.channel)  # type: ignore[no-untyped-call]  # generated code


def request(*, max_tokens: int = 4, **fields: Unchecked) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        text="Hello world", sampling_params=vllm.SamplingParams(max_tokens=max_tokens), **fields
    )


def test_both_services_answer_on_one_port(cluster: ClusterUnderTest) -> None:
    ours = pb_grpc.InferenceServiceStub(cluster.channel)  # type: ignore[no-untyped-call]  # generated code
    message = pb.GenerateRequest(text="Hello world", sampling=pb.SamplingParams(max_tokens=4))
    expected = [token for piece in ours.Generate(message, metadata=METADATA) for token in piece.token_ids]
    (whole,) = stub_of(cluster).Generate(request(), metadata=METADATA)
    assert (list(whole.complete.output_ids), whole.complete.finish_reason) == (expected, "length")
    *chunks, last = stub_of(cluster).Generate(request(stream=True), metadata=METADATA)
    assert [token for each in chunks for token in each.chunk.token_ids] == expected
    assert last == whole


def test_the_service_can_be_found_by_reflection(cluster: ClusterUnderTest) -> None:
    pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(cluster.channel))
    found = pool.FindServiceByName("vllm.grpc.engine.VllmEngine")
    assert set(found.methods_by_name) == set(vllm.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name)


def test_abort_is_the_gateways_own(cluster: ClusterUnderTest) -> None:
    stub = stub_of(cluster)
    call = stub.Generate(request(max_tokens=800, stream=True, request_id="theirs"), metadata=METADATA)
    next(call)
    assert stub.Abort(vllm.AbortRequest(request_ids=["theirs"]), metadata=METADATA) == vllm.AbortResponse()
    with pytest.raises(grpc.RpcError) as ended:
        list(call)
    assert ended.value.code() is grpc.StatusCode.CANCELLED
    cluster.wait_until_idle()


def test_a_gateway_learns_what_it_must(cluster: ClusterUnderTest) -> None:
    stub = stub_of(cluster)
    assert stub.HealthCheck(vllm.HealthCheckRequest()).healthy
    model = stub.GetModelInfo(vllm.GetModelInfoRequest(), metadata=METADATA)
    assert (model.served_model_name, model.max_context_length) == ("smollm2-135m", 8192)
    assert stub.GetServerInfo(vllm.GetServerInfoRequest(), metadata=METADATA).max_num_seqs == 16
    (load,) = stub.GetLoads(vllm.GetLoadsRequest(), metadata=METADATA).loads
    assert load.max_total_num_tokens == 256 * 16
    chunks = list(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), metadata=METADATA))
    archive = zipfile.ZipFile(io.BytesIO(b"".join(chunk.data for chunk in chunks)))
    assert "tokenizer.json" in archive.namelist()


def test_refusals_keep_their_details(cluster: ClusterUnderTest) -> None:
    stub = stub_of(cluster)
    visitor = [("authorization", f"Bearer {VISITOR_KEY}")]
    bad = vllm.GenerateRequest(text="x", sampling_params=vllm.SamplingParams(grammar="root ::= 'a'"))
    for call, code, reason in (
        (lambda: list(stub.Generate(bad, metadata=METADATA)), "INVALID_ARGUMENT", "INVALID_VALUE"),
        (lambda: stub.GetLoads(vllm.GetLoadsRequest(), metadata=visitor), "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (
            lambda: list(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=METADATA)),
            "UNIMPLEMENTED",
            "UNIMPLEMENTED",
        ),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is getattr(grpc.StatusCode, code)
        assert details_of(refused.value)["ErrorInfo"].reason == reason
