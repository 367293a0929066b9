"""Who may talk to the cache manager, what operators see of it, and what tenants do not."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from kvorum.cluster.certs_command import run as run_certs
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.channel import ManagerAddress, ManagerLostError, open_channel
from kvorum.cluster.manager.lifetimes import ROUTER_TIMEOUT_S
from kvorum.cluster.manager.service import LEARN_S, MORE_S, STALL_S, LearningError, ManagerServer
from kvorum.cluster.manager.streams import RouterStream
from kvorum.cluster.manager.tls import read_tls
from kvorum.cluster.manager.types import AdmitRequest, TenantLimits
from kvorum.cluster.manager.watching import ViewChange
from kvorum.cluster.manager.wire import lease_request_to_pb
from kvorum.cluster.tenants import DEFAULT_TENANT, Tenant, hash_key
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvorum.protos.cache.v1 import cache_pb2_grpc as pb_grpc
from kvtest.counting import samples_of
from kvtest.managed import ManagedCluster, managed_cluster
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
