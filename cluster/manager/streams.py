"""The cache manager's ends of its streams: what each router and engine is to be sent, and when it was heard of."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvorum.cluster.manager import pacing
from kvorum.cluster.manager.types import Granted, Refused
from kvorum.cluster.manager.wire import outcome_to_pb
from kvorum.protos.cache.v1 import cache_pb2 as pb


class Stream:
    """What both have. ending: to be entered by whoever reads the stream; raises TimeoutError there after `end`."""

    def __init__(self) -> None:
        self.ending = asyncio.timeout(None)

    def end(self) -> None:
        """Stop reading it."""
        if not self.ending.expired():
            self.ending.reschedule(asyncio.get_running_loop().time())


class RouterStream(Stream):
    """One router's Admit stream. What is to be sent goes together, once the last message is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._decisions: list[pb.LeaseDecision] = []
        self._num_read = 0
        self._has_news = asyncio.Event()

    def decide(self, outcome: Granted | Refused) -> None:
        """Answer a request."""
        self._decisions.append(outcome_to_pb(outcome))
        self._has_news.set()

    def note_read(self) -> None:
        """Count a message of the router's."""
        self._num_read += 1
        self._has_news.set()

    async def messages(self) -> AsyncIterator[pb.AdmitResponse]:
        """Yield what is to be sent, when there is something."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            decisions, self._decisions = self._decisions, []
            yield pb.AdmitResponse(decisions=decisions, num_read=self._num_read)


class EngineStream(Stream):
    """One engine's Coordinate stream. engine_id: of which one, once it has said so; epoch: of its connection."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_id = ""
        self.epoch = 0
        self.said_s = -math.inf  # when it was last sent something
        self.report_period_s = 0.0  # what it was told then
        self._heard_s = math.inf
        self._slowest_period_s = 0.0  # of those that it was told since it was last heard
        self._outbox: asyncio.Queue[pb.CoordinateResponse] = asyncio.Queue()

    def say(self, message: pb.CoordinateResponse, now_s: float, *, report_period_s: float) -> None:
        """Send it something, and at which pace to report."""
        self.said_s, self.report_period_s = now_s, report_period_s
        self._slowest_period_s = max(self._slowest_period_s, report_period_s)
        message.report_period_s = report_period_s
        self._outbox.put_nowait(message)

    def hear(self, now_s: float) -> None:
        """Note that something came, or could not have come before."""
        self._heard_s, self._slowest_period_s = now_s, self.report_period_s

    def is_silent(self, now_s: float) -> bool:
        """Whether nothing came for too long, at the slowest pace that it may have gone by."""
        return now_s - self._heard_s > pacing.silence_s(self._slowest_period_s)

    async def messages(self) -> AsyncIterator[pb.CoordinateResponse]:
        """Yield what is to be sent, when there is something."""
        while True:
            yield await self._outbox.get()


@contextlib.asynccontextmanager
async def sending(context: grpc.aio.ServicerContext[Any, Any], messages: AsyncIterator[Message]) -> AsyncIterator[None]:
    """Send meanwhile what comes."""
    writing = asyncio.create_task(_write(context, messages))
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _write(context: grpc.aio.ServicerContext[Any, Any], messages: AsyncIterator[Message]) -> None:
    async for message in messages:
        try:
            await context.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # whoever reads the stream sees its end too
