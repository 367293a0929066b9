"""A gRPC client of a running cluster, for the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from kvorum.cluster.config import budget_from_number
from kvorum.kvstore.errors import InvalidRequestError, KvorumError
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc

_CONNECT_TIMEOUT_S = 10.0


class CallError(KvorumError):
    """The server refused or could not be reached."""


@dataclass(frozen=True, slots=True)
class Options:
    """What may be said about an answer; None leaves it to the server."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    policy: str | None = None
    kv_budget: float | None = None
    min_retained_mass: float | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an answer; the last piece has the receipt and the usage."""

    text: str
    num_tokens: int
    receipt: dict[str, object] | None = None
    prompt_tokens: int = 0


class Client:
    """One connection to a router."""

    def __init__(self, channel: grpc.Channel, *, api_key: str | None) -> None:
        self._stub = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []

    def chat(self, content: str, options: Options) -> Iterator[Piece]:
        """Ask as a user and stream the answer."""
        request = _request(options)
        request.chat.messages.add(role="user", content=content)
        return self._generate(request)

    def complete(self, text: str, options: Options) -> Iterator[Piece]:
        """Stream how a text goes on."""
        request = _request(options)
        request.text = text
        return self._generate(request)

    def _generate(self, request: pb.GenerateRequest) -> Iterator[Piece]:
        call = self._stub.Generate(request, metadata=self._metadata)
        try:
            for response in call:
                yield _piece(response)
        except grpc.RpcError as error:
            raise CallError(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()


@contextlib.contextmanager
def connected(target: str, *, api_key: str | None) -> Iterator[Client]:
    """Connect to a router's gRPC target, host:port."""
    with grpc.insecure_channel(target) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            raise CallError(f"no server answers at {target}") from None
        yield Client(channel, api_key=api_key)


def _request(options: Options) -> pb.GenerateRequest:
    budget = budget_from_number(options.kv_budget)
    try:
        return pb.GenerateRequest(
            model=options.model,
            sampling=pb.SamplingParams(
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                top_p=options.top_p,
                seed=options.seed,
            ),
            stop=options.stop,
            kvorum=pb.KVParams(
                policy=options.policy,
                kv_budget_fraction=budget if isinstance(budget, float) else None,
                kv_budget_tokens=budget if isinstance(budget, int) else None,
                min_retained_mass=options.min_retained_mass,
            ),
        )
    except ValueError as error:
        raise InvalidRequestError(f"a number is out of range: {error}") from error


def _piece(response: pb.GenerateResponse) -> Piece:
    if not response.HasField("completion"):
        return Piece(response.text, len(response.token_ids))
    receipt = response.completion.receipt
    fields = {
        field.name: getattr(receipt, field.name)
        for field in receipt.DESCRIPTOR.fields
        if not field.has_presence or receipt.HasField(field.name)
    }
    prompt_tokens = response.completion.usage.prompt_tokens
    return Piece(response.text, len(response.token_ids), receipt=fields, prompt_tokens=prompt_tokens)
