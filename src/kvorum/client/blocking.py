"""The blocking client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from kvorum.client.channels import CHANNEL_OPTIONS, metadata_of
from kvorum.client.errors import error_of
from kvorum.client.messages import (
    Messages,
    Prompt,
    answer_of,
    chat_request,
    completion_request,
    tokenize_request,
)
from kvorum.client.retrying import RetryPolicy
from kvorum.client.running import Attempts, Running
from kvorum.client.types import Answer, Model, Options, Piece
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc

_DEFAULTS = Options()
_RETRY = RetryPolicy()


class Client:
    """A connection to a cluster; usable from several threads.

    timeout_s, of each method: for all tries together; None waits as long as the server does.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        retry: RetryPolicy = _RETRY,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Connect to a router's gRPC port, host:port; credentials: for TLS."""
        self._target = target
        self._retry = retry
        self._metadata = metadata_of(api_key)
        self._channel = (
            grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
            if credentials
            else grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        )
        self._stub = pb_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; what still runs is cancelled."""
        self._channel.close()

    def chat(self, messages: Messages, options: Options = _DEFAULTS, *, timeout_s: float | None = None) -> Answer:
        """Answer a conversation; a string is what a user says."""
        with self.stream_chat(messages, options, timeout_s=timeout_s) as pieces:
            return answer_of(list(pieces))

    def complete(self, prompt: Prompt, options: Options = _DEFAULTS, *, timeout_s: float | None = None) -> Answer:
        """Continue a text or token ids."""
        with self.stream_complete(prompt, options, timeout_s=timeout_s) as pieces:
            return answer_of(list(pieces))

    def stream_chat(
        self, messages: Messages, options: Options = _DEFAULTS, *, timeout_s: float | None = None
    ) -> contextlib.closing[Generator[Piece]]:
        """Answer a conversation piece by piece; leaving the context ends the request."""
        return self._stream(chat_request(messages, options), timeout_s)

    def stream_complete(
        self, prompt: Prompt, options: Options = _DEFAULTS, *, timeout_s: float | None = None
    ) -> contextlib.closing[Generator[Piece]]:
        """Continue a text or token ids piece by piece; leaving the context ends the request."""
        return self._stream(completion_request(prompt, options), timeout_s)

    def tokenize(self, prompt: Messages, *, model: str = "", timeout_s: float | None = None) -> tuple[int, ...]:
        """Return the token ids of a text, or of a conversation as the model is asked it."""
        response: pb.TokenizeResponse = self._ask(self._stub.Tokenize, tokenize_request(prompt, model=model), timeout_s)
        return tuple(response.token_ids)

    def models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """Return what is served."""
        response: pb.ListModelsResponse = self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout_s)
        return tuple(Model(model.id, model.max_model_len) for model in response.models)

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """End the request that its Options, or its pieces, name so; it must run on the router that is asked."""
        self._ask(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout_s)

    def _ask(self, method: Callable[..., Any], request: Message, timeout_s: float | None) -> Any:  # noqa: ANN401  # a response
        attempts = Attempts(self._retry, timeout_s=timeout_s)
        while True:
            try:
                return method(request, metadata=self._metadata, timeout=attempts.remaining_s)
            except grpc.RpcError as failed:
                wait_s = attempts.wait_after_s(error_of(failed, target=self._target))
            time.sleep(wait_s)

    def _stream(self, request: pb.GenerateRequest, timeout_s: float | None) -> contextlib.closing[Generator[Piece]]:
        return contextlib.closing(self._pieces(Running(request, Attempts(self._retry, timeout_s=timeout_s))))

    def _pieces(self, running: Running) -> Generator[Piece]:
        while True:
            try:
                yield from self._one_call(running)
            except grpc.RpcError as failed:
                if running.is_over:
                    return
                wait_s = running.wait_after_s(error_of(failed, target=self._target))
            else:
                running.check_over()
                return
            time.sleep(wait_s)

    def _one_call(self, running: Running) -> Generator[Piece]:
        remaining_s = running.attempts.remaining_s
        call = self._stub.Generate(running.next_request(), metadata=self._metadata, timeout=remaining_s)
        try:
            for response in call:
                yield running.take(response)
        finally:
            call.cancel()
