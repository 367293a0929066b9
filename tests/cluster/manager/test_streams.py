"""The cache manager's ends of its streams: what routers and engines are sent, and when one is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvorum.cluster.manager import pacing
from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.service import STALL_S, LearningError, ManagerServer
from kvorum.cluster.manager.streams import EngineStream, RouterStream
from kvorum.cluster.manager.types import AdmitRequest, EngineFacts, Granted, LeaseChanges, Outcome, TenantLimits
from kvorum.cluster.manager.wire import Acknowledgement, Delta, EngineMessage, Snapshot, engine_message_to_pb
from kvorum.cluster.tenants import DEFAULT_TENANT
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvorum.workers.governance import EngineReport
from kvtest.waiting import eventually

REPORT = EngineReport(10, 10, 0)


class Clock:
    """A manager's time, which stands still between its steps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.server = ManagerServer(
            CacheManager([TenantLimits(DEFAULT_TENANT)], lease_s=30.0, engine_grace_s=1.0),
            token="t",
            clock=lambda: self.now_s,
        )

    async def pass_by(self, seconds: float) -> None:
        """Go on in steps that are no standstill."""
        for _ in range(round(2 * seconds)):
            await self.jump(0.5)

    async def jump(self, seconds: float) -> None:
        """Go on at once, and wait until the manager has noticed."""
        self.now_s += seconds
        await eventually(lambda: self.server._listened_s == self.now_s)


def snapshot(epoch: int) -> Snapshot:
    return Snapshot(EngineFacts("engine-0", epoch, 10, 10), REPORT, ())


async def says(*messages: EngineMessage) -> AsyncIterator[pb.CoordinateRequest]:
    """Say these, and then nothing more."""
    for message in messages:
        yield engine_message_to_pb(message)
    await asyncio.Event().wait()


def test_decisions_that_come_together_go_together() -> None:
    async def main() -> None:
        stream = RouterStream()
        messages = stream.messages()
        for name in ("a", "b", "c"):
            stream.decide(Granted(name, "engine-0", 1.0))
        stream.note_read()
        first = await anext(messages)
        assert ([decision.lease_id for decision in first.decisions], first.num_read) == (["a", "b", "c"], 1)
        stream.note_read()
        second = await anext(messages)
        assert (len(second.decisions), second.num_read) == (0, 2)

    asyncio.run(main())


def test_an_engine_that_falls_silent_is_let_go_at_the_slowest_pace_that_it_was_told() -> None:
    async def main() -> None:
        clock = Clock()
        server = clock.server
        await server.start("127.0.0.1")
        speaks, nameless = EngineStream(), EngineStream()
        serving = [
            asyncio.create_task(server.coordinate(says(snapshot(1)), speaks)),
            asyncio.create_task(server.coordinate(says(), nameless)),
        ]
        await eventually(lambda: speaks.engine_id == "engine-0")
        for period_s in (1.0, 0.1):
            speaks.say(pb.CoordinateResponse(), clock.now_s, report_period_s=period_s)
        await clock.pass_by(pacing.SILENCE_S)
        assert not any(task.done() for task in serving)
        await clock.pass_by(0.5)
        await asyncio.wait_for(serving[1], 5.0)
        await clock.pass_by(0.5)
        assert not serving[0].done()
        await clock.jump(60.0)  # a standstill, in which nobody could be heard
        await clock.pass_by(pacing.SILENCE_S)
        assert not serving[0].done()
        await clock.pass_by(0.5)
        await asyncio.wait_for(serving[0], 5.0)
        await server.stop()

    asyncio.run(main())


def test_an_engine_is_let_go_although_ticks_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        clock = Clock()
        monkeypatch.setattr(clock.server.manager, "tick", None)
        await clock.server.start("127.0.0.1")
        serving = asyncio.create_task(clock.server.coordinate(says(), EngineStream()))
        await clock.pass_by(pacing.SILENCE_S + 1.0)
        await asyncio.wait_for(serving, 5.0)
        await clock.server.stop()

    asyncio.run(main())


@pytest.mark.parametrize("first", [Acknowledgement(1), Delta(1, REPORT, LeaseChanges())])
def test_a_stream_that_does_not_begin_with_a_snapshot_is_ended(first: EngineMessage) -> None:
    async def main() -> None:
        server = Clock().server
        await asyncio.wait_for(server.coordinate(says(first), EngineStream()), 5.0)
        assert not server.manager.view().engines

    asyncio.run(main())


def test_of_two_streams_of_an_engine_the_later_connection_counts() -> None:
    async def main() -> None:
        server = Clock().server
        older, newer, late = EngineStream(), EngineStream(), EngineStream()
        more = asyncio.Event()

        async def says_again() -> AsyncIterator[pb.CoordinateRequest]:
            yield engine_message_to_pb(snapshot(1))
            await more.wait()
            yield engine_message_to_pb(Delta(1, REPORT, LeaseChanges()))
            await asyncio.Event().wait()

        first = asyncio.create_task(server.coordinate(says_again(), older))
        await eventually(lambda: older.engine_id == "engine-0")
        second = asyncio.create_task(server.coordinate(says(snapshot(2)), newer))
        await eventually(lambda: newer.engine_id == "engine-0")
        await asyncio.wait_for(server.coordinate(says(snapshot(1)), late), 5.0)
        more.set()
        await asyncio.wait_for(first, 5.0)
        assert not second.done()
        assert [engine.engine_id for engine in server.manager.view().engines] == ["engine-0"]
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert not server._engines

    asyncio.run(main())


def test_a_standstill_within_a_message_leaves_nothing_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    async def main() -> None:
        clock = Clock()
        server = clock.server
        server._learn_s = 60.0
        admit = server.manager.admit

        def slow_admit(request: AdmitRequest, now_s: float) -> Outcome:
            asked.append(request.lease_id)
            outcome = admit(request, now_s)
            clock.now_s += 2 * STALL_S
            return outcome

        monkeypatch.setattr(server.manager, "admit", slow_admit)
        requests = [
            pb.LeaseRequest(lease_id=name, tenant=DEFAULT_TENANT, sequence_blocks=[1], max_wait_s=60.0) for name in "ab"
        ]

        async def asks() -> AsyncIterator[pb.AdmitRequest]:
            yield pb.AdmitRequest(router_id="r", requests=requests)

        server._seen_s = clock.now_s
        server._knows_s = 0.0
        with pytest.raises(LearningError):
            await asyncio.wait_for(server.admit(asks(), RouterStream()), 5.0)
        assert asked == ["a"]
        assert not server._waiting
        assert not server.manager.view().tenants[0].num_waiting

    asyncio.run(main())
