"""Any order of events keeps the accounting exact, the shared blocks unchanged, promises kept and the answers right."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvorum.kvstore.errors import InvalidRequestError
from kvorum.kvstore.policies import parse_policy, resolve_budget
from kvorum.kvstore.pricing import parse_rule
from kvorum.kvstore.store import KVStore
from kvorum.kvstore.types import blocks_for
from kvorum.workers.composer import SchedulerLimits
from kvorum.workers.fake_engine import FakeExecutor
from kvorum.workers.governance import Directive, LeaseTerms, LeaseUse
from kvorum.workers.plan import StepPlan
from kvorum.workers.request import EngineRequest, FinishReason, KVParams, RequestId, RequestOutput
from kvorum.workers.scheduler import Scheduler
from kvtest.engines import Answer, request

BLOCK_SIZE = 4
NUM_BLOCKS = 24


class EngineMachine(RuleBasedStateMachine):
    """A scheduler over a fake executor, stepped by hand.

    Prompts are cut from one long text, so that many share a prefix. A sequence that was never evicted from must repeat
    its prompt exactly, whatever happened to its neighbours, to its blocks and to itself.
    """

    @initialize(
        allocation=st.sampled_from(["same_cap", "proportional", "price", "price:alpha=1"]),
        max_offloaded_blocks=st.sampled_from([0, 6, 1000]),
    )
    def start(self, allocation: str, max_offloaded_blocks: int) -> None:
        self.store = KVStore(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=5,
            enable_prefix_caching=True,
            max_offloaded_blocks=max_offloaded_blocks,
        )
        limits = SchedulerLimits(max_model_len=100, vocab_size=50, max_num_seqs=5, max_num_batched_tokens=24)
        self.scheduler = Scheduler(self.store, limits, rule=parse_rule(allocation))
        self.executor = FakeExecutor(block_size=BLOCK_SIZE)
        self.requests: dict[RequestId, EngineRequest] = {}
        self.answers: dict[RequestId, Answer] = {}
        self.known_leases: dict[str, LeaseUse] = {}
        self.last_directive = 0
        self.now_s = 0.0

    @rule(
        shared=st.integers(0, 40),
        tail=st.lists(st.integers(0, 49), max_size=12),
        max_tokens=st.integers(1, 30),
        policy=st.sampled_from(["full", "h2o", "h2o_avg", "snap_h2o", "sliding", "sinks", "h2o_avg:decay=0.95"]),
        budget=st.one_of(st.none(), st.integers(16, 40), st.floats(0.3, 1.0)),
        floor=st.sampled_from([0.0, 0.0, 0.5, 0.9]),
        priority=st.integers(0, 1),
        timeout_s=st.one_of(st.none(), st.integers(1, 60)),
        salt=st.sampled_from(["", "other"]),
        tenant=st.sampled_from(["", "red", "blue"]),
        least_tokens=st.sampled_from([1, 16, 22]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def submit(
        self,
        shared: int,
        tail: list[int],
        max_tokens: int,
        policy: str,
        budget: float | None,
        floor: float,
        priority: int,
        timeout_s: int | None,
        salt: str,
        tenant: str,
        least_tokens: int,
        weight: float,
    ) -> None:
        prompt = [i * i % 50 for i in range(shared)] + tail
        item = request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens=max_tokens,
            kv=KVParams(policy, None if policy == "full" else budget, floor),
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=salt,
        )
        lease_id = f"lease-{len(self.requests) // 2}"
        item = replace(item, terms=LeaseTerms(lease_id, tenant, 0, weight, least_tokens))
        item = replace(item, terms=replace(item.terms, reserved_blocks=due_blocks(item)))
        try:
            self.scheduler.check(item)
        except InvalidRequestError:
            return
        if not self.may_start(item):
            return
        self.scheduler.add(item, now_s=self.now_s)
        self.requests[item.request_id] = item
        self.answers[item.request_id] = Answer()

    def may_start(self, item: EngineRequest) -> bool:
        return True

    @rule(
        red=st.none() | st.integers(0, 20),
        blue=st.none() | st.integers(0, 20),
        reclaim_blocks=st.integers(0, 30),
    )
    def direct(self, red: int | None, blue: int | None, reclaim_blocks: int) -> None:
        self.last_directive += 1
        allowances = {tenant: count for tenant, count in (("red", red), ("blue", blue)) if count is not None}
        self.scheduler.obey(Directive(self.last_directive, allowances, reclaim_blocks))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.step_once()

    def step_once(self) -> None:
        self.now_s += 1.0
        plan = self.scheduler.schedule(now_s=self.now_s)
        if plan is not None:
            assert plan.num_tokens <= 24
            self.take(self.scheduler.apply(plan, self.executor.carry_out(plan)))
        measured = self.measure()
        released = self.release()
        assert plan or released or measured or not self.scheduler.has_work, "stuck"

    def measure(self) -> bool:
        queries = self.scheduler.budget_queries()
        budgets = {
            seq_id: min(query.residence.num_slots, query.budget + 3 * (seq_id % 3)) for seq_id, query in queries.items()
        }
        self.scheduler.set_budgets(budgets)
        curves = self.scheduler.curve_queries()
        self.scheduler.set_curves({seq_id: self.executor.curve(query) for seq_id, query in curves.items()})
        return bool(queries)

    def release(self) -> list[RequestOutput]:
        outputs = self.scheduler.release({}, now_s=self.now_s)
        self.take(outputs)
        return outputs

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            answer = self.answers[output.request_id]
            assert answer.finish_reason is None, "something came after the end"
            answer.token_ids += output.token_ids
            answer.finish_reason = output.finish_reason
            answer.receipt = output.receipt
            if output.finish_reason is not None:
                self.check_answer(self.requests[output.request_id], answer)

    def check_answer(self, item: EngineRequest, answer: Answer) -> None:
        receipt, prompt = answer.receipt, item.prompt_token_ids
        assert receipt is not None
        assert receipt.completion_tokens == len(answer.token_ids)
        if answer.finish_reason is FinishReason.LENGTH:
            assert len(answer.token_ids) == item.sampling.max_tokens
            assert receipt.kv_tokens_held + receipt.kv_tokens_evicted == len(prompt) + len(answer.token_ids) - 1
        if item.kv.policy == "full":
            assert receipt.kv_tokens_evicted == 0
        if receipt.kv_tokens_evicted == 0:
            expected = [prompt[i % len(prompt)] for i in range(len(answer.token_ids))]
            assert answer.token_ids == expected
        assert 0 <= receipt.offloads <= receipt.preemptions
        if is_elastic(item) and receipt.kv_budget is not None:
            assert receipt.kv_budget >= max(16, item.terms.least_tokens)
        if not is_elastic(item):
            assert receipt.shrinks == 0
        if receipt.kv_budget is not None and answer.token_ids:
            dense = len(prompt) + (len(answer.token_ids) if receipt.preemptions else 0)
            assert receipt.kv_tokens_held <= max(receipt.kv_budget, dense)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 10**6), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def end(self, pick: int, reason: FinishReason) -> None:
        name = list(self.requests)[pick % len(self.requests)]
        self.scheduler.end(name, reason)
        self.release()

    @invariant()
    def accounting_is_exact(self) -> None:
        self.scheduler.audit()
        report = self.scheduler.report()
        tenants = report.tenants.values()
        assert sum(use.held for use in tenants) == report.held_blocks == self.store.num_held
        assert sum(use.cached for use in tenants) == report.cached_blocks
        assert sum(use.reserved for use in tenants) == sum(
            use.reserved_blocks for use in self.scheduler.leases.current()
        )

    @invariant()
    def changes_of_leases_add_up(self) -> None:
        started, ended = self.scheduler.leases.take_changes()
        self.known_leases = {name: use for name, use in self.known_leases.items() if name not in ended}
        self.known_leases |= {use.lease_id: use for use in started}
        assert self.known_leases.keys() == {use.lease_id for use in self.scheduler.leases.current()}

    @invariant()
    def no_elastic_sequence_is_held_below_its_least(self) -> None:
        by_seq_id = {sequence.seq_id: sequence for sequence in self.scheduler._by_request.values()}
        for kv in self.store.open_sequences():
            sequence = by_seq_id[kv.seq_id]
            if sequence.is_elastic and kv.num_evicted:
                assert kv.alive_slots >= sequence.least_tokens or kv.tight

    @invariant()
    def cached_blocks_hold_their_tokens(self) -> None:
        self.flush_ops()
        for node in self.store.cached_nodes():
            first = (node.depth - 1) * BLOCK_SIZE
            assert self.executor.read_block(node.block_id) == list(enumerate(node.tokens, start=first))

    def flush_ops(self) -> None:
        ops = self.store.take_ops()
        if ops:
            self.executor.carry_out(StepPlan(ops, ()))

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step_once()
        assert not self.scheduler.has_work, "work is left for ever"
        assert self.store.num_held == 0
        assert all(answer.finish_reason is not None for answer in self.answers.values())


class ManagedMachine(EngineMachine):
    """The same under a manager that never lets more be reserved than there is."""

    def may_start(self, item: EngineRequest) -> bool:
        reserved = sum(use.reserved_blocks for use in self.scheduler.leases.current())
        return reserved + item.terms.reserved_blocks <= NUM_BLOCKS

    def check_answer(self, item: EngineRequest, answer: Answer) -> None:
        super().check_answer(item, answer)
        if item.kv.policy == "full":
            assert answer.receipt is not None
            assert answer.receipt.preemptions == 0


def is_elastic(item: EngineRequest) -> bool:
    return item.kv.policy != "full" and item.kv.kv_budget is None


def due_blocks(item: EngineRequest) -> int:
    """Return what a request may need without being shrunk further, its prompt whole where it did not opt in."""
    context = len(item.prompt_token_ids) + item.sampling.max_tokens
    whole = blocks_for(context, BLOCK_SIZE)
    if item.kv.policy == "full" or item.kv.min_retained_mass > 0.0:
        return whole
    if is_elastic(item):
        return min(whole, blocks_for(max(16, item.terms.least_tokens) + BLOCK_SIZE, BLOCK_SIZE))
    try:
        budget = resolve_budget(parse_policy(item.kv.policy), item.kv.kv_budget, context_tokens=context)
    except InvalidRequestError:
        return whole
    assert budget is not None
    return min(whole, max(blocks_for(budget + 1, BLOCK_SIZE), blocks_for(len(item.prompt_token_ids), BLOCK_SIZE)))


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestManagedMachine = ManagedMachine.TestCase
TestManagedMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
