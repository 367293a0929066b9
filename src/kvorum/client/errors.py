"""The errors of the client, made of a gRPC status and its google.rpc details.

ClientError                  (code, status, param, retry_after_s)
├── InvalidRequestError      a field is wrong; param names it
├── AuthenticationError      no key or a wrong one
├── PermissionDeniedError    a key that may not do this
├── NotFoundError            no such model, or no such request to abort
├── QuotaError               the tenant has all that it may have; retry_after_s says for how long
├── UnavailableError         the cluster is full, has no engine, or is not to be reached
│   └── BrokenStreamError    an answer stopped in its middle and cannot be continued exactly
├── DeadlineError            the call took longer than it may
└── AbortedError             the request was ended by `abort`, or by a router that is shutting down
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # has no types

_DETAILS_KEY = "grpc-status-details-bin"


class ClientError(Exception):
    """Root of what the client raises.

    code: what a program looks at, as in the HTTP API (`kv_quota_exceeded`). status: of the gRPC call. param: the field
    that is wrong. retry_after_s: when the server would have the client come back.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: grpc.StatusCode,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequestError(ClientError):
    """A field of the request has a value that cannot be served."""


class AuthenticationError(ClientError):
    """No API key, or an unknown one."""


class PermissionDeniedError(ClientError):
    """The API key may not do this."""


class NotFoundError(ClientError):
    """No such model is served here, or no such request runs."""


class QuotaError(ClientError):
    """The tenant is over its rate, its concurrency or its KV ceiling."""


class UnavailableError(ClientError):
    """Nobody could serve the request now."""


class BrokenStreamError(UnavailableError):
    """An answer stopped in its middle; what had come of it is all there is."""


class DeadlineError(ClientError):
    """The call took longer than it may."""


class AbortedError(ClientError):
    """Somebody ended the request."""


_KINDS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QuotaError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: AbortedError,
}


def error_of(failed: grpc.RpcError, *, target: str) -> ClientError:
    """Read the error of a failed call to `target`."""
    status, text = failed.code(), failed.details() or ""
    trailers = cast("Iterable[tuple[str, bytes]]", failed.trailing_metadata() or ())
    packed = [value for key, value in trailers if key == _DETAILS_KEY]
    details = status_pb2.Status.FromString(b"".join(packed)).details
    info, retry, bad = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.BadRequest(),
    )
    has_info, has_retry, _ = (_unpack(details, each) for each in (info, retry, bad))
    if status is grpc.StatusCode.UNAVAILABLE and not has_info:  # gRPC's own, of a connection
        text = f"no server answers at {target}: {text}"
    return _KINDS.get(status, ClientError)(
        text,
        code=(info.reason if has_info else status.name).lower(),
        status=status,
        param=next((violation.field for violation in bad.field_violations), None),
        retry_after_s=retry.retry_delay.ToMilliseconds() / 1e3 if has_retry else None,
    )


def invalid(message: str, *, param: str | None = None) -> InvalidRequestError:
    """Return the error of a request that need not be sent to be refused."""
    return InvalidRequestError(message, code="invalid_value", status=grpc.StatusCode.INVALID_ARGUMENT, param=param)


def _unpack(details: list[Message], into: Message) -> bool:
    """Fill `into` with the detail of its type; say whether there is one."""
    return any(detail.Unpack(into) for detail in details)  # type: ignore[attr-defined]  # Any's
