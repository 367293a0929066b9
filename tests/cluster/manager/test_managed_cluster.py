"""Routers, engines and the cache manager over their real gRPC streams: leases, limits, and life without a manager."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from kvorum.cluster import manager_link
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.generation import Delta, Ending
from kvorum.cluster.manager import pacing
from kvorum.cluster.manager.safe_shares import SafeShare
from kvorum.cluster.manager.service import LEARN_S, STALL_S
from kvorum.cluster.planning import GenerationRequest, Prompting
from kvorum.cluster.sampling_fields import SamplingFields
from kvorum.cluster.tenants import DEFAULT_TENANT, Tenant, TenantTable, hash_key
from kvorum.kvstore.errors import (
    CapacityError,
    DeadlineError,
    NeverFitsError,
    QuotaError,
    RateLimitError,
)
from kvorum.workers.request import RequestId
from kvtest.managed import ManagedCluster, managed_cluster
from kvtest.stack import DEFAULT_INFO
from kvtest.waiting import eventually

PROMPT = "abcdefgh"
STEP_S = 0.002
BLOCKS_OF = {100: 7, 200: 13, 400: 26}  # of a prompt of 8 and an answer of so many tokens, by 16


def run(scenario: Callable[[ManagedCluster], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        async with managed_cluster(**{"step_delay_s": STEP_S} | options) as cluster:  # type: ignore[arg-type]
            await scenario(cluster)
            await cluster.wait_until_idle()

    asyncio.run(main())


def plan(
    cluster: ManagedCluster,
    name: str,
    *,
    tenant: str = DEFAULT_TENANT,
    max_tokens: int = 100,
    router: int = 0,
    **fields: object,
) -> GenerationRequest:
    prompting = Prompting(RequestId(name), (tuple(PROMPT.encode()),), "prompt", max_tokens=max_tokens)
    return cluster.frontends[router].plan(SamplingFields.model_validate(fields), prompting, tenant=tenant)


async def answer(cluster: ManagedCluster, request: GenerationRequest, *, router: int = 0) -> Ending:
    """Read a whole answer, which must be the prompt over and over."""
    deltas: list[Delta] = []
    async with cluster.frontends[router].generate(request) as stream:
        deltas = [delta async for delta in stream]
    tokens = [token for delta in deltas for token in delta.token_ids]
    expected = (PROMPT.encode() * 100)[: len(tokens)]
    assert bytes(tokens) == expected
    assert len(tokens) == request.sequences[0].sampling.max_tokens
    ending = deltas[-1].ending
    assert ending
    return ending


async def started(cluster: ManagedCluster, request: GenerationRequest) -> asyncio.Task[Ending]:
    """Begin to read an answer and return once its lease is there."""
    before = len(cluster.frontend._managed.link.held)  # type: ignore[union-attr]
    task = asyncio.create_task(answer(cluster, request))
    await eventually(lambda: len(cluster.frontend._managed.link.held) > before)  # type: ignore[union-attr]
    return task


def tenants(**settings: Tenant) -> ClusterConfig:
    keyed = {name: tenant.model_copy(update={"api_key_sha256": (hash_key(name),)}) for name, tenant in settings.items()}
    return ClusterConfig(tenants=keyed)


def test_a_lease_is_reserved_committed_and_given_back() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        reading = await started(cluster, plan(cluster, "r"))

        def is_held() -> bool:
            (engine,) = cluster.manager.manager.view().engines
            return (engine.reserved_blocks, engine.num_leases) == (BLOCKS_OF[100], 1) and engine.held_blocks > 0

        await eventually(is_held)
        view = cluster.manager.tenant(DEFAULT_TENANT)
        assert (view.reserved_blocks, view.num_running, view.admitted_total) == (BLOCKS_OF[100], 1, 1)
        await reading

    run(scenario)


def test_what_fits_nowhere_is_refused_at_once() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        with pytest.raises(NeverFitsError):
            await answer(cluster, plan(cluster, "big", max_tokens=400, tenant="acme"))

    run(scenario, config=tenants(acme=Tenant(ceiling=20)))


def test_what_does_not_fit_now_waits_for_room() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        first = await started(cluster, plan(cluster, "first", max_tokens=400))
        second = await started(cluster, plan(cluster, "second", max_tokens=400))
        third = asyncio.create_task(answer(cluster, plan(cluster, "third", max_tokens=400)))
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_waiting == 1)
        ending = await third
        assert ending.admission_s > 0.05
        assert ending.queued_ms >= 1000 * ending.admission_s
        assert (await first).admission_s < ending.admission_s
        await second

    run(scenario)


def test_who_waits_too_long_is_told_so_and_who_leaves_is_forgotten() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        holders = [await started(cluster, plan(cluster, f"h{i}", max_tokens=400)) for i in range(2)]
        impatient = plan(cluster, "impatient", max_tokens=400)
        with pytest.raises(DeadlineError):
            await answer(cluster, replace(impatient, timeout_s=0.05))
        gone = asyncio.create_task(answer(cluster, plan(cluster, "gone", max_tokens=400)))
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_waiting == 1)
        gone.cancel()
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_waiting == 0)
        await asyncio.gather(*holders)

    run(scenario)


def test_limits_are_each_refused_by_their_name() -> None:
    config = tenants(
        few=Tenant(max_running=1, max_waiting=0),
        slow=Tenant(max_requests_per_minute=1, max_waiting=0),
        small=Tenant(ceiling=10, max_waiting=1),
    )

    async def waiting(cluster: ManagedCluster, name: str, tenant: str) -> asyncio.Task[Ending]:
        task = asyncio.create_task(answer(cluster, plan(cluster, name, tenant=tenant)))
        await eventually(lambda: cluster.manager.tenant(tenant).num_waiting == 1)
        return task

    async def scenario(cluster: ManagedCluster) -> None:
        for tenant, error in (("few", RateLimitError), ("slow", RateLimitError), ("small", QuotaError)):
            first = await started(cluster, plan(cluster, f"{tenant}-1", tenant=tenant, max_tokens=150))
            in_line = [await waiting(cluster, f"{tenant}-w", tenant)] if tenant == "small" else []
            with pytest.raises(error) as caught:
                await answer(cluster, plan(cluster, f"{tenant}-2", tenant=tenant))
            assert caught.value.retry_after_s > 0
            await asyncio.gather(first, *in_line)

    run(scenario, config=config)


def test_a_full_cluster_with_a_full_queue_refuses() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        holders = [await started(cluster, plan(cluster, f"h{i}", tenant="acme", max_tokens=400)) for i in range(2)]
        with pytest.raises(CapacityError) as caught:
            await answer(cluster, plan(cluster, "late", tenant="acme", max_tokens=400))
        assert not isinstance(caught.value, (QuotaError, RateLimitError))
        await asyncio.gather(*holders)

    run(scenario, config=tenants(acme=Tenant(max_waiting=0)))


def test_new_limits_hold_at_once() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        holder = await started(cluster, plan(cluster, "h", tenant="acme", max_tokens=200))
        waiting = asyncio.create_task(answer(cluster, plan(cluster, "w", tenant="acme")))
        await eventually(lambda: cluster.manager.tenant("acme").num_waiting == 1)
        assert cluster.manager.server
        cluster.manager.server.set_tenants(TenantTable(tenants(acme=Tenant(max_running=2)).tenants).limits())
        await eventually(lambda: cluster.manager.tenant("acme").num_running == 2)
        await asyncio.gather(holder, waiting)

    run(scenario, config=tenants(acme=Tenant(max_running=1)))


def test_requests_of_two_tenants_may_have_one_id() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        both = [asyncio.create_task(answer(cluster, plan(cluster, "same", tenant=name))) for name in ("acme", "beta")]
        await asyncio.gather(*both)

    run(scenario, config=tenants(acme=Tenant(), beta=Tenant()))


def test_nobody_aborts_anothers_request() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        reading = await started(cluster, plan(cluster, "r", tenant="acme"))
        assert not cluster.frontend.abort(RequestId("r"), tenant="beta")
        await reading

    run(scenario, config=tenants(acme=Tenant(), beta=Tenant()))


def test_a_prefix_is_hit_by_its_tenant_and_its_group_but_by_nobody_else() -> None:
    config = tenants(acme=Tenant(), beta=Tenant(prefix_group="g"), gamma=Tenant(prefix_group="g"))

    async def cached(cluster: ManagedCluster, name: str, tenant: str) -> int:
        request = plan(cluster, name, tenant=tenant, max_tokens=8)
        long = tuple(PROMPT.encode() * 12)
        sequence = replace(request.sequences[0], prompt_token_ids=long)
        deltas = []
        async with cluster.frontend.generate(replace(request, sequences=(sequence,))) as stream:
            deltas = [delta async for delta in stream]
        ending = deltas[-1].ending
        assert ending
        return ending.receipt.prompt_tokens_cached

    async def scenario(cluster: ManagedCluster) -> None:
        assert await cached(cluster, "a1", "acme") == 0
        assert await cached(cluster, "a2", "acme") == 80
        assert await cached(cluster, "b1", "beta") == 0
        assert await cached(cluster, "c1", "gamma") == 80

    run(scenario, config=config)


def test_streams_go_on_and_new_ones_start_while_the_manager_is_dead() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        running = await started(cluster, plan(cluster, "running", max_tokens=200))
        await cluster.manager.kill()
        await answer(cluster, plan(cluster, "alone", max_tokens=50))
        over = await started(cluster, plan(cluster, "over", max_tokens=200))
        await cluster.manager.start()
        await eventually(lambda: cluster.frontend._managed.link.is_up)  # type: ignore[union-attr]
        await eventually(lambda: cluster.manager.manager.view().drift_blocks == 0 and _reserved(cluster) > 0)
        await asyncio.gather(running, over)

    run(scenario)


def test_who_waits_when_the_manager_dies_is_served_all_the_same() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        holders = [await started(cluster, plan(cluster, f"h{i}", max_tokens=400)) for i in range(2)]
        waiting = asyncio.create_task(answer(cluster, plan(cluster, "waiting", max_tokens=400)))
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_waiting == 1)
        await cluster.manager.kill()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await cluster.manager.start()
        await asyncio.gather(*holders, waiting)

    run(scenario)


def test_a_router_alone_stays_inside_the_tenants_share() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        share = SafeShare(blocks=10)
        await eventually(lambda: cluster.frontend._managed.link.shares.get("acme") == share)  # type: ignore[union-attr]
        await cluster.manager.kill()
        first = await started(cluster, plan(cluster, "first", tenant="acme"))
        second = asyncio.create_task(answer(cluster, plan(cluster, "second", tenant="acme")))
        await asyncio.sleep(0.1)
        assert len(cluster.frontend._managed.link.held) == 1  # type: ignore[union-attr]
        await asyncio.gather(first, second)
        await cluster.manager.start()

    run(scenario, config=tenants(acme=Tenant(ceiling=10)))


def test_a_router_alone_takes_no_more_requests_a_minute_than_its_share() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        link = cluster.frontend._managed and cluster.frontend._managed.link
        assert link
        await eventually(lambda: "acme" in link.shares)
        await cluster.manager.kill()
        for number in range(2):
            await answer(cluster, plan(cluster, f"r{number}", tenant="acme"))
        with pytest.raises(DeadlineError):
            await answer(cluster, replace(plan(cluster, "r2", tenant="acme"), timeout_s=0.3))
        await cluster.manager.start()
        await eventually(lambda: link.is_up)

    run(scenario, config=tenants(acme=Tenant(max_requests_per_minute=2)))


def test_a_manager_that_was_just_started_is_told_what_runs_before_it_is_asked_anything() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        links = [frontend._managed.link for frontend in cluster.frontends if frontend._managed]
        running = await started(cluster, plan(cluster, "running", max_tokens=400))
        await eventually(lambda: bool(links[0].shares))
        share = links[0].shares
        await cluster.manager.kill()
        await eventually(lambda: not any(link.is_up for link in links))
        cluster.manager.learn_s = 3.0
        await cluster.manager.start()
        await eventually(lambda: _reserved(cluster) == BLOCKS_OF[400])
        assert not any(link.is_up for link in links)
        await answer(cluster, plan(cluster, "meanwhile", max_tokens=50))
        assert links[0].shares == share, "of a manager that does not know all routers yet"
        await eventually(lambda: all(link.is_up for link in links))
        await running

    run(scenario, num_routers=2)


def test_what_was_decided_without_the_manager_stays_reserved_when_it_is_back() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        managed = cluster.frontend._managed
        assert managed
        await cluster.manager.kill()
        await eventually(lambda: not managed.link.is_up)
        reading = await started(cluster, plan(cluster, "alone", max_tokens=400))
        await cluster.manager.start()
        await eventually(lambda: managed.link.is_up and not managed.link._to_release)
        assert _reserved(cluster) == BLOCKS_OF[400]
        assert not reading.done()
        assert cluster.manager.manager._ledger.promised_to([managed.link._router_id])
        await reading

    run(scenario)


def test_a_router_that_knows_no_bounds_waits_for_a_manager_that_learns() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        managed = cluster.frontend._managed
        assert managed
        await cluster.manager.kill()
        await eventually(lambda: not managed.link.is_up)
        managed.link.shares = {}
        cluster.manager.learn_s = 3.0
        await cluster.manager.start()
        await eventually(lambda: managed.link.is_learning)
        waiting = asyncio.create_task(answer(cluster, plan(cluster, "waiting", max_tokens=50)))
        await asyncio.sleep(0.3)
        assert not managed.link.held
        await waiting
        assert managed.link.is_up

    run(scenario)


def test_every_router_has_noticed_that_a_manager_is_gone_when_the_next_one_stops_learning() -> None:
    assert manager_link.BEAT_S + manager_link.BEAT_TIMEOUT_S + manager_link._RETRY_S < LEARN_S
    assert STALL_S < manager_link.BEAT_TIMEOUT_S


def _reserved(cluster: ManagedCluster) -> int:
    return sum(engine.reserved_blocks for engine in cluster.manager.manager.view().engines)


def test_an_idle_engine_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SILENCE_S", 0.8)
    monkeypatch.setattr(pacing, "HEARTBEAT_S", 0.1)

    async def scenario(cluster: ManagedCluster) -> None:
        (engine,) = cluster.manager.manager._ledger.engines.values()
        assert engine.facts
        before = engine.facts.epoch
        await asyncio.sleep(2.0)
        assert engine.is_connected
        assert engine.facts.epoch == before, "it had to connect anew"

    run(scenario)


def test_where_engines_are_many_each_reports_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "REPORTS_PER_S", 1.0)

    async def scenario(cluster: ManagedCluster) -> None:
        (engine,) = cluster.manager.manager._ledger.engines.values()
        await eventually(lambda: engine.num_deltas > 0)
        before, began_s = engine.num_deltas, time.monotonic()
        for number in range(8):
            await answer(cluster, plan(cluster, f"r{number}"))
        assert engine.num_deltas - before <= time.monotonic() - began_s + 1

    run(scenario)


def test_an_engine_that_is_almost_full_tells_of_its_leases_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "REPORTS_PER_S", 0.01)  # its next turn is in a hundred seconds
    monkeypatch.setattr(pacing, "answer_period_s", lambda period_s: 0.05)

    async def scenario(cluster: ManagedCluster) -> None:
        (engine,) = cluster.manager.manager._ledger.engines.values()
        sizes = {"a": 400, "b": 100, "c": 400}
        running = [await started(cluster, plan(cluster, name, max_tokens=size)) for name, size in sizes.items()]
        await eventually(lambda: [lease.used_blocks for lease in engine.leases.values()] == [26, 7, 26])
        # The end of the second is told at once, too, and answered with the new pace.
        monkeypatch.setattr(pacing, "REPORTS_PER_S", 250)
        await asyncio.gather(*running)

    run(scenario)


@pytest.mark.parametrize("cut", ["up", "down", "both", "broken"])
def test_an_engine_that_is_cut_off_comes_back_with_all_it_runs(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "SILENCE_S", 0.2)
    monkeypatch.setattr(pacing, "HEARTBEAT_S", 0.05)

    async def scenario(cluster: ManagedCluster) -> None:
        running = await started(cluster, plan(cluster, "running", max_tokens=400))
        await eventually(lambda: _reserved(cluster) == BLOCKS_OF[400])
        wire = cluster.engine.wire
        if cut == "broken":
            wire.break_connections()
        wire.swallows_up, wire.swallows_down = cut in ("up", "both"), cut in ("down", "both")
        # Noticed by its silence, or at once where the connection broke.
        (engine,) = cluster.manager.manager._ledger.engines.values()
        await eventually(lambda: not engine.is_connected)
        before = wire.num_relayed
        wire.mend()
        await eventually(lambda: wire.num_relayed > before and _reserved(cluster) == BLOCKS_OF[400])
        assert not running.done(), "what runs goes on meanwhile"
        await running

    run(scenario, relays_engines=True)


def test_two_routers_share_one_ledger() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        one = asyncio.create_task(answer(cluster, plan(cluster, "same", max_tokens=200), router=0))
        two = asyncio.create_task(answer(cluster, plan(cluster, "other", max_tokens=200, router=1), router=1))
        await eventually(lambda: cluster.manager.tenant(DEFAULT_TENANT).num_running == 2)
        await asyncio.gather(one, two)

    run(scenario, num_routers=2)


def test_the_roomiest_of_several_engines_gets_the_next_request() -> None:
    infos = {name: replace(DEFAULT_INFO, engine_id=name) for name in ("a", "b")}

    async def scenario(cluster: ManagedCluster) -> None:
        endings = [await started(cluster, plan(cluster, f"r{i}", max_tokens=200)) for i in range(4)]
        engines = [ending.engine_id for ending in await asyncio.gather(*endings)]
        assert sorted(engines) == ["a", "a", "b", "b"]

    run(scenario, engines=infos)
