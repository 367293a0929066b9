"""A router's connection to the cache manager, over real gRPC: what it asks, tells again and gives back."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

import pytest

from kvorum.cluster import manager_link
from kvorum.cluster.manager.service import ManagerServer
from kvorum.cluster.manager.streams import RouterStream
from kvorum.cluster.manager.types import AdmitRequest, LeaseRecord, Refused
from kvorum.cluster.manager_link import ManagerLink
from kvorum.cluster.tenants import DEFAULT_TENANT
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvtest.managed import LEASE_S, ManagedCluster, managed_cluster
from kvtest.waiting import eventually


def run(scenario: Callable[[ManagedCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with managed_cluster() as cluster:
            await scenario(cluster)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def connected(cluster: ManagedCluster, *held: LeaseRecord) -> AsyncIterator[ManagerLink]:
    """Be a router of its own, which holds these leases."""
    link = ManagerLink(cluster.manager.find, router_id="r")
    for record in held:
        link.held.add(record)
    running = asyncio.create_task(link.run())
    try:
        await eventually(lambda: link.is_up)
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def record(name: str, *blocks: int) -> LeaseRecord:
    return LeaseRecord(name, DEFAULT_TENANT, "engine-0", blocks)


def blocks_of(cluster: ManagedCluster) -> int:
    return cluster.manager.tenant(DEFAULT_TENANT).reserved_blocks


def test_a_router_connects_again_whatever_went_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        link = ManagerLink(cluster.manager.find, router_id="r")
        with monkeypatch.context() as broken:
            broken.setattr(manager_link, "share_from_pb", None)
            running = asyncio.create_task(link.run())
            await eventually(lambda: "connection to the cache manager failed" in caplog.text)
        await eventually(lambda: link.is_up)
        running.cancel()

    run(scenario)


def test_what_comes_up_while_a_message_is_not_read_shares_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    reads_on = asyncio.Event()
    admit = ManagerServer.admit

    async def slow_admit(server: ManagerServer, messages: AsyncIterator[pb.AdmitRequest], stream: RouterStream) -> None:
        async def slowly() -> AsyncIterator[pb.AdmitRequest]:
            async for message in messages:
                sizes.append(len(message.requests))
                await reads_on.wait()
                yield message

        await admit(server, slowly(), stream)

    monkeypatch.setattr(ManagerServer, "admit", slow_admit)

    async def scenario(cluster: ManagedCluster) -> None:
        async with connected(cluster) as link:
            asking = []
            for number in range(6 + manager_link._REQUESTS_AT_ONCE):
                request = AdmitRequest(f"lease-{number}", DEFAULT_TENANT, (1,), 16, 0.0)
                asking.append(asyncio.create_task(link.admit(request)))
                await asyncio.sleep(0.01)
            assert sizes == [1]
            reads_on.set()
            await asyncio.gather(*asking)
            assert sizes == [1, manager_link._REQUESTS_AT_ONCE, 5]

    run(scenario)


def test_one_that_waits_in_line_does_not_hold_up_the_next() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        async with connected(cluster) as link:
            all_of_it = cluster.engine.host.engine.info.num_blocks
            assert await link.admit(AdmitRequest("all", DEFAULT_TENANT, (all_of_it,), 16, 0.0)) == "engine-0"
            waiting = asyncio.create_task(link.admit(AdmitRequest("waits", DEFAULT_TENANT, (1,), 16, 60.0)))
            await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_waiting == 1)
            refused = await link.admit(AdmitRequest("refused", DEFAULT_TENANT, (all_of_it + 1,), 16, 60.0))
            assert isinstance(refused, Refused)
            assert not waiting.done()
            link.release("all", has_ended=False)
            assert await waiting == "engine-0"

    run(scenario)


def test_a_lease_that_nobody_uses_or_renews_is_taken_back() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        async with connected(cluster) as link:
            assert await link.admit(AdmitRequest("forgotten", DEFAULT_TENANT, (5,), 80, 1.0)) == "engine-0"
        await eventually(lambda: blocks_of(cluster) == 0)

    run(scenario)


def test_a_lease_lasts_as_long_as_its_router_holds_it() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        async with connected(cluster) as link:
            await link.admit(AdmitRequest("held", DEFAULT_TENANT, (5,), 80, 1.0))
            assert cluster.manager.manager._ledger.holder_of("held") == "r"
            for _ in range(5):
                await asyncio.sleep(LEASE_S / 2)
                assert blocks_of(cluster) == 5
            cluster.manager.manager.release("held", 0.0)
            link.held.add(record("alone", 7))  # decided without the manager
            await eventually(lambda: blocks_of(cluster) == 7)
            link.held.remove("alone")  # forgotten, not released
            await eventually(lambda: blocks_of(cluster) == 0)

    run(scenario)


def test_a_router_that_the_manager_has_forgotten_tells_it_all_again() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        held = [record(f"lease-{number}", 0, 1) for number in range(manager_link._RECORDS_AT_ONCE + 3)]
        async with connected(cluster, *held):
            await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_running == len(held))
            manager = cluster.manager.manager
            manager._lifetimes._routers["r"] = -math.inf
            manager.tick(asyncio.get_running_loop().time())
            assert not cluster.manager.tenant(DEFAULT_TENANT).num_running
            await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_running == len(held))

    run(scenario)


def test_a_manager_that_learns_is_told_more_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_link, "_RECORDS_AT_ONCE", 10)
    monkeypatch.setattr(manager_link, "_RECORDS_WHILE_IT_LEARNS", 200)
    told = list[tuple[int, bool]]()  # how many records, and whether there are more
    renew = ManagerServer.renew

    def counting_renew(server: ManagerServer, message: pb.RenewRequest) -> pb.RenewResponse:
        if message.router_id == "r":
            told.append((len(message.leases), message.has_more))
        return renew(server, message)

    monkeypatch.setattr(ManagerServer, "renew", counting_renew)

    async def scenario(cluster: ManagedCluster) -> None:
        held = [record(f"lease-{number}", 0) for number in range(300)]
        assert cluster.manager.server
        cluster.manager.server._knows_s = asyncio.get_running_loop().time() + 0.3
        async with connected(cluster, *held):
            assert told[:3] == [(10, True), (200, True), (90, False)]
            await eventually(lambda: any(size for size, _ in told[3:]))
            assert not any(has_more for _, has_more in told[3:]), "renewals are nothing that it has to learn"
            assert cluster.manager.tenant(DEFAULT_TENANT).num_running == 300

    run(scenario)


def test_a_router_leaves_a_manager_that_learns_anew() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        link = cluster.frontend._managed and cluster.frontend._managed.link
        server = cluster.manager.server
        assert link
        assert server
        await eventually(lambda: link.is_up)
        server._knows_s = math.inf
        await eventually(lambda: not link.is_up and link.is_learning)
        server._knows_s = 0.0
        await eventually(lambda: link.is_up)

    run(scenario)


def test_what_a_lost_connection_left_to_release_is_released_with_the_next() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        link = ManagerLink(cluster.manager.find, router_id="r")
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.is_up)
        await link.admit(AdmitRequest("kept", DEFAULT_TENANT, (5,), 80, 1.0))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        link.release("kept", has_ended=False)
        link._release_now.clear()  # the connection broke while it was sent
        running = asyncio.create_task(link.run())
        await eventually(lambda: blocks_of(cluster) == 0)
        running.cancel()

    run(scenario)


def releases_of(monkeypatch: pytest.MonkeyPatch, on_first: Callable[[], None]) -> list[tuple[int, int]]:
    """Return a list that follows Release calls: how many leases each named, and how many of them had ended."""
    calls = list[tuple[int, int]]()
    release = ManagerServer.release

    def following(server: ManagerServer, lease_ids: Collection[str], ended: Collection[str] = ()) -> None:
        calls.append((len(lease_ids), len(ended)))
        if len(calls) == 1:
            on_first()
        release(server, lease_ids, ended)

    monkeypatch.setattr(ManagerServer, "release", following)
    return calls


def test_very_many_are_released_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    most = manager_link._RELEASES_AT_ONCE
    calls = releases_of(monkeypatch, lambda: None)

    async def scenario(cluster: ManagedCluster) -> None:
        async with connected(cluster) as link:
            for number in range(most + 5):
                link.release(f"lease-{number}", has_ended=number < 3)
            await eventually(lambda: not link._to_release)
            assert calls == [(most, 3), (5, 0)]

    run(scenario)


def test_a_lease_that_is_seen_to_end_while_its_release_is_under_way_is_released_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        async with connected(cluster) as link:
            calls = releases_of(monkeypatch, lambda: link.release("x", has_ended=True))
            link.release("x", has_ended=False)
            await eventually(lambda: not link._to_release)
            assert calls == [(1, 0), (1, 1)]

    run(scenario)
