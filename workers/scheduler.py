"""The scheduler: requests that wait, run and end, the steps between (composer.py), and what a step's result means.

Pure: no clock, no chance, no tensors; the KV store's bookkeeping is the only thing it changes beside its own queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvorum.kvstore.errors import InvalidRequestError
from kvorum.kvstore.policies import parse_policy, resolve_budget
from kvorum.kvstore.pricing import DEFAULT_RULE, Rule, RuleKind
from kvorum.kvstore.store import KVStore
from kvorum.kvstore.types import SeqId
from kvorum.workers import measuring
from kvorum.workers.composer import Composer, Queues, SchedulerLimits, resident
from kvorum.workers.governance import Directive, EngineReport
from kvorum.workers.leases import LeaseBook
from kvorum.workers.plan import BudgetQuery, CurveQuery, MassQuery, StepPlan, StepResult
from kvorum.workers.reclaim import Reclaimer
from kvorum.workers.report import report_pool
from kvorum.workers.request import EngineRequest, FinishReason, RequestId, RequestOutput
from kvorum.workers.request_checks import RequestChecks
from kvorum.workers.sequence import Sequence


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(self, store: KVStore, limits: SchedulerLimits, *, rule: Rule = DEFAULT_RULE) -> None:
        """rule: by which elastic sequences share the pool."""
        self._store = store
        self.limits = limits
        self._checks = RequestChecks(limits.max_model_len, limits.vocab_size, store.num_blocks, store.block_size)
        self._reclaimer = Reclaimer(store, rule)
        self.leases = LeaseBook()
        queues = Queues()
        self._composer = Composer(store, limits, self._reclaimer, queues)
        self._waiting, self._running = queues.waiting, queues.running
        self._ended: list[Sequence] = []
        self._by_request: dict[RequestId, Sequence] = {}
        self._next_seq_id = 0
        self._now_s = 0.0  # of the last step
        self.totals = Totals()
        self.evicted_tokens: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no block, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the pool."""
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence was taken out of the pool for others."""
        return self._composer.num_preemptions

    @property
    def has_work(self) -> bool:
        """Say whether another step is needed."""
        return bool(self._waiting or self._running or self._ended)

    @property
    def has_orders(self) -> bool:
        """Say whether a directive is yet to be carried out."""
        return self._reclaimer.has_orders

    @property
    def directive_done(self) -> int:
        """Number of the last directive that was carried out, 0 before the first."""
        return self._reclaimer.directive_done

    def obey(self, directive: Directive) -> None:
        """Take a directive, which the next step carries out."""
        self._reclaimer.obey(directive)

    def report(self) -> EngineReport:
        """Return a consistent look at the pool between two steps."""
        return report_pool(self._store, self._reclaimer, self._by_request.values())

    # Requests come and go.

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError (or a child) when a request can never be served here."""
        if request.request_id in self._by_request:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._checks.check(request)

    def add(self, request: EngineRequest, *, now_s: float) -> None:
        """Queue a request that `check` has passed."""
        policy = parse_policy(request.kv.policy)
        context = len(request.prompt_token_ids) + request.sampling.max_tokens
        sequence = Sequence(
            seq_id=SeqId(self._next_seq_id),
            request=request,
            policy=policy,
            budget=resolve_budget(policy, request.kv.kv_budget, context_tokens=context),
            arrival_s=now_s,
            tokens=[*request.prompt_token_ids, *request.answer_token_ids],
        )
        self._next_seq_id += 1
        self._by_request[request.request_id] = sequence
        self._waiting.append(sequence)
        self.leases.add(request.terms)

    def end(self, request_id: RequestId, reason: FinishReason) -> None:
        """End a request between two steps; one that is unknown or over already is left alone."""
        sequence = self._by_request.get(request_id)
        if sequence is not None and sequence.finish_reason is None:
            self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        queue = self._running if sequence in self._running else self._waiting
        queue.remove(sequence)
        self._ended.append(sequence)

    def mass_queries(self) -> dict[SeqId, MassQuery]:
        """Return what must be measured before the ended sequences can be released."""
        return {
            sequence.seq_id: MassQuery(sequence.kv.residence, sequence.kv.rule, sequence.kv.num_tokens)
            for sequence in self._ended
            if sequence.kv is not None and sequence.kv.num_evicted and sequence.kv.rule is not None
        }

    def release(self, masses: dict[SeqId, float], *, now_s: float) -> list[RequestOutput]:
        """Let ended sequences go, with their receipts."""
        self._charge(now_s)
        outputs = []
        for sequence in self._ended:
            receipt = sequence.receipt(now_s=now_s, retained_mass=masses.get(sequence.seq_id, 1.0))
            self.evicted_tokens[sequence.policy.name] += receipt.kv_tokens_evicted
            if sequence.kv is not None:
                self._store.close(sequence.kv)
            del self._by_request[sequence.request.request_id]
            self.leases.remove(sequence.request.terms)
            outputs.append(
                RequestOutput(sequence.request.request_id, finish_reason=sequence.finish_reason, receipt=receipt)
            )
        self._ended = []
        return outputs

    # A step.

    def schedule(self, *, now_s: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to do."""
        self._tick(now_s)
        plan = self._composer.compose(now_s)
        self.totals.steps += plan is not None
        return plan

    def _tick(self, now_s: float) -> None:
        """Charge held blocks for the time since the last step, and end what is past its deadline."""
        self._charge(now_s)
        for sequence in [*self._running, *self._waiting]:
            if now_s >= sequence.deadline_s:
                self._end(sequence, FinishReason.TIMEOUT)

    def _charge(self, now_s: float) -> None:
        elapsed_s, self._now_s = now_s - self._now_s, now_s
        for sequence in [*self._running, *self._ended]:
            if sequence.kv is not None:
                sequence.page_seconds += elapsed_s * len(sequence.kv.block_ids)

    # What a step brought.

    def apply(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take a step's result in; returns the new tokens. Sequences that ended wait for `release`."""
        sequences = {sequence.seq_id: sequence for sequence in self._running}
        outputs = []
        for row in plan.rows:
            sequence = sequences[row.seq_id]
            kv = resident(sequence)
            if not sequence.prompt_done:
                self.totals.prompt_tokens += row.step.num_tokens
                self._store.finish_chunk(kv, sequence.tokens, prompt_done=row.sample is not None)
            if row.sample is None:
                continue
            sequence.prompt_done = True
            if row.report_retained and result.retained[row.seq_id] < sequence.request.kv.min_retained_mass:
                self._store.spare_victim(kv)
            sample = result.samples[row.seq_id]
            sequence.tokens.append(sample.token_id)
            self.totals.generation_tokens += 1
            logprobs = () if sample.logprobs is None else (sample.logprobs,)
            outputs.append(RequestOutput(sequence.request.request_id, (sample.token_id,), logprobs))
            ends_with = sequence.ends_with(sample.token_id, max_model_len=self.limits.max_model_len)
            reason = FinishReason.LENGTH if sample.is_cut else ends_with
            if reason is not None:
                self._end(sequence, reason)
        return outputs

    def budget_queries(self) -> dict[SeqId, BudgetQuery]:
        """Return the cuts whose budget depends on a floor of retained mass."""
        return measuring.budget_queries(self._running)

    def set_budgets(self, budgets: Mapping[SeqId, int]) -> None:
        """Take the answers to `budget_queries`."""
        measuring.set_budgets(self._running, budgets)

    def curve_queries(self) -> dict[SeqId, CurveQuery]:
        """Return whose retention curves are needed: the rule looks at them and the pool is scarce."""
        is_scarce = 2 * self._store.num_available < self._store.num_blocks
        if self._reclaimer.rule.kind is not RuleKind.PRICE or not is_scarce:
            return {}
        return measuring.curve_queries(self._running, block_size=self._store.block_size)

    def set_curves(self, curves: Mapping[SeqId, tuple[float, ...]]) -> None:
        """Take the answers to `curve_queries`."""
        measuring.set_curves(self._running, curves)

    # What operators look at.

    def sequences(self) -> list[Sequence]:
        """Return the sequences that are not over: those that run, then those that wait."""
        return [*self._running, *self._waiting]

    def find(self, request_id: RequestId) -> Sequence | None:
        """Return a sequence that is not over."""
        sequence = self._by_request.get(request_id)
        return sequence if sequence is not None and sequence.finish_reason is None else None

    def audit(self) -> None:
        """Prove that the store's accounting is exact and that it serves just these sequences; AssertionError if not."""
        self._store.audit()
        everyone = [*self._waiting, *self._running, *self._ended]
        holders = {sequence.seq_id for sequence in everyone if sequence.kv is not None}
        assert holders == {kv.seq_id for kv in self._store.open_sequences()}, (
            "the store serves other sequences than the scheduler"
        )
        assert len(everyone) == len(self._by_request), "a request was lost"
