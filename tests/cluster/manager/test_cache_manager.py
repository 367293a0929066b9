"""Who is admitted when, where, and after how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.lifetimes import ROUTER_TIMEOUT_S
from kvorum.cluster.manager.types import (
    AdmitRequest,
    EngineFacts,
    Granted,
    LeaseChanges,
    LeaseRecord,
    Outcome,
    Refusal,
    Refused,
    TenantLimits,
    Waiting,
)
from kvorum.workers.governance import NUM_WORTH_BINS, EngineReport, LeaseUse, TenantUse

LEASE_S, GRACE_S = 10.0, 5.0


def manager_of(*tenants: TenantLimits, engines: int = 1, blocks: int = 40, sequences: int = 100) -> CacheManager:
    manager = CacheManager(tenants or (TenantLimits("t"),), lease_s=LEASE_S, engine_grace_s=GRACE_S)
    for number in range(engines):
        connect(manager, f"e{number}", blocks=blocks, sequences=sequences)
    return manager


def connect(
    manager: CacheManager,
    name: str,
    *leases: LeaseUse,
    blocks: int = 40,
    sequences: int = 100,
    now_s: float = 0.0,
    epoch: int = 1,
) -> None:
    manager.connect(EngineFacts(name, epoch, blocks, sequences), EngineReport(blocks, blocks, 0), leases, now_s)
    for engine_id, directive in manager.take_directives(now_s).items():
        manager.acknowledge(engine_id, epoch, directive.number)


def request(name: str, blocks: int = 10, tenant: str = "t", wait_s: float = 30.0) -> AdmitRequest:
    return AdmitRequest(name, tenant, (blocks,), 16 * blocks, wait_s)


def ask(manager: CacheManager, *args: object, now_s: float = 0.0, **kwargs: object) -> Outcome:
    return manager.admit(request(*args, **kwargs), now_s)  # type: ignore[arg-type]  # of `request`


def engine_of(outcome: Outcome) -> str:
    assert isinstance(outcome, Granted), outcome
    return outcome.engine_id


def served(manager: CacheManager, now_s: float) -> list[str]:
    manager.tick(now_s)
    return [outcome.lease_id for outcome in manager.take_outcomes() if isinstance(outcome, Granted)]


class TestChoice:
    def test_load_is_spread(self) -> None:
        manager = manager_of(engines=4)
        assert sorted(engine_of(ask(manager, f"r{number}")) for number in range(4)) == ["e0", "e1", "e2", "e3"]

    def test_the_engine_with_the_prompts_beginning_is_preferred(self) -> None:
        manager = manager_of(engines=8)
        first = engine_of(manager.admit(replace(request("a"), prefix_runs=(1, 2, 3)), 0.0))
        assert engine_of(manager.admit(replace(request("b"), prefix_runs=(1, 2, 3)), 0.0)) == first
        assert engine_of(manager.admit(replace(request("c"), prefix_runs=(7,)), 0.0)) != first

    def test_the_dear_engine_is_avoided(self) -> None:
        manager = manager_of(engines=2)
        manager.take_report("e1", 1, 1, EngineReport(40, 40, 0, price=0.1), LeaseChanges(), 0.0)
        assert [engine_of(ask(manager, f"r{number}", 5)) for number in range(3)] == ["e0"] * 3

    def test_an_engine_on_which_long_prompts_wait_is_avoided_until_they_are_read(self) -> None:
        manager = manager_of(engines=2)
        manager.take_report("e0", 1, 1, EngineReport(40, 40, 0, unread_tokens=50_000), LeaseChanges(), 0.0)
        assert [engine_of(ask(manager, f"r{number}", 5)) for number in range(3)] == ["e1"] * 3
        manager.take_report("e0", 1, 2, EngineReport(40, 40, 0), LeaseChanges(), 0.0)
        assert engine_of(ask(manager, "later", 5)) == "e0"

    def test_what_was_just_sent_to_an_engine_counts_until_it_arrives_there(self) -> None:
        manager = manager_of(engines=2, blocks=4000)
        long = AdmitRequest("long", "t", (10,), 100_000, 30.0)
        first = engine_of(manager.admit(long, 0.0))
        assert [engine_of(ask(manager, f"r{number}", 100)) != first for number in range(3)] == [True] * 3
        arrived = LeaseChanges((LeaseUse("long", "t", 10),), ())
        manager.take_report(first, 1, 1, EngineReport(4000, 4000, 0), arrived, 0.0)
        assert engine_of(ask(manager, "later", 100)) == first

    def test_all_of_a_request_goes_to_one_engine_with_room_for_its_sequences(self) -> None:
        manager = manager_of(engines=2, sequences=2)
        assert isinstance(manager.admit(AdmitRequest("a", "t", (1, 1, 1), 9, 9.0), 0.0), Refused)
        engine_of(ask(manager, "b", 1))
        other = engine_of(ask(manager, "c", 1))
        manager.release("b", 0.0)
        assert engine_of(manager.admit(AdmitRequest("d", "t", (1, 1), 9, 9.0), 0.0)) != other


class TestLine:
    def test_order_within_a_tenant_is_strict(self) -> None:
        manager = manager_of()
        ask(manager, "running", 35)
        assert ask(manager, "big", 30) == Waiting("big")
        assert ask(manager, "small", 2) == Waiting("small")
        manager.release("running", 1.0)
        assert served(manager, 1.0) == ["big", "small"]

    @pytest.mark.parametrize("has_ended", [False, True])
    def test_room_is_free_as_soon_as_the_engine_or_a_router_that_saw_the_end_says_so(self, has_ended: bool) -> None:
        manager = manager_of()
        ask(manager, "running", 35)
        full = EngineReport(40, 5, 0, tenants={"t": TenantUse(35, 35)})
        manager.take_report("e0", 1, 1, full, LeaseChanges((LeaseUse("running", "t", 35),)), 1.0)
        assert ask(manager, "next", 30) == Waiting("next")
        manager.release("running", 2.0, has_ended=has_ended)
        assert served(manager, 2.0) == (["next"] if has_ended else [])
        free = EngineReport(40, 40, 0)
        manager.take_report("e0", 1, 2, free, LeaseChanges((), ("running",)), 3.0)
        assert served(manager, 3.0) == ([] if has_ended else ["next"])
        manager.audit()

    def test_another_tenants_small_request_passes_a_big_one_only_for_a_while(self) -> None:
        manager = manager_of(TenantLimits("t"), TenantLimits("u"))
        ask(manager, "u0", 20, "u")
        ask(manager, "u1", 15, "u")
        ask(manager, "big", 40)
        engine_of(ask(manager, "u2", 5, "u"))
        manager.tick(2.0)
        manager.release("u1", 2.0)
        assert ask(manager, "u3", 5, "u", now_s=2.1) == Waiting("u3")
        manager.release("u0", 3.0)
        manager.release("u2", 3.0)
        assert served(manager, 3.0) == ["big"]
        manager.release("big", 4.0)
        assert served(manager, 4.0) == ["u3"]

    def test_tenants_get_turns_by_weight(self) -> None:
        manager = manager_of(TenantLimits("t"), TenantLimits("u", weight=3.0), blocks=10)
        ask(manager, "first", 10)
        for number in range(8):
            ask(manager, f"t{number}", 10)
            ask(manager, f"u{number}", 10, "u")
        running, turns = "first", []
        for step in range(8):
            manager.release(running, 0.1 * step)
            (running,) = served(manager, 0.1 * step)
            turns.append(running[0])
        assert (turns.count("t"), turns.count("u")) == (2, 6)

    def test_a_deadline_ends_the_wait(self) -> None:
        manager = manager_of()
        ask(manager, "running", 40)
        ask(manager, "late", wait_s=3.0)
        manager.tick(2.9)
        assert manager.take_outcomes() == []
        manager.tick(3.0)
        (outcome,) = manager.take_outcomes()
        assert isinstance(outcome, Refused)
        assert outcome.reason is Refusal.DEADLINE

    def test_who_hung_up_is_not_served(self) -> None:
        manager = manager_of()
        ask(manager, "running", 40)
        ask(manager, "gone")
        manager.cancel("gone")
        manager.release("running", 1.0)
        assert served(manager, 1.0) == []

    def test_retry_after_follows_the_rate_of_releases(self) -> None:
        manager = manager_of(TenantLimits("t", max_waiting=0))
        for number in range(30):
            engine_of(ask(manager, f"r{number}", 20, now_s=float(number)))
            manager.release(f"r{number}", float(number) + 0.5)
        ask(manager, "running", 40, now_s=30.0)
        outcome = ask(manager, "more", 40, now_s=30.0)
        assert isinstance(outcome, Refused)
        assert outcome.retry_after_s
        # 20 blocks a second for 30 seconds, seen through a memory of 30 seconds: 1 - 1/e of that.
        assert 2.0 < outcome.retry_after_s < 4.0


class TestLimits:
    def test_requests_run_up_to_the_limit_and_the_next_waits_for_one_to_end(self) -> None:
        manager = manager_of(TenantLimits("t", max_running=2))
        for name in ("a", "b", "c"):
            ask(manager, name)
        manager.release("a", 1.0)
        assert served(manager, 1.0) == ["c"]

    def test_too_many_a_minute_are_told_when_to_come_again(self) -> None:
        manager = manager_of(TenantLimits("t", max_requests_per_minute=2))
        outcomes = [ask(manager, f"r{number}", 1) for number in range(3)]
        assert isinstance(outcomes[2], Refused)
        assert (outcomes[2].reason, outcomes[2].retry_after_s) == (Refusal.RATE, 30.0)

    def test_allowances_give_way_to_a_request_once_acknowledged(self) -> None:
        manager = manager_of(TenantLimits("t", ceiling=32))
        worths = (30, *[0] * (NUM_WORTH_BINS - 1))
        report = EngineReport(40, 10, 0, tenants={"t": TenantUse(30, 0, 30, 0, worths)})
        manager.take_report("e0", 1, 1, report, LeaseChanges(), 5.0)
        manager.tick(5.0)
        given_away = manager.take_directives(5.0)["e0"]
        assert given_away.allowances == {"t": 30}
        assert ask(manager, "a", 20, now_s=6.0) == Waiting("a")
        lowered = manager.take_directives(6.0)["e0"]
        assert lowered.allowances["t"] <= 12
        assert served(manager, 6.1) == []
        manager.acknowledge("e0", 1, lowered.number)
        assert served(manager, 6.2) == ["a"]
        assert manager.take_directives(6.2)["e0"].reclaim_blocks == 20

    def test_engines_that_connect_may_go_on_with_what_elastic_sequences_hold(self) -> None:
        """A manager that was just started must not have them shrunk where the ceiling has room."""
        manager = CacheManager([TenantLimits("t", ceiling=100)], lease_s=LEASE_S, engine_grace_s=GRACE_S)
        first = dict[str, int]()
        for name in ("e0", "e1", "e2"):
            report = EngineReport(40, 20, 0, tenants={"t": TenantUse(20, 4, 16, 0)})
            manager.connect(EngineFacts(name, 1, 40, 100), report, [LeaseUse(f"of-{name}", "t", 4)], 0.0)
            first |= {engine: told.allowances["t"] for engine, told in manager.take_directives(0.0).items()}
        assert min(first.values()) >= 16
        assert sum(first.values()) + 3 * 4 <= 100
        manager.audit()

    def test_tenants_take_turns_at_having_allowances_set(self) -> None:
        """Among many engines one takes a while, and nobody is admitted meanwhile."""
        manager = manager_of(TenantLimits("t", ceiling=0.9), TenantLimits("u", ceiling=0.9))
        worths = (20, *[0] * (NUM_WORTH_BINS - 1))
        report = EngineReport(40, 10, 0, tenants=dict.fromkeys(("t", "u"), TenantUse(15, 0, 15, 0, worths)))
        manager.take_report("e0", 1, 1, report, LeaseChanges(), 5.0)
        set_at = dict[str, float]()
        for tick in range(20):
            now_s = 5.0 + tick / 10
            manager.tick(now_s)
            for told in manager.take_directives(now_s).values():
                for tenant, blocks in told.allowances.items():
                    if blocks >= 20:
                        set_at.setdefault(tenant, now_s)
        assert sorted(set_at.values()) == [5.0, 5.5]

    def test_many_engines_are_told_a_few_between_ticks_unless_somebody_waits(self) -> None:
        manager = manager_of(engines=20)
        manager.set_tenants([TenantLimits("t"), TenantLimits("u", ceiling=0.5)])
        manager.tick(1.0)
        told = [[*manager.take_directives(1.0)], [*manager.take_directives(1.0)]]
        manager.tick(1.05)
        told += [[*manager.take_directives(1.05)], [*manager.take_directives(1.05)]]
        assert [len(names) for names in told] == [4, 0, 4, 0]
        assert ask(manager, "a", tenant="u") == Waiting("a")  # no engine that may take it is sure to know of its limit
        told += [[*manager.take_directives(1.05)] for _ in range(3)]
        assert [len(names) for names in told[4:]] == [4, 4, 4]
        assert len({name for names in told for name in names}) == 20

    def test_who_has_to_reclaim_is_told_at_once(self) -> None:
        manager = manager_of(engines=20)
        manager.set_tenants([TenantLimits("t"), TenantLimits("u", ceiling=0.5)])
        manager.tick(1.0)
        assert len(manager.take_directives(1.0)) == 4
        full = EngineReport(40, 5, 0, tenants={"u": TenantUse(35, 0, 35)})
        for number in range(20):
            manager.take_report(f"e{number}", 1, 1, full, LeaseChanges(), 1.0)
        chosen = engine_of(ask(manager, "a", now_s=1.0))
        assert {name: told.reclaim_blocks for name, told in manager.take_directives(1.0).items()} == {chosen: 10}

    def test_a_report_of_what_changed_leaves_the_rest_as_it_was(self) -> None:
        manager = manager_of(TenantLimits("t"), TenantLimits("u"))
        both = EngineReport(40, 10, 0, tenants={"t": TenantUse(20), "u": TenantUse(10)})
        manager.take_report("e0", 1, 1, both, LeaseChanges(), 1.0)
        manager.take_report("e0", 1, 2, EngineReport(40, 5, 0, tenants={"u": TenantUse(15)}), LeaseChanges(), 2.0)
        assert {tenant.tenant: tenant.held_blocks for tenant in manager.view().tenants} == {"t": 20, "u": 15}

    def test_floors_beyond_the_cluster_are_scaled_down(self) -> None:
        manager = manager_of(TenantLimits("t", floor=60), TenantLimits("u", floor=60))
        assert [tenant.floor_blocks for tenant in manager.view().tenants] == [20, 20]
        engine_of(ask(manager, "a", 20))
        refused = ask(manager, "b", 21)
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.NEVER_FITS

    def test_requests_of_a_tenant_that_is_gone_are_refused(self) -> None:
        manager = manager_of(TenantLimits("t"), TenantLimits("u"))
        ask(manager, "running", 40)
        ask(manager, "orphan", 1, "u")
        manager.set_tenants([TenantLimits("t")])
        (outcome,) = manager.take_outcomes()
        assert isinstance(outcome, Refused)
        assert outcome.reason is Refusal.UNKNOWN_TENANT


class TestRecovery:
    def test_snapshots_and_renewals_give_the_same_books_in_any_order(self) -> None:
        record = LeaseRecord("a", "t", "e0", (10, 10))
        first, second = (CacheManager((TenantLimits("t"),), lease_s=LEASE_S, engine_grace_s=GRACE_S) for _ in range(2))
        first.renew("r", [record], 0.0)
        connect(first, "e0", LeaseUse("a", "t", 10))
        connect(second, "e0", LeaseUse("a", "t", 10))
        second.renew("r", [record], 0.0)
        assert first.view() == second.view()
        assert first.view().engines[0].reserved_blocks == 20

    def test_while_an_engine_is_missing_only_what_is_certainly_free_is_given(self) -> None:
        manager = CacheManager((TenantLimits("t"),), lease_s=LEASE_S, engine_grace_s=GRACE_S)
        manager.renew("r", [LeaseRecord("a", "t", "gone", (10,))], 0.0)
        manager.connect(EngineFacts("e0", 1, 40, 9), EngineReport(40, 5, 3), (), 0.0)
        assert ask(manager, "b", 10) == Waiting("b")
        assert served(manager, GRACE_S) == ["b"]

    def test_a_released_lease_does_not_come_back_with_a_late_renewal(self) -> None:
        manager = manager_of()
        ask(manager, "a")
        manager.release("a", 1.0)
        manager.renew("r", [LeaseRecord("a", "t", "e0", (10,))], 2.0)
        assert manager.view().engines[0].reserved_blocks == 0

    def test_a_late_commit_counts_until_the_engine_says_that_it_ended(self) -> None:
        manager = manager_of()
        ask(manager, "a")
        manager.release("a", 1.0)
        report = EngineReport(40, 30, 0)
        manager.take_report("e0", 1, 1, report, LeaseChanges((LeaseUse("a", "t", 10),)), 2.0)
        assert manager.view().engines[0].reserved_blocks == 10
        manager.take_report("e0", 1, 2, report, LeaseChanges((), ("a",)), 3.0)
        assert manager.view().engines[0].reserved_blocks == 0

    def test_a_gap_in_the_reports_asks_for_a_snapshot_and_a_repetition_does_not(self) -> None:
        manager, report = manager_of(), EngineReport(40, 40, 0)
        assert manager.take_report("e0", 1, 1, report, LeaseChanges(), 0.0)
        assert manager.take_report("e0", 1, 1, report, LeaseChanges(), 0.0)
        assert not manager.take_report("e0", 1, 3, report, LeaseChanges(), 0.0)
        assert not manager.take_report("unknown", 1, 1, report, LeaseChanges(), 0.0)

    def test_the_oldest_lease_grows_old_until_it_is_given_back_however_often_it_is_renewed(self) -> None:
        manager = manager_of()
        assert manager.oldest_lease_s(5.0) == 0.0
        ask(manager, "old", now_s=10.0)
        ask(manager, "new", now_s=14.0)
        manager.renew("r", [LeaseRecord("old", "t", "e0", (10,)), LeaseRecord("new", "t", "e0", (10,))], 15.0)
        changes = LeaseChanges((LeaseUse("old", "t", 10),), ())
        manager.take_report("e0", 1, 1, EngineReport(40, 30, 0), changes, 16.0)
        assert manager.oldest_lease_s(18.0) == 8.0
        manager.take_report("e0", 1, 2, EngineReport(40, 40, 0), LeaseChanges((), ("old",)), 18.0)
        manager.release("old", 18.0)
        assert manager.oldest_lease_s(18.0) == 4.0

    def test_a_lease_that_nobody_renews_ends(self) -> None:
        manager = manager_of()
        ask(manager, "a", 40)
        ask(manager, "b", 40)
        assert served(manager, LEASE_S - 0.1) == []
        assert served(manager, LEASE_S) == ["b"]

    def test_the_leases_of_a_router_that_is_gone_end_before_their_time(self) -> None:
        manager = CacheManager((TenantLimits("t"),), lease_s=1000.0, engine_grace_s=GRACE_S)
        connect(manager, "e0")
        assert [manager.renew(name, [], 0.0) for name in ("gone", "here", "here")] == [True, True, False]
        for name in ("gone", "here"):
            manager.admit(AdmitRequest(f"of-{name}", "t", (10,), 160, 0.0, router_id=name), 0.0)
        changes = LeaseChanges((LeaseUse("of-here", "t", 10), LeaseUse("of-gone", "t", 10)))
        manager.take_report("e0", 1, 1, EngineReport(40, 20, 0), changes, 1.0)
        manager.renew("here", [], 0.9 * ROUTER_TIMEOUT_S)
        manager.tick(ROUTER_TIMEOUT_S)
        assert manager.safe_shares()["t"].blocks == 40
        assert manager.view().engines[0].reserved_blocks == 20  # the engine still has its sequences
        changes = LeaseChanges((), ("of-here", "of-gone"))
        manager.take_report("e0", 1, 2, EngineReport(40, 40, 0), changes, ROUTER_TIMEOUT_S)
        assert manager.view().engines[0].reserved_blocks == 10
        assert manager.renew("gone", [], ROUTER_TIMEOUT_S), "it has to tell what it holds"
        assert manager.safe_shares()["t"].blocks == 20

    def test_nothing_is_granted_to_a_router_that_is_gone(self) -> None:
        manager = CacheManager((TenantLimits("t"),), lease_s=1000.0, engine_grace_s=GRACE_S)
        connect(manager, "e0")
        manager.renew("gone", [], 0.0)
        for name in ("held", "waits"):
            manager.admit(AdmitRequest(name, "t", (40,), 640, 100.0, router_id="gone"), 0.0)
        assert served(manager, ROUTER_TIMEOUT_S) == []
        assert manager.view().engines[0].reserved_blocks == 0
        manager.admit(AdmitRequest("late", "t", (40,), 640, 100.0, router_id="gone"), 20.0)
        assert manager.view().engines[0].reserved_blocks == 40
        manager.tick(20.0 + ROUTER_TIMEOUT_S)
        assert manager.view().engines[0].reserved_blocks == 0

    def test_a_router_that_comes_back_in_time_keeps_its_leases(self) -> None:
        manager = CacheManager((TenantLimits("t"),), lease_s=1000.0, engine_grace_s=GRACE_S)
        connect(manager, "e0")
        manager.renew("r", [], 0.0)
        manager.admit(AdmitRequest("a", "t", (10,), 160, 0.0, router_id="r"), 0.0)
        manager.resume(2 * ROUTER_TIMEOUT_S)  # it was the manager that stood still
        manager.tick(2 * ROUTER_TIMEOUT_S)
        assert manager.view().engines[0].reserved_blocks == 10

    def test_what_a_router_decided_alone_leaves_the_line(self) -> None:
        manager = manager_of(engines=2)
        for name in ("e0", "e1"):
            ask(manager, f"fills-{name}", 40)
        assert ask(manager, "x") == Waiting("x")
        manager.renew("r", [LeaseRecord("x", "t", "e1", (10,))], 1.0)
        for name in ("e0", "e1"):
            manager.release(f"fills-{name}", 1.0)
        assert served(manager, 1.0) == []
        assert sum(engine.reserved_blocks for engine in manager.view().engines) == 10

    def test_what_a_renewal_brings_lowers_the_allowances_of_its_tenant(self) -> None:
        manager = CacheManager([TenantLimits("t", ceiling=40)], lease_s=LEASE_S, engine_grace_s=GRACE_S)
        report = EngineReport(40, 10, 0, tenants={"t": TenantUse(30, 0, 30, 0, (30, *[0] * (NUM_WORTH_BINS - 1)))})
        manager.connect(EngineFacts("e0", 1, 40, 100), report, (), 0.0)
        assert manager.take_directives(0.0)["e0"].allowances["t"] >= 30
        manager.acknowledge("e0", 1, 1)
        manager.renew("r", [LeaseRecord("a", "t", "e0", (20,))], 0.1)
        manager.tick(2.0)
        assert manager.take_directives(2.0)["e0"].allowances["t"] <= 20

    def test_without_any_engine_one_waits_at_the_start_and_is_refused_later(self) -> None:
        manager = CacheManager((TenantLimits("t"),), lease_s=LEASE_S, engine_grace_s=GRACE_S)
        assert ask(manager, "a") == Waiting("a")
        connect(manager, "e0", now_s=1.0)
        assert served(manager, 1.0) == ["a"]
        manager.disconnect("e0", 1, 2.0)
        manager.release("a", 2.0)
        manager.tick(20.0)
        refused = ask(manager, "b", now_s=20.0)
        assert isinstance(refused, Refused)
        assert refused.reason is Refusal.NO_ENGINE
