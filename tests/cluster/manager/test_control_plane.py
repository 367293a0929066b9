"""Who may talk to the cache manager, what operators see of it, and what tenants do not."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvorum.cluster import manager_link
from kvorum.cluster.certs_command import run as run_certs
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.manager import pacing
from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.channel import ManagerAddress, ManagerLostError, open_channel
from kvorum.cluster.manager.lifetimes import ROUTER_TIMEOUT_S
from kvorum.cluster.manager.service import LEARN_S, MORE_S, STALL_S, LearningError, ManagerServer
from kvorum.cluster.manager.streams import EngineStream, RouterStream
from kvorum.cluster.manager.tls import read_tls
from kvorum.cluster.manager.types import AdmitRequest, EngineFacts, LeaseRecord, Refused, TenantLimits
from kvorum.cluster.manager.watching import ViewChange
from kvorum.cluster.manager.wire import Snapshot, engine_message_to_pb, lease_request_to_pb
from kvorum.cluster.manager_link import ManagerLink
from kvorum.cluster.tenants import DEFAULT_TENANT, Tenant, hash_key
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvorum.protos.cache.v1 import cache_pb2_grpc as pb_grpc
from kvorum.workers.governance import EngineReport
from kvtest.counting import samples_of
from kvtest.managed import LEASE_S, ManagedCluster, managed_cluster
from kvtest.servers import http_client
from kvtest.waiting import eventually


def run(scenario: Callable[[ManagedCluster], Awaitable[None]], config: ClusterConfig | None = None) -> None:
    async def main() -> None:
        async with managed_cluster(config) as cluster:
            await scenario(cluster)

    asyncio.run(main())


def tenants(**settings: Tenant) -> ClusterConfig:
    return ClusterConfig(
        tenants={
            name: tenant.model_copy(update={"api_key_sha256": (hash_key(name),)}) for name, tenant in settings.items()
        }
    )


async def _codes_without(metadata: tuple[tuple[str, str], ...], address: ManagerAddress) -> list[grpc.StatusCode]:
    """Make every call of the control plane and return how each one fails."""
    async with grpc.aio.insecure_channel(address.target) as channel:
        stub: Any = pb_grpc.CacheManagerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        calls = [
            stub.Admit(metadata=metadata),
            stub.Renew(pb.RenewRequest(router_id="x"), metadata=metadata),
            stub.Release(pb.ReleaseRequest(lease_ids=["x"]), metadata=metadata),
            stub.Watch(pb.WatchRequest(), metadata=metadata),
            stub.Coordinate(metadata=metadata),
        ]
        return [await call.code() for call in calls]


def test_a_manager_that_learns_what_runs_grants_nothing() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        await cluster.manager.kill()
        cluster.manager.learn_s = 60.0
        await cluster.manager.start()
        address = await cluster.manager.find()
        async with grpc.aio.insecure_channel(address.target) as channel:
            stub: Any = pb_grpc.CacheManagerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
            call = stub.Admit(metadata=address.metadata)
            request = pb.LeaseRequest(lease_id="x", tenant=DEFAULT_TENANT, sequence_blocks=[1])
            await call.write(pb.AdmitRequest(router_id="x", requests=[request]))
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert (await stub.Renew(pb.RenewRequest(router_id="x"), metadata=address.metadata)).is_learning

    run(scenario)


def test_a_manager_that_stood_still_learns_anew() -> None:
    async def main() -> None:
        now_s = [100.0]
        manager = CacheManager([TenantLimits(DEFAULT_TENANT)], lease_s=30.0, engine_grace_s=1.0)
        server = ManagerServer(manager, token="t", learn_s=LEARN_S, clock=lambda: now_s[0])
        await server.start("127.0.0.1")
        known = [server.is_learning]

        async def after(seconds: float) -> None:
            now_s[0] += seconds
            known.append(server.is_learning)
            await eventually(lambda: server._seen_s == now_s[0])
            known.append(server.is_learning)

        await after(LEARN_S)  # a jump of the clock is what it sees of a standstill
        for _ in range(4):
            await after(LEARN_S / 4)
        await after(STALL_S / 2)
        assert known == [True] * 9 + [False] * 4

        async def asked() -> AsyncIterator[pb.AdmitRequest]:
            waits = pb.LeaseRequest(lease_id="waits", tenant=DEFAULT_TENANT, sequence_blocks=[1], max_wait_s=60.0)
            yield pb.AdmitRequest(router_id="r", requests=[waits])
            await asyncio.Event().wait()

        serving = asyncio.create_task(server.admit(asked(), RouterStream()))
        await eventually(lambda: bool(manager.view().tenants[0].num_waiting))
        now_s[0] += 2 * STALL_S
        with pytest.raises(LearningError):
            await serving
        assert not manager.view().tenants[0].num_waiting
        await server.stop()

    asyncio.run(main())


def test_a_manager_learns_until_routers_have_told_all_but_not_for_ever() -> None:
    async def main() -> None:
        now_s = [100.0]
        manager = CacheManager([TenantLimits(DEFAULT_TENANT)], lease_s=30.0, engine_grace_s=1.0)
        server = ManagerServer(manager, token="t", learn_s=LEARN_S, clock=lambda: now_s[0])
        await server.start("127.0.0.1")

        async def is_learning_after(seconds: float, *, has_more: bool) -> bool:
            for _ in range(round(2 * seconds)):
                now_s[0] += 0.5
                server.renew(pb.RenewRequest(router_id="r", has_more=has_more))
            return server.is_learning

        assert await is_learning_after(LEARN_S - 1.0, has_more=False)
        assert await is_learning_after(3.0, has_more=True)
        assert await is_learning_after(0.5, has_more=False)
        assert not await is_learning_after(MORE_S, has_more=False)
        now_s[0] += 2 * STALL_S
        assert await is_learning_after(ROUTER_TIMEOUT_S - 1.0, has_more=True)
        assert not await is_learning_after(2.0, has_more=True)
        await server.stop()

    asyncio.run(main())


def test_a_tick_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        manager = CacheManager([TenantLimits(DEFAULT_TENANT)], lease_s=30.0, engine_grace_s=1.0)
        server = ManagerServer(manager, token="t")
        failing = [ValueError("once")]

        def tick(now_s: float) -> None:
            if failing:
                raise failing.pop()
            manager.set_tenants([])

        manager.tick = tick  # type: ignore[method-assign]
        await server.start("127.0.0.1")
        await eventually(lambda: not manager.tenants)
        await server.stop()

    asyncio.run(main())
    assert "a tick failed" in caplog.text


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


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),), (("authorization", "Bearer "),)])
def test_no_call_is_answered_without_the_token(metadata: tuple[tuple[str, str], ...]) -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        codes = await _codes_without(metadata, await cluster.manager.find())
        assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 5

    run(scenario)


def test_mutual_tls_carries_everything_and_takes_nobody_without_a_certificate(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        assert run_certs(argparse.Namespace(folder=tmp_path / name, days=1)) == 0

    async def scenario(cluster: ManagedCluster) -> None:
        async with http_client(cluster) as client:
            response = await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
            assert response.json()["choices"][0]["text"] == "abcab"
        address = await cluster.manager.find()
        for tls in (None, read_tls(tmp_path / "theirs")):
            async with open_channel(address, tls) as channel:
                stub: Any = pb_grpc.CacheManagerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
                call = stub.Renew(pb.RenewRequest(router_id="x"), metadata=address.metadata, timeout=5)
                assert await call.code() is grpc.StatusCode.UNAVAILABLE

    run(scenario, ClusterConfig(control_tls=tmp_path / "ours"))


def test_operators_see_the_cluster_and_tenants_do_not() -> None:
    config = tenants(acme=Tenant(), ops=Tenant(is_operator=True))

    async def scenario(cluster: ManagedCluster) -> None:
        async with http_client(cluster) as client:
            for route in ("/operator/cluster", "/operator/cluster/watch"):
                assert (await client.get(route)).status_code == 401
                refused = await client.get(route, headers={"Authorization": "Bearer acme"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
            seen = (await client.get("/operator/cluster", headers={"Authorization": "Bearer ops"})).json()
            assert [engine["engine_id"] for engine in seen["engines"]] == ["engine-0"]
            assert {tenant["tenant"] for tenant in seen["tenants"]} == {"acme", "ops"}
            assert seen["drift_blocks"] == 0

    run(scenario, config)


def test_a_watch_begins_with_everything_and_goes_on_with_what_changes() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        watching = cluster.frontend.watch_cluster(tenant=DEFAULT_TENANT)
        first = await anext(watching)
        assert [engine.engine_id for engine in first.engines] == ["engine-0"]
        async with http_client(cluster) as client:
            await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})
        second = await anext(watching)
        assert [tenant.admitted_total for tenant in second.tenants] == [1]
        await watching.aclose()

    run(scenario)


async def _read_all(changes: AsyncIterator[ViewChange]) -> None:
    async for _ in changes:
        pass


def test_a_watch_ends_with_an_error_when_the_manager_is_lost() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        watching = cluster.frontend.watch_cluster(tenant=DEFAULT_TENANT)
        await anext(watching)
        await cluster.manager.kill()
        with pytest.raises(ManagerLostError):
            await _read_all(watching)
        await eventually(lambda: not cluster.frontend._managed.link.is_up)  # type: ignore[union-attr]
        async with http_client(cluster) as client:
            lost = await client.get("/operator/cluster")
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "manager_lost")

    run(scenario)


def test_the_same_question_twice_gets_one_lease() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        address = await cluster.manager.find()
        question = lease_request_to_pb(AdmitRequest("same", DEFAULT_TENANT, (5,), 80, 1.0))
        request = pb.AdmitRequest(router_id="r", requests=[question])
        async with open_channel(address, None) as channel:
            stub: Any = pb_grpc.CacheManagerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
            calls = [stub.Admit(metadata=address.metadata) for _ in range(2)]
            for call in (*calls, calls[0]):
                await call.write(request)
                (decision,) = (await call.read()).decisions
                assert (decision.lease_id, decision.grant.engine_id) == ("same", "engine-0")
            assert cluster.manager.tenant(DEFAULT_TENANT).reserved_blocks == 5
            for _ in range(2):
                await stub.Release(pb.ReleaseRequest(lease_ids=["same", "never"]), metadata=address.metadata)
            assert cluster.manager.tenant(DEFAULT_TENANT).reserved_blocks == 0

    run(scenario)


def test_requests_that_come_up_together_share_messages() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        assert cluster.manager.server
        link = ManagerLink(cluster.manager.find, router_id="many")
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.is_up)
        for round_ in range(2):
            requests = [AdmitRequest(f"{round_}-{index}", DEFAULT_TENANT, (1,), 16, 0.0) for index in range(24)]
            assert len(await asyncio.gather(*map(link.admit, requests))) == 24
        num_read = [stream._num_read for stream in cluster.manager.server._routers if stream._num_read]
        assert num_read == [4], "16 and 8, twice"
        running.cancel()

    run(scenario)


def test_a_lease_that_nobody_uses_or_renews_is_taken_back() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        link = ManagerLink(cluster.manager.find, router_id="gone")
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.is_up)
        answer = await link.admit(AdmitRequest("forgotten", DEFAULT_TENANT, (5,), 80, 1.0))
        assert not isinstance(answer, Refused)
        running.cancel()
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).reserved_blocks == 0)

    run(scenario)


def test_a_lease_lasts_as_long_as_its_router_holds_it() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        link = ManagerLink(cluster.manager.find, router_id="r")
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.is_up)
        await link.admit(AdmitRequest("held", DEFAULT_TENANT, (5,), 80, 1.0))
        for _ in range(5):
            await asyncio.sleep(LEASE_S / 2)
            assert cluster.manager.tenant(DEFAULT_TENANT).reserved_blocks == 5
        cluster.manager.manager.release("held", 0.0)
        link.held.add(LeaseRecord("alone", DEFAULT_TENANT, "engine-0", (7,)))  # decided without the manager
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).reserved_blocks == 7)
        link.held.remove("alone")  # forgotten, not released
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).reserved_blocks == 0)
        running.cancel()

    run(scenario)


def test_a_router_that_the_manager_has_forgotten_tells_it_all_again() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        link = ManagerLink(cluster.manager.find, router_id="r")
        for number in range(manager_link._RECORDS_AT_ONCE + 3):
            link.held.add(LeaseRecord(f"lease-{number}", DEFAULT_TENANT, "engine-0", (0, 1)))
        running = asyncio.create_task(link.run())
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_running == len(link.held))
        manager = cluster.manager.manager
        manager._lifetimes._routers["r"] = -math.inf
        manager.tick(asyncio.get_running_loop().time())
        assert not cluster.manager.tenant(DEFAULT_TENANT).num_running
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_running == len(link.held))
        running.cancel()

    run(scenario)


def test_an_engine_that_falls_silent_is_let_go_at_the_pace_that_it_was_told() -> None:
    async def main() -> None:
        now_s = [100.0]
        manager = CacheManager([TenantLimits(DEFAULT_TENANT)], lease_s=30.0, engine_grace_s=1.0)
        server = ManagerServer(manager, token="t", clock=lambda: now_s[0])
        await server.start("127.0.0.1")
        snapshot = engine_message_to_pb(Snapshot(EngineFacts("engine-0", 1, 10, 10), EngineReport(10, 10, 0), ()))

        async def says(*messages: pb.CoordinateRequest) -> AsyncIterator[pb.CoordinateRequest]:
            for message in messages:
                yield message
            await asyncio.Event().wait()

        async def after(seconds: float) -> None:
            for _ in range(round(2 * seconds)):  # in steps that are no standstill
                now_s[0] += 0.5
                await eventually(lambda: server._listened_s == now_s[0])

        speaks, nameless = EngineStream(), EngineStream()
        serving = [
            asyncio.create_task(server.coordinate(says(snapshot), speaks)),
            asyncio.create_task(server.coordinate(says(), nameless)),
        ]
        await eventually(lambda: speaks.engine_id == "engine-0")
        speaks.say(pb.CoordinateResponse(), now_s[0], report_period_s=1.0)
        await after(pacing.SILENCE_S)
        assert not any(task.done() for task in serving)
        await after(0.5)
        await asyncio.wait_for(serving[1], 5.0)
        assert manager.view().engines
        now_s[0] += 60.0  # a standstill, in which nobody could be heard
        await eventually(lambda: server._listened_s == now_s[0])
        await after(pacing.silence_s(1.0))
        assert not serving[0].done()
        await after(0.5)
        await asyncio.wait_for(serving[0], 5.0)
        await server.stop()

    asyncio.run(main())


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
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).reserved_blocks == 0)
        running.cancel()

    run(scenario)


def test_receipts_and_errors_name_nothing_of_other_tenants() -> None:
    config = tenants(acme=Tenant(), secretive=Tenant())

    async def scenario(cluster: ManagedCluster) -> None:
        async with http_client(cluster) as client:
            for name in ("secretive", "acme"):
                answer = await client.post(
                    "/v1/completions",
                    json={"prompt": "abc" * 30, "max_tokens": 5},
                    headers={"Authorization": f"Bearer {name}"},
                )
                receipt = answer.json()["kvorum"]
                assert receipt["prompt_tokens_cached"] == 0
            assert "secretive" not in json.dumps(answer.json())

    run(scenario, config)


def test_metrics_have_the_managers_numbers_and_say_when_it_is_lost() -> None:
    config = tenants(acme=Tenant(floor=5, ceiling=0.5), other=Tenant())

    async def scenario(cluster: ManagedCluster) -> None:
        async with http_client(cluster) as client:

            async def value(name: str, **labels: str) -> float | None:
                samples = samples_of((await client.get("/metrics")).text)
                return samples.get((f"kvorum_{name}", tuple(sorted(labels.items()))))

            body = {"prompt": "abc", "max_tokens": 5}
            await client.post("/v1/completions", json=body, headers={"Authorization": "Bearer acme"})
            await cluster.wait_until_idle()
            assert await value("manager_up") == 1
            assert await value("tenant_kv_pages", tenant="acme", kind="floor") == 5
            assert await value("tenant_kv_pages", tenant="acme", kind="ceiling") == 32
            assert await value("tenant_kv_pages", tenant="other", kind="ceiling") is None
            assert await value("lease_age_seconds") == 0
            for rpc in ("Admit", "Renew", "Release"):
                assert await value("manager_rpc_seconds_count", rpc=rpc)
            await cluster.manager.kill()
            assert await value("manager_up") == 0
            assert await value("tenant_kv_pages", tenant="acme", kind="floor") is None

    run(scenario, config)


def test_a_manager_that_says_nothing_holds_no_scrape_up() -> None:
    async def main() -> None:
        async with managed_cluster() as cluster:
            link = cluster.frontend._managed and cluster.frontend._managed.link
            assert link
            assert await link.look(timeout_s=5.0)
            assert await link.look(timeout_s=0.0) is None

    asyncio.run(main())
