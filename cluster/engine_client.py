"""The router's end of the router-engine stream: all of its requests to one engine over one gRPC call.

A request's way through it:
 1. `submit` puts a Submit command for each sequence into the stream and returns a RequestStream at once.
 2. Each StepOutputs message is dealt out to the RequestStreams it concerns; a Rejection raises its error there.
 3. A RequestStream that is closed before its end sends Abort; what still arrives for it is dropped.
 4. When the stream breaks or falls silent, every open RequestStream raises EngineLostError, and the client connects
    anew, asking for the engine's address again: a restarted engine listens elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvorum.cluster.cancelling import end_if_cancelled
from kvorum.cluster.engine_status import EngineStatus
from kvorum.kvstore.errors import EngineLostError, KvorumError
from kvorum.protos.engine.v1 import engine_pb2 as pb
from kvorum.protos.engine.v1 import engine_pb2_grpc as pb_grpc
from kvorum.workers.looking import SequenceLook, SequenceRow
from kvorum.workers.looking_wire import look_from_pb, rows_from_pb
from kvorum.workers.request import EngineRequest, EngineStats, FinishReason, RequestId, RequestOutput
from kvorum.workers.wire import (
    Abort,
    Command,
    Finish,
    Heartbeat,
    Hello,
    Rejection,
    StepOutputs,
    Submit,
    command_to_pb,
    event_from_pb,
)

logger = logging.getLogger(__name__)

_Call = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class RequestStream:
    """The outputs of the sequences of one request, as they arrive; the owner must `close` it."""

    def __init__(self, client: EngineClient, request_ids: Iterable[RequestId]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._is_lost = False
        self._arrived: asyncio.Queue[RequestOutput | KvorumError] = asyncio.Queue()

    async def next(self) -> RequestOutput:
        """Wait for the next output of any sequence; raise what ended one of them instead of a final output."""
        item = await self._arrived.get()
        if isinstance(item, KvorumError):
            raise item
        return item

    def finish(self, request_id: RequestId) -> None:
        """Say that a stop string was seen in a sequence; its final output follows."""
        self._client.send(Finish(request_id))

    def abort(self) -> None:
        """Ask for the end of all sequences; their final outputs follow."""
        for request_id in self._open:
            self._client.send(Abort(request_id))

    @property
    def has_ended(self) -> bool:
        """Whether the engine said of every sequence that it is over."""
        return not self._open and not self._is_lost

    def close(self) -> None:
        """Stop listening; abort the sequences that are not over."""
        self.abort()
        for request_id in self._open:
            self._client.forget(request_id)
        self._open.clear()

    def deliver(self, request_id: RequestId, item: RequestOutput | KvorumError) -> None:
        """Hand on what arrived; for the client only."""
        if is_last(item):
            self._open.discard(request_id)
        self._is_lost |= isinstance(item, EngineLostError)
        self._arrived.put_nowait(item)


def is_last(item: RequestOutput | KvorumError) -> bool:
    """Say whether nothing can follow for the sequence."""
    return isinstance(item, KvorumError) or item.finish_reason is not None


def _tells_of_loss(item: RequestOutput | KvorumError) -> bool:
    """Say whether the engine can serve nothing any more; its heartbeats will say so too, but later."""
    if isinstance(item, KvorumError):
        return isinstance(item, EngineLostError)
    return item.finish_reason is FinishReason.ERROR


class EngineClient:
    """Keeps one stream to one engine open, for as long as `run` runs.

    resolve_address: returns the engine's host:port, or raises while it has none yet. silence_timeout_s: how long the
    engine may say nothing, not even a heartbeat, before it counts as lost.
    """

    def __init__(
        self,
        resolve_address: Callable[[], Awaitable[str]],
        *,
        silence_timeout_s: float = 5.0,
        retry_interval_s: float = 0.2,
    ) -> None:
        self._resolve_address = resolve_address
        self._silence_timeout_s = silence_timeout_s
        self._retry_interval_s = retry_interval_s
        self._streams: dict[RequestId, RequestStream] = {}
        self._outbox: asyncio.Queue[Command] = asyncio.Queue()
        self._has_failed = False
        self._stub: pb_grpc.EngineServiceStub | None = None
        self.status: EngineStatus | None = None

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        last_reason = ""
        while True:
            try:
                await self._serve_connection(await self._resolve_address())
            except (TimeoutError, grpc.RpcError, OSError, EngineLostError) as error:
                if (reason := str(error) or repr(error)) != last_reason:
                    logger.info("no engine: %s", reason)
                    last_reason = reason
            finally:
                self._lose_streams()
            end_if_cancelled()
            await asyncio.sleep(self._retry_interval_s)

    def submit(self, requests: Sequence[EngineRequest]) -> RequestStream:
        """Send the sequences of one request to the engine."""
        if self.status is None:
            raise EngineLostError("the engine is not connected")
        stream = RequestStream(self, [request.request_id for request in requests])
        for request in requests:
            assert request.request_id not in self._streams
            self._streams[request.request_id] = stream
            self.send(Submit(request))
        return stream

    async def sequences(self) -> tuple[SequenceRow, ...]:
        """Ask the engine for its sequences, of all routers; raises EngineLostError."""
        return rows_from_pb(await self._ask("ListSequences", pb.ListSequencesRequest()))

    async def look(self, request_id: RequestId, *, layer: int, kv_head: int) -> SequenceLook | None:
        """Ask the engine for a look at a sequence; None when it is not there. Raises EngineLostError."""
        request = pb.LookAtSequenceRequest(request_id=request_id, layer=layer, kv_head=kv_head)
        return look_from_pb(await self._ask("LookAtSequence", request))

    async def _ask(self, method: str, request: Message) -> Any:  # noqa: ANN401  # the method's response
        if self._stub is None:
            raise EngineLostError("the engine is not connected")
        try:
            return await getattr(self._stub, method)(request, timeout=self._silence_timeout_s)
        except grpc.RpcError as error:
            raise EngineLostError(f"the engine does not answer: {error}") from error
        except asyncio.CancelledError:
            end_if_cancelled()
            raise EngineLostError("the engine was lost while it was asked") from None  # its channel was closed

    def send(self, command: Command) -> None:
        """Queue a command; without a connection it goes nowhere, since the engine has dropped the session."""
        self._outbox.put_nowait(command)

    def forget(self, request_id: RequestId) -> None:
        """Drop whatever else arrives for a request."""
        self._streams.pop(request_id, None)

    async def _serve_connection(self, address: str) -> None:
        self._outbox = asyncio.Queue()
        async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
            self._stub = pb_grpc.EngineServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
            call = self._stub.Session()
            # Not a request iterator: gRPC would leave its task pending when the call ends.
            writing = asyncio.create_task(_write_all(call, self._outbox))
            try:
                while True:
                    async with asyncio.timeout(self._silence_timeout_s):
                        message = await call.read()
                    if message is grpc.aio.EOF:
                        return
                    self._take(message)
            finally:
                self._stub = None
                writing.cancel()
                call.cancel()
                await asyncio.wait({writing})

    def _take(self, message: pb.SessionResponse) -> None:
        match event_from_pb(message):
            case Hello(info, stats):
                logger.info("connected to engine %s", info.engine_id)
                self.status = EngineStatus(info, stats)
                self._has_failed = False
            case StepOutputs(outputs, stats):
                self._update_status(stats, healthy=None)
                for output in outputs:
                    self._deliver(output.request_id, output)
            case Rejection(request_id, error):
                self._deliver(request_id, error)
            case Heartbeat(stats, healthy):
                self._update_status(stats, healthy=healthy)

    def _update_status(self, stats: EngineStats, *, healthy: bool | None) -> None:
        if self.status:
            is_healthy = self.status.healthy if healthy is None else healthy
            # Its heartbeats may not know yet.
            self.status = EngineStatus(self.status.info, stats, is_healthy and not self._has_failed)

    def _deliver(self, request_id: RequestId, item: RequestOutput | KvorumError) -> None:
        if self.status and _tells_of_loss(item):
            self._has_failed = True
            self._update_status(self.status.stats, healthy=False)
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if is_last(item):
            self.forget(request_id)
        stream.deliver(request_id, item)

    def _lose_streams(self) -> None:
        lost_id = self.status.info.engine_id if self.status else "?"
        self.status = None
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.deliver(request_id, EngineLostError(f"engine {lost_id} was lost while it served the request"))


async def _write_all(call: _Call, outbox: asyncio.Queue[Command]) -> None:
    # A broken stream is seen, and answered, by whoever reads it.
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
        while True:
            await call.write(command_to_pb(await outbox.get()))
