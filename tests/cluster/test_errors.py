"""The table of errors: API.md's rows, in both protocols."""

from __future__ import annotations

import grpc
import pytest

from kvorum.cluster.errors import (
    AbortedError,
    UnimplementedError,
    grpc_status_of,
    http_error_body,
    retry_after_s,
    status_of,
)
from kvorum.kvstore.errors import (
    AuthenticationError,
    CapacityError,
    CheckpointError,
    ContextLengthError,
    DeadlineError,
    EngineLostError,
    InvalidRequestError,
    KvorumError,
    ModelNotFoundError,
    NeverFitsError,
    PermissionDeniedError,
)

ROWS: list[tuple[KvorumError, int, str, grpc.StatusCode]] = [
    (InvalidRequestError("x", param="p"), 400, "invalid_value", grpc.StatusCode.INVALID_ARGUMENT),
    (ContextLengthError("x"), 400, "context_length_exceeded", grpc.StatusCode.INVALID_ARGUMENT),
    (NeverFitsError("x"), 400, "kv_never_fits", grpc.StatusCode.INVALID_ARGUMENT),
    (AuthenticationError("x"), 401, "invalid_api_key", grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDeniedError("x"), 403, "permission_denied", grpc.StatusCode.PERMISSION_DENIED),
    (ModelNotFoundError("x"), 404, "model_not_found", grpc.StatusCode.NOT_FOUND),
    (CapacityError("x", retry_after_s=1.2), 503, "kv_capacity_exhausted", grpc.StatusCode.UNAVAILABLE),
    (EngineLostError("x"), 503, "engine_lost", grpc.StatusCode.UNAVAILABLE),
    (DeadlineError("x"), 504, "timeout", grpc.StatusCode.DEADLINE_EXCEEDED),
    (AbortedError("x"), 499, "aborted", grpc.StatusCode.CANCELLED),
    (UnimplementedError("x"), 501, "unimplemented", grpc.StatusCode.UNIMPLEMENTED),
    (CheckpointError("x"), 500, "internal_error", grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "http", "code", "grpc_code"), ROWS, ids=lambda value: type(value).__name__)
def test_each_error_has_one_status_in_each_protocol(
    error: KvorumError, http: int, code: str, grpc_code: grpc.StatusCode
) -> None:
    assert (status_of(error).http, status_of(error).code, status_of(error).grpc) == (http, code, grpc_code)
    body = http_error_body(error)["error"]
    assert isinstance(body, dict)
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == code
    status = grpc_status_of(error)
    assert (status.code, status.details) == (grpc_code, "x")


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    assert retry_after_s(CapacityError("x", retry_after_s=0.1)) == 1
    assert retry_after_s(CapacityError("x", retry_after_s=1.2)) == 2
    assert retry_after_s(DeadlineError("x")) is None
