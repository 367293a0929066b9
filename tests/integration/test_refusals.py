"""Errors and garbage against a real cluster, in both protocols."""

from __future__ import annotations

import grpc
import pytest

from kvorum.cluster.config import MAX_REQUEST_BYTES
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc
from kvtest.cluster import METADATA, ClusterUnderTest
from kvtest.garbage import BAD_BODIES, BAD_CALLS
from kvtest.servers import Unchecked, details_of

pytestmark = pytest.mark.ray


def stub_of(cluster: ClusterUnderTest) -> Unchecked:
    return pb_grpc.InferenceServiceStub(cluster.channel)  # type: ignore[no-untyped-call]  # generated code


def refusal(cluster: ClusterUnderTest, request: pb.GenerateRequest, **call: Unchecked) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub_of(cluster).Generate(request, **({"metadata": METADATA} | call)))
    return caught.value


def test_garbage_over_http_gets_a_clean_400(cluster: ClusterUnderTest) -> None:
    for bad in BAD_BODIES:
        response = cluster.http.post("/v1/completions", content=bad.body)
        assert response.status_code == 400, (bad.name, response.text)
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (bad.param, bad.code), (bad.name, error)
    assert cluster.completion().status_code == 200


def test_garbage_over_grpc_gets_a_clean_invalid_argument(cluster: ClusterUnderTest) -> None:
    for bad in BAD_CALLS:
        error: Unchecked = refusal(cluster, bad.request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, (bad.name, error)
        fields = [violation.field for violation in details_of(error)["BadRequest"].field_violations]
        assert fields == [bad.param], (bad.name, error.details())
    answered = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=4))
    assert list(stub_of(cluster).Generate(answered, metadata=METADATA))


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
def test_no_key_or_a_wrong_one(cluster: ClusterUnderTest, headers: dict[str, str]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = cluster.http.post(path, json={}, headers={"Authorization": ""} | headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    metadata = [(name.lower(), value) for name, value in headers.items()]
    error: Unchecked = refusal(cluster, pb.GenerateRequest(text="x"), metadata=metadata)
    assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    assert details_of(error)["ErrorInfo"].reason == "INVALID_API_KEY"


def test_a_message_without_end_is_not_read_whoever_sends_it(cluster: ClusterUnderTest) -> None:
    error: Unchecked = refusal(cluster, pb.GenerateRequest(text="x" * MAX_REQUEST_BYTES), metadata=[])
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert cluster.completion().status_code == 200


def test_an_unknown_model(cluster: ClusterUnderTest) -> None:
    response = cluster.completion(model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    error: Unchecked = refusal(cluster, pb.GenerateRequest(text="x", model="other"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_what_can_never_fit_is_refused_and_fits_with_a_budget(cluster: ClusterUnderTest) -> None:
    large = {"max_tokens": 5000}
    response = cluster.completion(**large)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "kv_never_fits")
    sampling = pb.SamplingParams(max_tokens=5000)
    error: Unchecked = refusal(cluster, pb.GenerateRequest(text="Hello", sampling=sampling))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details_of(error)["ErrorInfo"].reason == "KV_NEVER_FITS"
    kvorum = pb.KVParams(policy="h2o", kv_budget_tokens=64)
    call = stub_of(cluster).Generate(
        pb.GenerateRequest(text="Hello", sampling=sampling, kvorum=kvorum), metadata=METADATA
    )
    assert next(call).token_ids
    call.cancel()
    cluster.wait_until_idle()


def test_a_receipt_shows_what_was_evicted(cluster: ClusterUnderTest) -> None:
    body = cluster.completion(max_tokens=200, kvorum={"policy": "h2o", "kv_budget": 32}).json()
    receipt = body["kvorum"]
    assert (receipt["policy"], receipt["kv_budget"]) == ("h2o", 32)
    assert receipt["kv_tokens_held"] <= 33
    assert receipt["kv_tokens_held"] + receipt["kv_tokens_evicted"] == 201
    assert receipt["retained_mass"] < 1
