"""Which HTTP and gRPC status each error is, in one table, and how it is written in either protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # has no types
from grpc_status import rpc_status  # type: ignore[import-untyped]  # has no types

from kvorum.cluster.manager.channel import ManagerLostError
from kvorum.kvstore.errors import (
    AuthenticationError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
    EngineLostError,
    InvalidRequestError,
    KvorumError,
    ModelNotFoundError,
    NeverFitsError,
    PermissionDeniedError,
    QuotaError,
    RateLimitError,
)

ERROR_DOMAIN = "kvorum"


class AbortedError(KvorumError):
    """The request was ended by an Abort call or by an engine that is shutting down."""


class UnimplementedError(KvorumError):
    """An RPC of a service that others defined, which a cluster does not have."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """One row of the table. type: the error's family in OpenAI's words; code: what a program looks at."""

    http: int
    type: str
    code: str
    grpc: grpc.StatusCode


_INTERNAL = ErrorStatus(500, "server_error", "internal_error", grpc.StatusCode.INTERNAL)

_TABLE: dict[type[KvorumError], ErrorStatus] = {
    InvalidRequestError: ErrorStatus(
        400, "invalid_request_error", InvalidRequestError.code, grpc.StatusCode.INVALID_ARGUMENT
    ),
    ContextLengthError: ErrorStatus(
        400, "invalid_request_error", ContextLengthError.code, grpc.StatusCode.INVALID_ARGUMENT
    ),
    NeverFitsError: ErrorStatus(400, "invalid_request_error", NeverFitsError.code, grpc.StatusCode.INVALID_ARGUMENT),
    AuthenticationError: ErrorStatus(401, "authentication_error", "invalid_api_key", grpc.StatusCode.UNAUTHENTICATED),
    PermissionDeniedError: ErrorStatus(403, "permission_error", "permission_denied", grpc.StatusCode.PERMISSION_DENIED),
    ModelNotFoundError: ErrorStatus(404, "invalid_request_error", "model_not_found", grpc.StatusCode.NOT_FOUND),
    CapacityError: ErrorStatus(503, "server_error", "kv_capacity_exhausted", grpc.StatusCode.UNAVAILABLE),
    QuotaError: ErrorStatus(429, "rate_limit_error", "kv_quota_exceeded", grpc.StatusCode.RESOURCE_EXHAUSTED),
    RateLimitError: ErrorStatus(429, "rate_limit_error", "rate_limit_exceeded", grpc.StatusCode.RESOURCE_EXHAUSTED),
    EngineLostError: ErrorStatus(503, "server_error", "engine_lost", grpc.StatusCode.UNAVAILABLE),
    ManagerLostError: ErrorStatus(503, "server_error", "manager_lost", grpc.StatusCode.UNAVAILABLE),
    DeadlineError: ErrorStatus(504, "server_error", "timeout", grpc.StatusCode.DEADLINE_EXCEEDED),
    AbortedError: ErrorStatus(499, "server_error", "aborted", grpc.StatusCode.CANCELLED),
    UnimplementedError: ErrorStatus(501, "server_error", "unimplemented", grpc.StatusCode.UNIMPLEMENTED),
}


def status_of(error: KvorumError) -> ErrorStatus:
    """Look an error up; one without a row of its own is an internal error."""
    return _TABLE.get(type(error), _INTERNAL)


def retry_after_s(error: KvorumError) -> int | None:
    """Return the whole seconds after which trying again makes sense."""
    return max(1, math.ceil(error.retry_after_s)) if isinstance(error, CapacityError) else None


def param_of(error: KvorumError) -> str | None:
    """Return the field that is wrong, if one is."""
    return error.param if isinstance(error, InvalidRequestError) else None


def http_error_body(error: KvorumError) -> dict[str, object]:
    """Write an error as OpenAI clients read it."""
    status = status_of(error)
    return {"error": {"message": str(error), "type": status.type, "param": param_of(error), "code": status.code}}


class UnforeseenError(KvorumError):
    """Stands for an exception nobody foresaw; what that one says stays in the log."""

    def __init__(self) -> None:
        super().__init__("internal error, see the server's log")


def grpc_status_of(error: KvorumError) -> grpc.Status:
    """Write an error as a gRPC status with google.rpc details."""
    status = status_of(error)
    details = [_pack(error_details_pb2.ErrorInfo(reason=status.code.upper(), domain=ERROR_DOMAIN))]
    if param := param_of(error):
        violation = error_details_pb2.BadRequest.FieldViolation(field=param, description=str(error))
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, CapacityError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if isinstance(error, (QuotaError, RateLimitError)):
        quota = error_details_pb2.QuotaFailure.Violation(subject="tenant", description=str(error))
        details.append(_pack(error_details_pb2.QuotaFailure(violations=[quota])))
    message = status_pb2.Status(code=status.grpc.value[0], message=str(error), details=details)
    converted: grpc.Status = rpc_status.to_status(message)
    return converted


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
