"""The cache manager as a gRPC server: one CacheManager, and the calls that ask, tell and watch it.

A lease's way through it:
 1. A router asks on its Admit stream and is answered at once, or when it is decided; what waits when the stream ends
    leaves the line.
 2. The engine's stream tells that the lease's sequences arrived (it is committed), what they hold, and that they ended.
 3. What the manager decides on the way, outcomes for those that waited and directives for engines, leaves in `_settle`,
    after each message and each tick.
Only this module knows time; the event loop is the one writer of the manager's state.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from kvorum.cluster.manager import pacing
from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.lifetimes import ROUTER_TIMEOUT_S
from kvorum.cluster.manager.safe_shares import SafeShare
from kvorum.cluster.manager.streams import EngineStream, RouterStream, sending
from kvorum.cluster.manager.tls import ControlTls, server_credentials
from kvorum.cluster.manager.types import AdmitRequest, ClusterView, EngineFacts, Outcome, TenantLimits, Waiting
from kvorum.cluster.manager.watching import difference
from kvorum.cluster.manager.wire import (
    Acknowledgement,
    Delta,
    EngineMessage,
    Snapshot,
    change_to_pb,
    directive_to_pb,
    engine_message_from_pb,
    lease_request_from_pb,
    record_from_pb,
    share_to_pb,
)
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvorum.protos.cache.v1 import cache_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

# For so long routers tell a manager that was just started what they hold, and go on without it: as long as one may take
# to notice that the last one is gone. The same goes for one that stood still for so long that a router may have gone on
# without it.
LEARN_S = 2.0
STALL_S = 0.9
# A router that has more to tell is waited for so long, again and again, but not longer than one that is gone.
MORE_S = 1.0
WATCH_PERIOD_S = 0.5
# How often it looks which engines are silent.
LISTEN_PERIOD_S = 0.5
SHARES_PERIOD_S = 0.5

# Both are explained by serve_promptly: objects of each generation before Python looks for cycles there, and how long a
# busy thread may keep the interpreter.
_GC_THRESHOLDS = (1_000, 1_000_000, 1)
_SWITCH_INTERVAL_S = 0.0005
_SERVER_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1))

_Context = grpc.aio.ServicerContext[Any, Any]


def serve_promptly() -> None:
    """Keep this process from pauses in which nobody is admitted.

    - Collecting garbage cycles beyond the youngest objects takes 0.2 s over a large ledger, and finds 70 objects after
      a minute of 500 calls a second: now that happens once a day.
    - gRPC brings messages in by a thread of its own, one for each time that it gets the interpreter. A busy event loop
      lets go of it after Python's 5 ms only, which is 200 messages a second, just when there are most.
    """
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


class LearningError(Exception):
    """Nothing is granted yet, since the manager may not have been told what all routers hold."""


class ManagerServer:
    """Serves one CacheManager until stopped.

    token: what every caller must bring. learn_s: for how long from its start, or after a standstill, it grants nothing.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        token: str,
        tls: ControlTls | None = None,
        learn_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.token = token
        self._tls = tls
        self._clock = clock
        self._learn_s = learn_s
        self._knows_s = self._learns_until_s = self._seen_s = math.inf
        # Where the answer for a lease that waits goes: mostly one stream, two when its router's connection broke.
        self._waiting: dict[str, set[RouterStream]] = {}
        self._routers: set[RouterStream] = set()
        # All that are open, and those of them on which an engine has said who it is.
        self._engine_streams: set[EngineStream] = set()
        self._engines: dict[str, EngineStream] = {}
        self._listened_s = -math.inf
        self._shares: Mapping[str, SafeShare] = {}
        self._shares_until_s = 0.0
        self._server: grpc.aio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, host: str, *, port: int = 0) -> int:
        """Listen on host and return the port; port 0 takes a free one."""
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        pb_grpc.add_CacheManagerServiceServicer_to_server(_Servicer(self), server)  # type: ignore[no-untyped-call]  # generated code
        address = f"{host}:{port}"
        credentials = server_credentials(self._tls) if self._tls else None
        bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        await server.start()
        self._server = server
        self._seen_s = self._clock()
        self._knows_s = self._seen_s + self._learn_s
        self._learns_until_s = self._seen_s + ROUTER_TIMEOUT_S
        self._ticking = asyncio.create_task(self._tick())
        return bound

    async def stop(self) -> None:
        """Close the port; callers see the connection end."""
        if self._ticking:
            self._ticking.cancel()
        if self._server:
            await self._server.stop(grace=None)

    def set_tenants(self, tenants: Collection[TenantLimits]) -> None:
        """Take new limits; they hold for what is admitted from now on."""
        self.manager.set_tenants(tenants)
        self._settle()

    # Routers.

    @property
    def is_learning(self) -> bool:
        """Whether it was just started, or stood still, and may not have been told yet what all routers hold."""
        return self._now() < self._knows_s

    def _now(self) -> float:
        """Return the time. After a standstill routers have to tell again what they hold, and who waits is sent away."""
        now_s = self._clock()
        if now_s - self._seen_s > STALL_S:
            self._knows_s = now_s + self._learn_s
            self._learns_until_s = now_s + ROUTER_TIMEOUT_S
            self.manager.resume(now_s)
            for lease_id in self._waiting:
                self.manager.cancel(lease_id)
            for router in self._routers:
                router.end()
            for engine in self._engine_streams:
                engine.hear(now_s)
        self._seen_s = now_s
        return now_s

    async def admit(self, messages: AsyncIterator[pb.AdmitRequest], stream: RouterStream) -> None:
        """Decide on what one router asks, until its stream ends. Raises LearningError, also after a standstill."""
        try:
            async with stream.ending:
                self._routers.add(stream)
                async for message in messages:
                    for request in message.requests:
                        self._admit(lease_request_from_pb(request, message.router_id), stream)
                    stream.note_read()
                    self._settle()
        except TimeoutError:
            raise LearningError from None
        finally:
            self._routers.discard(stream)
            now_s = self._clock()
            for lease_id, streams in [*self._waiting.items()]:
                streams.discard(stream)
                if not streams:
                    del self._waiting[lease_id]
                    self.manager.release(lease_id, now_s)
            self._settle()

    def _admit(self, request: AdmitRequest, stream: RouterStream) -> None:
        if self.is_learning:
            raise LearningError
        outcome: Outcome = self.manager.admit(request, self._now())
        if isinstance(outcome, Waiting):
            self._waiting.setdefault(request.lease_id, set()).add(stream)
        else:
            stream.decide(outcome)

    def renew(self, message: pb.RenewRequest) -> pb.RenewResponse:
        """Take what a router holds and tell it what it may do alone."""
        now_s = self._now()
        is_new = self.manager.renew(message.router_id, [record_from_pb(record) for record in message.leases], now_s)
        self._settle()
        is_learning = self.is_learning
        if is_learning and message.has_more:
            self._knows_s = min(max(self._knows_s, now_s + MORE_S), self._learns_until_s)
        shares = {} if is_learning else self._safe_shares(now_s)
        return pb.RenewResponse(
            shares={name: share_to_pb(share) for name, share in shares.items()},
            is_learning=is_learning,
            lease_s=self.manager.lease_s,
            is_new=is_new,
        )

    def _safe_shares(self, now_s: float) -> Mapping[str, SafeShare]:
        """Return what each router may do alone; worked out once a period, however many routers ask."""
        if now_s >= self._shares_until_s:
            self._shares = self.manager.safe_shares()
            self._shares_until_s = now_s + SHARES_PERIOD_S
        return self._shares

    def release(self, lease_ids: Collection[str], ended: Collection[str] = ()) -> None:
        """Take leases back; ended: those whose sequences are over."""
        now_s = self._now()
        for lease_id in lease_ids:
            self._waiting.pop(lease_id, None)
            self.manager.release(lease_id, now_s, has_ended=lease_id in ended)
        self._settle()

    # Engines.

    async def coordinate(self, messages: AsyncIterator[pb.CoordinateRequest], stream: EngineStream) -> None:
        """Follow one engine's stream until it ends or falls silent."""
        stream.hear(self._now())
        try:
            async with stream.ending:
                self._engine_streams.add(stream)
                async for message in messages:
                    if not self._take(stream, engine_message_from_pb(message)):
                        break
        except TimeoutError:
            pass  # it fell silent
        finally:
            self._engine_streams.discard(stream)
            if self._engines.get(stream.engine_id) is stream:
                del self._engines[stream.engine_id]
                self.manager.disconnect(stream.engine_id, stream.epoch, self._now())
                logger.warning("engine %s is not connected any more", stream.engine_id)
                self._settle()

    def _take(self, stream: EngineStream, message: EngineMessage) -> bool:
        """Take a message; return whether more of them are wanted."""
        now_s = self._now()
        stream.hear(now_s)
        if not stream.engine_id:
            if not isinstance(message, Snapshot) or not self._meet(stream, message.facts):
                return False
        elif self._engines.get(stream.engine_id) is not stream:
            return False
        match message:
            case Snapshot(facts, report, leases):
                self.manager.connect(facts, report, leases, now_s)
            case Delta(number, report, changes):
                is_known = self.manager.take_report(stream.engine_id, stream.epoch, number, report, changes, now_s)
                if not is_known:
                    self._say(stream, pb.CoordinateResponse(send_snapshot=pb.SnapshotOrder()), now_s)
            case Acknowledgement(number):
                self.manager.acknowledge(stream.engine_id, stream.epoch, number)
        self._settle()
        # Engines speak by themselves, so nobody else has to look whom to answer, and when.
        if now_s - stream.said_s >= pacing.answer_period_s(stream.report_period_s):
            self._say(stream, pb.CoordinateResponse(heartbeat=pb.Heartbeat()), now_s)
        return True

    def _meet(self, stream: EngineStream, facts: EngineFacts) -> bool:
        """Let a stream be its engine's, unless a later one is."""
        known = self._engines.get(facts.engine_id)
        if known and known.epoch > facts.epoch:
            return False
        stream.engine_id, stream.epoch = facts.engine_id, facts.epoch
        self._engines[facts.engine_id] = stream
        logger.info("engine %s is connected", facts.engine_id)
        return True

    def _say(self, stream: EngineStream, message: pb.CoordinateResponse, now_s: float) -> None:
        stream.say(message, now_s, report_period_s=pacing.report_period_s(len(self._engines)))

    def _end_silent(self, now_s: float) -> None:
        for stream in self._engine_streams:
            if stream.is_silent(now_s):
                stream.end()

    # Operators.

    async def watch(self) -> AsyncIterator[pb.WatchResponse]:
        """Yield the whole state, then what changes, as often as engines report."""
        seen, number = ClusterView(), 0
        while True:
            oldest_lease_s = self.manager.oldest_lease_s(self._clock())
            view, number = replace(self.manager.view(), oldest_lease_s=oldest_lease_s), number + 1
            yield change_to_pb(number, difference(seen, view))
            seen = view
            await asyncio.sleep(max(WATCH_PERIOD_S, pacing.report_period_s(len(self._engines))))

    # What follows.

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(pacing.TICK_S)
            try:
                now_s = self._now()
                if now_s - self._listened_s >= LISTEN_PERIOD_S:
                    self._listened_s = now_s
                    self._end_silent(now_s)
                self.manager.tick(now_s)
                self._settle()
            except Exception:
                logger.exception("a tick failed")  # the next one may not: without any nothing would ever end

    def _settle(self) -> None:
        """Send what the manager has decided."""
        for outcome in self.manager.take_outcomes():
            for router in self._waiting.pop(outcome.lease_id, ()):
                router.decide(outcome)
        now_s = self._clock()
        for engine_id, directive in self.manager.take_directives(now_s).items():
            if engine := self._engines.get(engine_id):
                self._say(engine, directive_to_pb(directive), now_s)

    def check_token(self, context: _Context) -> bool:
        """Say whether a caller brings the cluster's token."""
        metadata = context.invocation_metadata() or ()
        sent = next((value for key, value in metadata if key == "authorization"), "")
        text = sent.decode(errors="replace") if isinstance(sent, bytes) else sent
        return hmac.compare_digest(text.encode(), f"Bearer {self.token}".encode())


class _Servicer(pb_grpc.CacheManagerServiceServicer):
    """Checks who calls, and passes on."""

    def __init__(self, server: ManagerServer) -> None:
        self._server = server

    async def Admit(self, request_iterator: AsyncIterator[pb.AdmitRequest], context: _Context) -> None:
        await self._check(context)
        stream = RouterStream()
        async with sending(context, stream.messages()):
            try:
                await self._server.admit(request_iterator, stream)
            except LearningError:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the cache manager learns what runs before it grants")

    async def Renew(self, request: pb.RenewRequest, context: _Context) -> pb.RenewResponse:
        await self._check(context)
        return self._server.renew(request)

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:
        await self._check(context)
        self._server.release(request.lease_ids, frozenset(request.ended_lease_ids))
        return pb.ReleaseResponse()

    async def Coordinate(self, request_iterator: AsyncIterator[pb.CoordinateRequest], context: _Context) -> None:
        await self._check(context)
        stream = EngineStream()
        async with sending(context, stream.messages()):
            await self._server.coordinate(request_iterator, stream)

    async def Watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.WatchResponse]:
        await self._check(context)
        async for change in self._server.watch():
            yield change

    async def _check(self, context: _Context) -> None:
        if not self._server.check_token(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the control plane's token is needed")
