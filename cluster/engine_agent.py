"""An engine's end of its stream with the cache manager: snapshot, then what changes; directives down.

Reports come as often as the manager says (manager/pacing.py). While it cannot be reached the engine goes on under the
last directive. A new connection begins with a snapshot, so nothing that was lost in between matters.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import replace

import grpc
import grpc.aio

from kvorum.cluster.cancelling import end_if_cancelled
from kvorum.cluster.manager import pacing
from kvorum.cluster.manager.channel import FindManager, ManagerAddress, ManagerLostError, open_channel
from kvorum.cluster.manager.tls import ControlTls
from kvorum.cluster.manager.types import EngineFacts, LeaseChanges
from kvorum.cluster.manager.wire import (
    Acknowledgement,
    Delta,
    EngineMessage,
    Snapshot,
    SnapshotOrder,
    engine_message_to_pb,
    order_from_pb,
)
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvorum.protos.cache.v1 import cache_pb2_grpc as pb_grpc
from kvorum.workers.engine_server import Engine
from kvorum.workers.governance import Directive, EngineReport

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 0.2
_RETRY_S = 0.1

_Call = grpc.aio.StreamStreamCall[pb.CoordinateRequest, pb.CoordinateResponse]


class EngineAgent:
    """Speaks for one engine, for as long as `run` runs."""

    def __init__(
        self,
        engine: Engine,
        find: FindManager,
        *,
        tls: ControlTls | None = None,
        look_period_s: float = LOOK_PERIOD_S,
    ) -> None:
        self._engine = engine
        self._find = find
        self._tls = tls
        self._look_period_s = look_period_s
        self._epoch = time.time_ns()
        # Directives are renumbered here: those of a manager that was started anew begin again at 1.
        self._num_directives = 0

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        last_reason = ""
        while True:
            try:
                await self._serve_connection(await self._find())
            except (ManagerLostError, grpc.RpcError, asyncio.InvalidStateError, TimeoutError) as error:
                if (reason := str(error) or repr(error)) != last_reason:
                    logger.warning("engine %s has no cache manager: %s", self._engine.info.engine_id, reason)
                    last_reason = reason
            end_if_cancelled()
            await asyncio.sleep(_RETRY_S)

    async def _serve_connection(self, address: ManagerAddress) -> None:
        async with open_channel(address, self._tls) as channel:
            stub = pb_grpc.CacheManagerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
            call: _Call = stub.Coordinate(metadata=address.metadata)
            self._epoch += 1
            connection = _Connection(self._engine, call, epoch=self._epoch, first_directive=self._num_directives + 1)
            try:
                await connection.serve(look_period_s=self._look_period_s)
            finally:
                self._num_directives = connection.num_directives
                call.cancel()


class _Connection:
    """One connection: what was sent on it, and which directives came."""

    def __init__(self, engine: Engine, call: _Call, *, epoch: int, first_directive: int) -> None:
        self._engine = engine
        self._call = call
        self._epoch = epoch
        self._last: EngineReport | None = None
        self._number = 0
        self._report_period_s = 0.0
        self._phase = random.random()
        self._next_report_s = self._sent_s = 0.0
        self._wants_snapshot = True
        self._reclaim_blocks = 0
        self._unacknowledged: tuple[int, int] | None = None  # our number and the manager's
        self.num_directives = first_directive - 1

    async def serve(self, *, look_period_s: float) -> None:
        """Send and receive until the connection breaks or falls silent; raises what it broke of."""
        receiving = asyncio.create_task(self._receive())
        try:
            while not receiving.done():
                await self._send_news()
                await asyncio.wait({receiving}, timeout=look_period_s)
            await receiving
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    async def _receive(self) -> None:
        while True:
            async with asyncio.timeout(pacing.silence_s(self._report_period_s)):
                message = await self._call.read()
            if not isinstance(message, pb.CoordinateResponse):  # grpc.aio.EOF
                raise ManagerLostError("the cache manager ended the stream")
            if message.report_period_s != self._report_period_s:
                self._report_period_s = message.report_period_s
                self._next_report_s = min(self._next_report_s, self._next_turn_s())
            match order_from_pb(message):
                case Directive() as directive:
                    self.num_directives += 1
                    self._unacknowledged = self.num_directives, directive.number
                    self._reclaim_blocks = directive.reclaim_blocks
                    self._engine.obey(replace(directive, number=self.num_directives))
                case SnapshotOrder():
                    self._wants_snapshot = True
                case None:  # a heartbeat
                    pass

    async def _send_news(self) -> None:
        engine = self._engine
        if self._wants_snapshot or self._last is None:
            self._wants_snapshot = False
            self._number, self._last = 0, engine.report()
            engine.take_lease_changes()  # the snapshot has them
            facts = EngineFacts(
                engine_id=engine.info.engine_id,
                epoch=self._epoch,
                total_blocks=engine.info.num_blocks,
                max_sequences=engine.info.max_num_seqs + engine.info.max_num_waiting,
            )
            await self._send(Snapshot(facts, self._last, engine.leases()))
        else:
            report, now_s = engine.report(), time.monotonic()
            is_turn = now_s >= self._next_report_s
            if is_turn:
                self._next_report_s = self._next_turn_s()
            is_silent = now_s - self._sent_s > pacing.speak_period_s(self._report_period_s)
            if (
                is_turn
                or is_silent
                or any(pacing.is_pressed(each, self._reclaim_blocks) for each in (self._last, report))
            ):
                changes = LeaseChanges(*engine.take_lease_changes())
                if changes != LeaseChanges() or is_silent or (is_turn and report != self._last):
                    news = report.since(self._last)
                    self._number, self._last = self._number + 1, report
                    await self._send(Delta(self._number, news, changes))
        if self._unacknowledged and engine.directive_done >= self._unacknowledged[0]:
            _, number = self._unacknowledged
            self._unacknowledged = None
            await self._send(Acknowledgement(number))

    def _next_turn_s(self) -> float:
        return pacing.next_turn_s(time.monotonic(), self._report_period_s, self._phase)

    async def _send(self, message: EngineMessage) -> None:
        self._sent_s = time.monotonic()
        async with asyncio.timeout(pacing.silence_s(self._report_period_s)):
            await self._call.write(engine_message_to_pb(message))
