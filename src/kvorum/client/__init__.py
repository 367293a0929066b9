"""A typed client of kvorum's gRPC API, blocking and asyncio.

It brings nothing along but grpc and protobuf, so that a program that asks a cluster needs no Ray, torch or pydantic.

    with Client("127.0.0.1:9000", api_key="...") as client:
        print(client.chat("What is a KV cache?", Options(max_tokens=64)).text)
"""

from kvorum.client.aio import AsyncClient
from kvorum.client.blocking import Client
from kvorum.client.errors import (
    AbortedError,
    AuthenticationError,
    BrokenStreamError,
    ClientError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    QuotaError,
    UnavailableError,
)
from kvorum.client.retrying import RetryPolicy
from kvorum.client.types import Answer, Completion, Message, Model, Options, Piece, Receipt, TokenLogprobs

__all__ = [
    "AbortedError",
    "Answer",
    "AsyncClient",
    "AuthenticationError",
    "BrokenStreamError",
    "Client",
    "ClientError",
    "Completion",
    "DeadlineError",
    "InvalidRequestError",
    "Message",
    "Model",
    "NotFoundError",
    "Options",
    "PermissionDeniedError",
    "Piece",
    "QuotaError",
    "Receipt",
    "RetryPolicy",
    "TokenLogprobs",
    "UnavailableError",
]
