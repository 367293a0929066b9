"""Any order of events keeps the accounting exact, the shared blocks unchanged and the answers right."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvorum.kvstore.errors import InvalidRequestError
from kvorum.kvstore.store import KVStore
from kvorum.workers.fake_engine import FakeExecutor
from kvorum.workers.plan import StepPlan
from kvorum.workers.request import EngineRequest, FinishReason, KVParams, RequestId, RequestOutput
from kvorum.workers.scheduler import Scheduler, SchedulerLimits
from kvtest.engines import Answer, request

BLOCK_SIZE = 4
NUM_BLOCKS = 24


class EngineMachine(RuleBasedStateMachine):
    """A scheduler over a fake executor, stepped by hand.

    Prompts are cut from one long text, so that many share a prefix. A sequence that was never evicted from must repeat
    its prompt exactly, whatever happened to its neighbours, to its blocks and to itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = KVStore(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=5, enable_prefix_caching=True)
        limits = SchedulerLimits(max_model_len=100, vocab_size=50, max_num_seqs=5, max_num_batched_tokens=24)
        self.scheduler = Scheduler(self.store, limits)
        self.executor = FakeExecutor(block_size=BLOCK_SIZE)
        self.requests: dict[RequestId, EngineRequest] = {}
        self.answers: dict[RequestId, Answer] = {}
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
        try:
            self.scheduler.check(item)
        except InvalidRequestError:
            return
        self.scheduler.add(item, now_s=self.now_s)
        self.requests[item.request_id] = item
        self.answers[item.request_id] = Answer()

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
            budgets = {
                seq_id: min(query.num_tokens, query.budget + 3)
                for seq_id, query in self.scheduler.budget_queries().items()
            }
            self.scheduler.set_budgets(budgets)
        released = self.release()
        assert plan or released or not self.scheduler.has_work, "stuck"

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


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
