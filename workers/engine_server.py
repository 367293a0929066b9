"""The engine's end of the router-engine stream: one gRPC session for each connected router.

A request's way through it:
 1. A router opens `Session` and hears Hello: what the engine is and how full it is.
 2. Each Submit goes straight to the engine's session; what the engine refuses comes back as a Rejection.
 3. After each step that brought this router something, one StepOutputs message leaves with all of it.
 4. Abort and Finish go to the engine's session; the request's final output follows in the next step's message.
 5. When the stream ends, for whatever reason, the engine's session is closed, which aborts all of its requests.
Heartbeats fill the silence, so that a router can tell an idle engine from a stuck one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
import grpc.aio

from kvorum.kvstore.errors import EngineLostError, KvorumError
from kvorum.protos.engine.v1 import engine_pb2 as pb
from kvorum.protos.engine.v1 import engine_pb2_grpc as pb_grpc
from kvorum.workers.governance import Directive, EngineReport, LeaseUse
from kvorum.workers.looking import SequenceLook, SequenceRow
from kvorum.workers.looking_wire import look_to_pb, rows_to_pb
from kvorum.workers.request import EngineInfo, EngineRequest, EngineStats, RequestId, RequestOutput
from kvorum.workers.wire import (
    Abort,
    Command,
    Event,
    Finish,
    Heartbeat,
    Hello,
    Rejection,
    StepOutputs,
    Submit,
    command_from_pb,
    event_to_pb,
)

logger = logging.getLogger(__name__)

# A prompt of any length fits: requests are bounded by max_model_len, not by the size of a message.
STREAM_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)


class EngineSession(Protocol):
    """One router's requests in an engine."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; raise InvalidRequestError, its children or CapacityError when it cannot be taken."""

    def abort(self, request_id: RequestId) -> None:
        """End a request whose client went away; its final output (ABORT) follows."""

    def finish(self, request_id: RequestId) -> None:
        """End a request in whose text the router saw a stop string; its final output (STOP) follows."""

    async def outputs(self) -> list[RequestOutput]:
        """Wait for a step that brings this session something and return all of it."""
        ...

    def close(self) -> None:
        """Abort all requests of the session."""


class Engine(Protocol):
    """What serves sequences: the real engine or a fake one."""

    info: EngineInfo

    def stats(self) -> EngineStats:
        """Look at the engine between two steps."""
        ...

    def open_session(self) -> EngineSession:
        """Start a session for one router."""
        ...

    async def start(self) -> None:
        """Load the model and begin to step."""

    async def stop(self) -> None:
        """Stop stepping and let go of the ranks."""

    async def rebuild(self) -> Engine:
        """Return a fresh engine on what is left of this one, which is over; raise when that cannot be."""
        ...

    async def check_health(self) -> None:
        """Raise when a rank is dead."""

    # For operators.

    def sequences(self) -> tuple[SequenceRow, ...]:
        """Return the sequences that are here, at a glance."""
        ...

    async def look(self, request_id: RequestId, *, layer: int, kv_head: int) -> SequenceLook | None:
        """Look at one sequence between two steps; None when it is not here."""
        ...

    # For the cache manager.

    @property
    def directive_done(self) -> int:
        """Number of the last directive that has been carried out."""
        ...

    def report(self) -> EngineReport:
        """Look at the pool between two steps."""
        ...

    def leases(self) -> tuple[LeaseUse, ...]:
        """Return the leases whose sequences are here."""
        ...

    def take_lease_changes(self) -> tuple[tuple[LeaseUse, ...], tuple[str, ...]]:
        """Return the leases that came, and the ids of those that are over, since the last call."""
        ...

    def obey(self, directive: Directive) -> None:
        """Carry a directive out before the next step."""


class EngineServer:
    """Serves an engine's sessions on a port of its own until stopped."""

    def __init__(self, engine: Engine, *, heartbeat_interval_s: float = 0.5, health_timeout_s: float = 5.0) -> None:
        self._engine = engine
        self._heartbeat_interval_s = heartbeat_interval_s
        self._health_timeout_s = health_timeout_s
        self._is_alive = True
        self._is_draining = False
        self._failed = asyncio.Event()
        self._outboxes: set[asyncio.Queue[Event | None]] = set()
        self._server: grpc.aio.Server | None = None
        self._health_task: asyncio.Task[None] | None = None

    async def start(self, host: str, *, port: int = 0) -> int:
        """Listen on host and return the port; port 0 takes a free one."""
        server = grpc.aio.server(options=STREAM_OPTIONS)
        servicer = _Servicer(self)
        pb_grpc.add_EngineServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # generated code
        bound_port = server.add_insecure_port(f"{host}:{port}")
        await server.start()
        self._server = server
        self._health_task = asyncio.create_task(self._watch_health())
        return bound_port

    async def failed(self) -> None:
        """Wait until the engine can serve no more."""
        await self._failed.wait()

    async def drain(self, timeout_s: float) -> None:
        """Ask the routers for no more requests and wait until the engine is idle, or timeout_s is over."""
        self._is_draining = True
        self._tell_health()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._engine.stats().num_running + self._engine.stats().num_waiting:
                    await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End all sessions and close the port."""
        if self._health_task:
            self._health_task.cancel()
        if self._server:
            await self._server.stop(grace=None)

    async def serve_session(self, commands: AsyncIterator[Command], outbox: asyncio.Queue[Event | None]) -> None:
        """Run one session until its commands end; what is to be sent goes into the outbox, None at the end."""
        session = self._engine.open_session()
        outbox.put_nowait(Hello(self._engine.info, self._engine.stats()))
        outbox.put_nowait(self._heartbeat())
        self._outboxes.add(outbox)
        try:
            async with asyncio.TaskGroup() as group:
                background = (
                    group.create_task(self._forward_outputs(session, outbox)),
                    group.create_task(self._beat(outbox)),
                )
                async for command in commands:
                    _obey(session, command, outbox=outbox)
                for task in background:
                    task.cancel()
        finally:
            self._outboxes.discard(outbox)
            session.close()
            outbox.put_nowait(None)

    def sequences(self) -> tuple[SequenceRow, ...]:
        """Return the sequences of all sessions, at a glance."""
        return self._engine.sequences()

    async def look(self, request_id: RequestId, *, layer: int, kv_head: int) -> SequenceLook | None:
        """Look at one sequence; None when it is not here."""
        return await self._engine.look(request_id, layer=layer, kv_head=kv_head)

    async def _forward_outputs(self, session: EngineSession, outbox: asyncio.Queue[Event | None]) -> None:
        while True:
            outputs = await session.outputs()
            outbox.put_nowait(StepOutputs(tuple(outputs), self._engine.stats()))

    async def _beat(self, outbox: asyncio.Queue[Event | None]) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            outbox.put_nowait(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self._engine.stats(), self._is_alive and not self._is_draining)

    def _tell_health(self) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(self._heartbeat())

    async def _watch_health(self) -> None:
        while self._is_alive:
            self._is_alive = await self._is_healthy()
            await asyncio.sleep(self._heartbeat_interval_s if self._is_alive else 0)
        self._tell_health()
        self._failed.set()

    async def _is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(self._health_timeout_s):
                await self._engine.check_health()
        except Exception as error:  # whatever a rank died of, the answer is the same
            logger.error("engine %s is not healthy: %r", self._engine.info.engine_id, error)
            return False
        return True


class _Servicer(pb_grpc.EngineServiceServicer):
    """Moves messages between the gRPC call and a session."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse],
    ) -> None:
        outbox: asyncio.Queue[Event | None] = asyncio.Queue()
        serving = asyncio.create_task(self._server.serve_session(_commands(request_iterator), outbox))
        try:
            while event := await outbox.get():
                await context.write(event_to_pb(event))
            await serving
        finally:
            serving.cancel()
            # What it ended of is of no interest any more: the call is over.
            await asyncio.gather(serving, return_exceptions=True)

    async def ListSequences(
        self,
        request: pb.ListSequencesRequest,
        context: grpc.aio.ServicerContext[pb.ListSequencesRequest, pb.ListSequencesResponse],
    ) -> pb.ListSequencesResponse:
        return rows_to_pb(self._server.sequences())

    async def LookAtSequence(
        self,
        request: pb.LookAtSequenceRequest,
        context: grpc.aio.ServicerContext[pb.LookAtSequenceRequest, pb.LookAtSequenceResponse],
    ) -> pb.LookAtSequenceResponse:
        try:
            look = await self._server.look(RequestId(request.request_id), layer=request.layer, kv_head=request.kv_head)
        except EngineLostError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return look_to_pb(look)


async def _commands(messages: AsyncIterator[pb.SessionRequest]) -> AsyncIterator[Command]:
    async for message in messages:
        if command := command_from_pb(message):
            yield command


def _obey(session: EngineSession, command: Command, *, outbox: asyncio.Queue[Event | None]) -> None:
    match command:
        case Submit(request):
            try:
                session.submit(request)
            except KvorumError as error:
                outbox.put_nowait(Rejection(request.request_id, error))
        case Abort(request_id):
            session.abort(request_id)
        case Finish(request_id):
            session.finish(request_id)
