"""Who is shrunk for whom, step by step on the fake executor: blocks of four slots, exact numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvorum.kvstore.errors import NeverFitsError
from kvorum.kvstore.pricing import Rule, RuleKind, parse_rule
from kvorum.kvstore.store import KVStore
from kvorum.workers.composer import SchedulerLimits
from kvorum.workers.fake_engine import FakeExecutor
from kvorum.workers.governance import Directive, LadderStep, LeaseTerms, worth_bin
from kvorum.workers.request import EngineRequest, KVParams, Receipt, RequestId
from kvorum.workers.scheduler import Scheduler
from kvorum.workers.sequence import Sequence
from kvtest.engines import request

SAME_CAP = Rule(RuleKind.SAME_CAP)
BLOCK_SIZE = 4
LEAST = 5  # blocks: 16 tokens and the one that comes
ELASTIC = KVParams("sliding")


class Bench:
    """A scheduler stepped by hand."""

    def __init__(
        self, *, num_blocks: int = 40, max_num_seqs: int = 8, max_offloaded_blocks: int = 0, rule: Rule = SAME_CAP
    ) -> None:
        self.store = KVStore(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=False,
            max_offloaded_blocks=max_offloaded_blocks,
        )
        limits = SchedulerLimits(
            max_model_len=1000, vocab_size=1000, max_num_seqs=max_num_seqs, max_num_batched_tokens=1000
        )
        self.scheduler = Scheduler(self.store, limits, rule=rule)
        self.executor = FakeExecutor(block_size=BLOCK_SIZE)
        self.receipts: dict[str, Receipt] = {}
        self.floor_budget = 0

    def submit(self, item: EngineRequest) -> Sequence:
        self.scheduler.check(item)
        self.scheduler.add(item, now_s=0.0)
        return self.scheduler._by_request[item.request_id]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            plan = self.scheduler.schedule(now_s=0.0)
            if plan is not None:
                self.scheduler.apply(plan, self.executor.carry_out(plan))
            queries = self.scheduler.budget_queries()
            self.scheduler.set_budgets(
                {seq_id: max(query.budget, self.floor_budget) for seq_id, query in queries.items()}
            )
            curves = self.scheduler.curve_queries()
            self.scheduler.set_curves({seq_id: self.executor.curve(query) for seq_id, query in curves.items()})
            for output in self.scheduler.release({}, now_s=0.0):
                assert output.receipt is not None
                self.receipts[output.request_id] = output.receipt
            self.scheduler.audit()

    def finish(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("work is left")


def ask(
    name: str,
    prompt_tokens: int,
    *,
    max_tokens: int | None = None,
    kv: KVParams = ELASTIC,
    tenant: str = "",
    reserved: int = 0,
    weight: float = 1.0,
    priority: int = 0,
) -> EngineRequest:
    """Return a request; one that is elastic generates for as long as the test looks at it."""
    if max_tokens is None:
        max_tokens = 400 if kv == ELASTIC else 20
    prompt = [(7 * i + len(name)) % 1000 for i in range(prompt_tokens)]
    terms = LeaseTerms(f"lease-{name}", tenant, reserved, weight, least_tokens=16)
    return replace(request(name, prompt, max_tokens=max_tokens, kv=kv, priority=priority), terms=terms)


def held(*sequences: Sequence) -> list[int]:
    return [0 if sequence.kv is None else len(sequence.kv.block_ids) for sequence in sequences]


def budget_of(sequence: Sequence) -> int | None:
    assert sequence.kv is not None
    return sequence.kv.budget


class TestShrinking:
    def test_with_room_an_elastic_sequence_is_held_to_nothing(self) -> None:
        bench = Bench()
        bench.submit(ask("a", 40, max_tokens=60))
        bench.finish()
        receipt = bench.receipts["a"]
        assert (receipt.kv_budget, receipt.kv_tokens_evicted, receipt.shrinks) == (None, 0, 0)

    def test_alone_in_a_short_pool_it_is_held_to_the_pool(self) -> None:
        bench = Bench(num_blocks=12)
        bench.submit(ask("a", 40, max_tokens=60))
        bench.finish()
        receipt = bench.receipts["a"]
        assert receipt.kv_budget == 12 * BLOCK_SIZE - 1
        assert (receipt.kv_tokens_held, receipt.preemptions, receipt.shrinks) == (47, 0, 1)

    def test_a_newcomer_that_opted_out_takes_what_it_needs_and_a_little_more(self) -> None:
        bench = Bench(num_blocks=100)
        elastic = [bench.submit(ask(name, 120)) for name in ("a", "bb", "ccc")]
        bench.step()
        assert held(*elastic) == [30, 30, 30]
        full = bench.submit(ask("full", 80, kv=KVParams()))
        bench.step()
        assert held(full) == [20]
        # The newcomer misses 10 blocks, the others want one each for their next token: all of them get the same.
        assert sum(held(*elastic)) <= 80
        assert max(held(*elastic)) - min(held(*elastic)) <= 1

    def test_it_is_shrunk_to_its_least_and_not_below(self) -> None:
        bench = Bench(num_blocks=32)
        elastic = bench.submit(ask("a", 100))
        bench.step()
        full = bench.submit(ask("full", 100, max_tokens=8, kv=KVParams()))
        bench.step(7)
        assert held(elastic, full) == [LEAST, 27]
        bench.finish()
        assert (bench.receipts["full"].shrinks, bench.receipts["full"].preemptions) == (0, 0)
        assert bench.receipts["a"].preemptions == 0

    def test_nobody_is_shrunk_for_a_newcomer_that_cannot_start_anyway(self) -> None:
        bench = Bench(num_blocks=40)
        bench.submit(ask("first", 80, kv=KVParams()))
        elastic = bench.submit(ask("elastic", 60))
        bench.step()
        waits = bench.submit(ask("waits", 80, kv=KVParams()))
        bench.step()
        assert held(elastic, waits) == [15 + 1, 0]
        assert elastic.shrinks == 0

    def test_weights_count(self) -> None:
        bench = Bench(num_blocks=60)
        light, heavy = bench.submit(ask("a", 100)), bench.submit(ask("bb", 100, weight=3.0))
        bench.step()
        bench.submit(ask("full", 80, kv=KVParams(), max_tokens=4))
        bench.step()
        assert held(light)[0] < held(heavy)[0]

    def test_an_explicit_budget_is_never_shrunk(self) -> None:
        bench = Bench(num_blocks=40)
        budgeted = bench.submit(ask("a", 100, kv=KVParams("sliding", 60)))
        elastic = bench.submit(ask("bb", 50))
        bench.step(2)
        bench.submit(ask("full", 60, kv=KVParams(), max_tokens=4))
        bench.step(4)
        assert held(budgeted) == [16]
        assert budgeted.shrinks == 0
        assert elastic.shrinks > 0

    def test_once_a_good_part_of_the_pool_is_free_it_grows_again(self) -> None:
        bench = Bench(num_blocks=32)
        elastic = bench.submit(ask("a", 100))
        bench.step()
        bench.submit(ask("full", 100, max_tokens=3, kv=KVParams()))
        bench.step(2)
        assert budget_of(elastic) is not None
        assert bench.scheduler.report().price > 0.0
        bench.step(3)
        assert "full" in bench.receipts
        assert budget_of(elastic) is None
        assert elastic.kv is not None
        assert bench.scheduler.report().price == 0.0
        evicted = elastic.kv.num_evicted
        bench.step(20)
        assert elastic.kv.num_evicted == evicted

    def test_what_waits_starts_in_less_than_its_prompt_when_that_is_its_share(self) -> None:
        bench = Bench(num_blocks=40)
        first = bench.submit(ask("a", 140))
        bench.step()
        second = bench.submit(ask("bb", 140))
        bench.step()
        assert second.kv is not None
        assert second.kv.tight
        bench.step(4)
        assert max(held(first, second)) <= 24
        assert second.evicted_in_prefill

    def test_a_prompt_longer_than_the_pool_is_served_if_its_least_fits(self) -> None:
        bench = Bench(num_blocks=10)
        bench.submit(ask("a", 100, max_tokens=10))
        bench.finish()
        assert bench.receipts["a"].completion_tokens == 10
        small = Bench(num_blocks=LEAST - 1)
        with pytest.raises(NeverFitsError):
            small.submit(ask("a", 100))

    def test_a_floor_needs_the_whole_context_to_fit(self) -> None:
        with pytest.raises(NeverFitsError):
            Bench(num_blocks=10).submit(ask("a", 100, kv=KVParams("sliding", None, 0.5)))


class TestFloors:
    def short_of_ten(self, bench: Bench) -> tuple[Sequence, Sequence]:
        """Return a sequence with a floor that holds 40 of 42 blocks, and one that waits and misses ten."""
        kept = bench.submit(ask("kept", 160, max_tokens=8, kv=KVParams("sliding", None, 0.5)))
        bench.step(2)
        return kept, bench.submit(ask("full", 44, max_tokens=4, kv=KVParams()))

    def test_a_cut_waits_for_what_the_floor_allows(self) -> None:
        bench = Bench(num_blocks=42)
        bench.floor_budget = 120
        kept, full = self.short_of_ten(bench)
        bench.step()
        assert kept.granted_budget is not None
        assert kept.shrinks == 0
        assert held(full) == [0]
        bench.step()
        assert kept.shrinks == 1
        assert held(full) == [11]
        assert kept.kv is not None
        assert kept.kv.alive_slots >= 120

    def test_a_floor_that_gives_nothing_is_not_asked_again_until_the_sequence_has_grown(self) -> None:
        bench = Bench(num_blocks=42)
        bench.floor_budget = 10**6
        kept, full = self.short_of_ten(bench)
        held_when_asked = []
        for _ in range(6):
            bench.step()
            held_when_asked += held(kept) if kept.granted_budget is not None else []
        assert held_when_asked == [41, 42]
        assert (kept.shrinks, held(full)) == (0, [0])
        bench.finish()
        assert bench.receipts["full"].preemptions == 0


class TestAllowances:
    def two_tenants(self, bench: Bench) -> tuple[Sequence, Sequence]:
        red = bench.submit(ask("red", 100, tenant="red", reserved=LEAST))
        blue = bench.submit(ask("blue", 100, tenant="blue", reserved=LEAST))
        bench.step()
        return red, blue

    def test_a_tenant_is_shrunk_to_what_it_may_hold(self) -> None:
        bench = Bench(num_blocks=100)
        red, blue = self.two_tenants(bench)
        bench.scheduler.obey(Directive(1, {"red": 4}))
        assert bench.scheduler.has_orders
        bench.step()
        assert held(red, blue) == [LEAST + 4, 26]
        assert bench.scheduler.directive_done == 1
        bench.step(20)
        assert held(red) == [LEAST + 4]
        assert held(blue)[0] > 26
        assert bench.scheduler.report().reclaimed[LadderStep.SHRINK_OVER_QUOTA] == 25 - LEAST - 4

    def test_it_may_not_grow_beyond_it_either(self) -> None:
        bench = Bench(num_blocks=100)
        red, _ = self.two_tenants(bench)
        bench.scheduler.obey(Directive(1, {"red": 22}))
        bench.step(40)
        assert held(red) == [LEAST + 22]

    def test_each_directive_replaces_the_one_before(self) -> None:
        bench = Bench(num_blocks=100)
        red, blue = self.two_tenants(bench)
        bench.scheduler.obey(Directive(1, {"red": 4}))
        bench.step()
        bench.scheduler.obey(Directive(2, {"blue": 4}))
        bench.step(20)
        assert held(red)[0] > LEAST + 4
        assert held(blue) == [LEAST + 4]

    def test_nothing_is_taken_below_the_least(self) -> None:
        bench = Bench(num_blocks=100)
        red = bench.submit(ask("red", 100, tenant="red", reserved=0))
        bench.step()
        bench.scheduler.obey(Directive(1, {"red": 0}))
        bench.step(3)
        assert held(red) == [LEAST]
        assert bench.scheduler.directive_done == 1

    def test_room_for_a_request_on_its_way_is_made_by_shrinking_only(self) -> None:
        bench = Bench(num_blocks=60)
        red, blue = self.two_tenants(bench)
        full = bench.submit(ask("full", 20, kv=KVParams()))
        bench.step()
        bench.scheduler.obey(Directive(1, {}, reclaim_blocks=30))
        bench.step()
        assert bench.store.num_available >= 28  # of 30, what the next tokens of three sequences took
        bench.scheduler.obey(Directive(2, {}, reclaim_blocks=1000))
        bench.step()
        assert held(red, blue) == [LEAST, LEAST]
        assert held(full)[0] >= 5
        assert bench.scheduler.num_preemptions == 0


class TestPreemption:
    def test_who_holds_more_than_it_is_due_goes_before_a_full_one_that_came_later(self) -> None:
        bench = Bench(num_blocks=40)
        bench.floor_budget = 10**6  # its floor lets nothing go
        elastic = bench.submit(ask("elastic", 80, max_tokens=50, kv=KVParams("sliding", None, 0.9), reserved=LEAST))
        bench.step()
        full = bench.submit(ask("full", 60, max_tokens=50, kv=KVParams()))
        bench.finish()
        assert bench.receipts["full"].preemptions == 0
        assert bench.receipts["elastic"].preemptions > 0
        assert (elastic.offloads, full.offloads) == (0, 0)

    def test_with_room_in_host_memory_nothing_is_computed_again(self) -> None:
        bench = Bench(num_blocks=20, max_offloaded_blocks=20)
        for name in ("a", "bb"):
            bench.submit(ask(name, 30, max_tokens=40, kv=KVParams()))
        bench.finish()
        receipt = bench.receipts["bb"]
        assert receipt.offloads == receipt.preemptions > 0
        assert bench.scheduler.totals.prompt_tokens == 60
        assert bench.scheduler.report().reclaimed[LadderStep.OFFLOAD] > 0


class TestCurves:
    def bench_under_pressure(self, rule: str) -> tuple[Bench, Sequence]:
        bench = Bench(num_blocks=40, rule=parse_rule(rule))
        sequence = bench.submit(ask("a", 100))
        bench.step()
        return bench, sequence

    def test_they_are_measured_where_the_rule_looks_at_them(self) -> None:
        _, priced = self.bench_under_pressure("price")
        _, capped = self.bench_under_pressure("same_cap")
        assert priced.curve == tuple(min(1.0, 4 * blocks / 100) for blocks in range(26))
        assert capped.curve == ()

    def test_they_are_measured_again_after_sixteen_tokens(self) -> None:
        bench, sequence = self.bench_under_pressure("price")
        measured = []
        for _ in range(40):
            bench.step()
            measured.append(sequence.curve_tokens)
        assert sorted(set(measured)) == [100, 116, 132]

    def test_they_are_not_measured_in_a_pool_that_is_half_empty(self) -> None:
        bench = Bench(num_blocks=60, rule=parse_rule("price"))
        sequence = bench.submit(ask("a", 100))
        bench.step()
        assert sequence.curve == ()


class TestReports:
    def test_every_block_is_somebodys(self) -> None:
        bench = Bench(num_blocks=100)
        bench.submit(ask("red", 100, tenant="red", reserved=LEAST))
        bench.submit(ask("blue", 20, tenant="blue", reserved=30, kv=KVParams()))
        bench.submit(ask("blue2", 30, tenant="blue", reserved=LEAST))
        bench.step()
        report = bench.scheduler.report()
        assert (report.total_blocks, report.held_blocks) == (100, 25 + 5 + 8)
        red, blue = report.tenants["red"], report.tenants["blue"]
        assert (red.held, red.reserved, red.elastic) == (25, LEAST, 20)
        assert (blue.held, blue.reserved, blue.elastic) == (13, 30 + LEAST, 3)

    def test_worths_are_of_the_blocks_beyond_the_reserved_ones(self) -> None:
        bench = Bench(num_blocks=100)
        bench.submit(ask("red", 38, tenant="red", reserved=8, weight=2.0))
        bench.step()
        worths = bench.scheduler.report().tenants["red"].worths
        # 39 tokens in ten blocks, and one more: the ninth to eleventh are worth 2/9, 2/10 and 2/11.
        expected = [0] * len(worths)
        for block in (9, 10, 11):
            expected[worth_bin(2.0 / block)] += 1
        assert list(worths) == expected

    def test_leases_last_from_the_first_sequence_to_the_last(self) -> None:
        bench = Bench(num_blocks=100)
        item = ask("a", 10, max_tokens=2, tenant="red", reserved=3)
        bench.submit(item)
        longer = replace(item.sampling, max_tokens=5)
        bench.submit(replace(item, request_id=RequestId("b"), sampling=longer))
        (use,) = bench.scheduler.leases.current()
        assert (use.lease_id, use.tenant, use.reserved_blocks) == ("lease-a", "red", 6)
        assert bench.scheduler.leases.take_changes() == ((use,), ())
        bench.step(3)
        assert bench.scheduler.leases.take_changes() == ((), ())
        assert bench.scheduler.leases.current()[0].reserved_blocks == 3
        bench.finish()
        assert bench.scheduler.leases.take_changes() == ((), ("lease-a",))
        assert bench.scheduler.leases.current() == ()
