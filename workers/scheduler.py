"""The scheduler: which sequences compute what in the next step, and what a step's result means.

Pure: no clock, no chance, no tensors; the KV store's bookkeeping is the only thing it changes beside its own queues.

A step is one batch under one token budget. Decodes come first, one token each, then prefill chunks, those of running
sequences before new ones of the same priority, each group in (priority, arrival) order. A chunk that does not end its
prompt ends at a multiple of the block size. Prompts of a lower priority than a decode get but a part of the budget, so
that the step, and with it the time to that one's next token, stays short.

When blocks are missing, elastic sequences are shrunk first (reclaim.py), before anything is computed in the step: for
what running sequences need next, and for the first one that waits. If a running sequence still finds no block, the last
in order is preempted until it does: moved to host memory, or recomputed later if there is no room for it and nothing of
it was evicted. Elastic sequences that hold more than they are due come after all others, in the step and to be kept.
A step in which blocks are missing admits nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvorum.kvstore.errors import InvalidRequestError
from kvorum.kvstore.opening import OpenRequest
from kvorum.kvstore.policies import parse_policy, resolve_budget
from kvorum.kvstore.pricing import DEFAULT_RULE, Rule, RuleKind
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.store import KVStore, PreemptedBy
from kvorum.kvstore.types import SeqId, blocks_for
from kvorum.workers import measuring
from kvorum.workers.bidding import blocks_to_go_on, holds_more_than_due
from kvorum.workers.governance import Directive, EngineReport, LadderStep
from kvorum.workers.leases import LeaseBook
from kvorum.workers.plan import BudgetQuery, CurveQuery, MassQuery, StepPlan, StepResult
from kvorum.workers.reclaim import Reclaimer, is_measuring
from kvorum.workers.report import report_pool
from kvorum.workers.request import EngineRequest, EventKind, FinishReason, RequestId, RequestOutput
from kvorum.workers.request_checks import RequestChecks
from kvorum.workers.sequence import Sequence
from kvorum.workers.step_builder import StepBuilder, chunk_row, decode_row

# Of a step's budget, for all prompts of lower priority than a decode together.
_BACKGROUND_PART = 4


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_batched_tokens: tokens computed in a step. max_num_seqs: sequences in a step."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(self, store: KVStore, limits: SchedulerLimits, *, rule: Rule = DEFAULT_RULE) -> None:
        """rule: by which elastic sequences share the pool."""
        self._store = store
        self.limits = limits
        self._checks = RequestChecks(limits.max_model_len, limits.vocab_size, store.num_blocks, store.block_size)
        self._reclaimer = Reclaimer(store, rule)
        self.leases = LeaseBook()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
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
        step = StepBuilder(self.limits.max_num_batched_tokens)
        self._waiting.sort(key=lambda sequence: sequence.order)
        self._reclaimer.begin_step(self._running, now_s=now_s)
        self._make_room(step)
        self._running.sort(key=self._rank)
        running = tuple(self._running)
        for sequence in running:
            if sequence in self._running and sequence.prompt_done:
                self._schedule_decode(sequence, step)
        step.decoding = min((each.request.priority for each in self._running if step.holds(each)), default=None)
        for sequence in running:
            if sequence in self._running and not sequence.prompt_done:
                self._admit(step, now_s=now_s, before=sequence.request.priority)
                self._schedule_chunk(sequence, step)
        self._admit(step, now_s=now_s)
        ops = self._store.take_ops()
        if not ops and not step.rows:
            return None
        self.totals.steps += 1
        return StepPlan(ops, tuple(step.rows))

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

    def _rank(self, sequence: Sequence) -> tuple[bool, tuple[int, float, int]]:
        """Return a sort key: who gets blocks first, and keeps them longest."""
        return holds_more_than_due(sequence, self._store.block_size), sequence.order

    def _make_room(self, step: StepBuilder) -> None:
        """Shrink elastic sequences for what this step needs, and for the first that waits if that lets it start."""
        newcomer = self._waiting[0] if self._waiting and len(self._running) < self.limits.max_num_seqs else None
        if newcomer is not None and newcomer.kv is None and newcomer.is_elastic and not newcomer.keeps_floor:
            share = self._reclaimer.share_with(self._running, newcomer)
            if share is not None:
                step.shares[newcomer.seq_id] = share
                return
        elif newcomer is not None:
            for blocks in self._starts(newcomer):
                if self._reclaimer.make_room(self._running, blocks):
                    return
        self._reclaimer.make_room(self._running)

    def _starts(self, newcomer: Sequence) -> list[int]:
        """Return with how many blocks a sequence can start, the preferred number first."""
        block_size = self._store.block_size
        if newcomer.kv is not None:
            return [blocks_for(newcomer.kv.num_slots + 1, block_size)]
        whole = self._store.blocks_to_open(_open_request(newcomer))
        if newcomer.budget is None or newcomer.keeps_floor:
            return [whole]
        return [whole, blocks_for(newcomer.budget + block_size, block_size)]

    def _schedule_decode(self, sequence: Sequence, step: StepBuilder) -> None:
        kv = _resident(sequence)
        if step.tokens_left < 1:
            return
        while not self._cut_to_budget(sequence) or not self._store.extend_decode(kv):
            if self._get_back(sequence, step):
                continue
            if is_measuring(self._running):
                return
            if not self._preempt_after(sequence, step):
                self._preempt(sequence, step)
                return
        replace_victim, num_slots = kv.victim_pending, kv.num_slots
        choose_victims = self._store.wrote_decode(kv)
        step.add(decode_row(sequence, kv, num_slots=num_slots, replace=replace_victim, choose_victims=choose_victims))

    def _get_back(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Shrink elastic sequences for a running one that lacks blocks; returns whether that may have been enough."""
        step.is_short = True
        available, needed = self._store.num_available, blocks_to_go_on(sequence, self._store)
        self._reclaimer.get_back(max(1, needed), [other for other in self._running if not step.holds(other)])
        return self._store.num_available > available or blocks_to_go_on(sequence, self._store) < needed

    def _cut_to_budget(self, sequence: Sequence) -> bool:
        """Cut a sequence whose prompt is done to its budget."""
        kv = _resident(sequence)
        if not kv.over_budget:
            return True
        assert kv.budget is not None
        alive = kv.alive_slots
        if not self._store.shrink(kv, kv.budget, prompt_done=True):
            return False
        sequence.note(EventKind.CUT, self._now_s, alive - kv.alive_slots)
        return True

    def _schedule_chunk(self, sequence: Sequence, step: StepBuilder) -> None:
        kv = _resident(sequence)
        while True:
            chunk = self._chunk(sequence, kv, self._tokens_for(sequence, step))
            if chunk == 0:
                return
            if self._store.extend(kv, chunk, may_evict=not sequence.keeps_floor):
                break
            fitting = self._chunk(sequence, kv, min(chunk, self._store.room(kv)))
            if fitting and self._store.extend(kv, fitting, may_evict=False):
                chunk = fitting
                break
            if not self._get_back(sequence, step) and not self._preempt_after(sequence, step):
                return
        self._add_chunk(sequence, kv, chunk, step)

    def _tokens_for(self, sequence: Sequence, step: StepBuilder) -> int:
        """Return how many tokens of a prompt a step may compute: few beside a decode of higher priority."""
        if step.decoding is None or sequence.request.priority <= step.decoding:
            return step.tokens_left
        part = max(self._store.block_size, self.limits.max_num_batched_tokens // _BACKGROUND_PART)
        return max(0, min(step.tokens_left, part - step.background_tokens))

    def _chunk(self, sequence: Sequence, kv: SequenceKV, limit: int) -> int:
        """Return the next chunk's length within a limit: to the prompt's end, or to a multiple of the block size."""
        remaining = len(sequence.tokens) - kv.num_tokens
        chunk = self._store.next_chunk(kv, min(limit, remaining))
        if chunk == remaining:
            return chunk
        end = (kv.num_tokens + chunk) // self._store.block_size * self._store.block_size
        return max(0, end - kv.num_tokens)

    def _add_chunk(self, sequence: Sequence, kv: SequenceKV, chunk: int, step: StepBuilder) -> None:
        start, num_slots = kv.num_tokens, kv.num_slots
        self._store.wrote(kv, chunk)
        sequence.evicted_in_prefill |= kv.evicted_in_prefill
        step.add(chunk_row(sequence, kv, start=start, num_slots=num_slots))
        if step.decoding is not None and sequence.request.priority > step.decoding:
            step.background_tokens += chunk

    def _admit(self, step: StepBuilder, *, now_s: float, before: int | None = None) -> None:
        """Start sequences that wait while there is room; before: only those that run before this priority."""
        while self._waiting and len(self._running) < self.limits.max_num_seqs and step.tokens_left > 0:
            sequence = self._waiting[0]
            if step.is_short or (before is not None and sequence.request.priority >= before):
                return
            if not (self._resume(sequence) if sequence.kv is not None else self._open(sequence, step)):
                return
            is_first = sequence.first_scheduled_s is None
            kept_tokens = _resident(sequence).alive_slots
            sequence.note(EventKind.STARTED if is_first else EventKind.RESUMED, now_s, kept_tokens)
            self._waiting.remove(sequence)
            self._running.append(sequence)
            self._schedule_decode(sequence, step) if sequence.prompt_done else self._schedule_chunk(sequence, step)
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s

    def _resume(self, sequence: Sequence) -> bool:
        assert sequence.kv is not None
        return self._store.resume(sequence.kv)

    def _open(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Open a sequence's KV with room for its prompt, or for a chunk where that must do; False if there is none."""
        request, room_for = _open_request(sequence), len(sequence.tokens)
        room = self._store.num_available * self._store.block_size
        if room < room_for and not sequence.keeps_floor:
            # It may be cut to its budget between chunks, so it can start in less than its whole prompt needs.
            budget = self._prefill_budget(sequence, step)
            if budget is None or room < budget + self._store.block_size:
                return False
            request = replace(request, budget=budget)
            room_for = min(room, max(step.tokens_left, self._store.block_size))
        kv = self._store.open(request, room_for=room_for)
        if kv is None:
            return False
        sequence.kv = kv
        if not sequence.preemptions:
            sequence.prompt_tokens_cached = kv.num_cached_tokens
        return True

    def _prefill_budget(self, sequence: Sequence, step: StepBuilder) -> int | None:
        """Return what a sequence is cut to between chunks; for an elastic one a block less than its share."""
        if sequence.is_elastic and sequence.seq_id in step.shares:
            return max(sequence.least_tokens, (step.shares[sequence.seq_id] - 1) * self._store.block_size)
        return sequence.budget

    def _preempt_after(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Preempt the last running sequence that comes after this one and is not in the step yet."""
        rank = self._rank(sequence)
        candidates = [other for other in self._running if self._rank(other) > rank and not step.holds(other)]
        if not candidates:
            return False
        self._preempt(max(candidates, key=self._rank), step)
        return True

    def _preempt(self, sequence: Sequence, step: StepBuilder) -> None:
        before, tokens = self._store.num_available, _resident(sequence).alive_slots
        if self._store.preempt(_resident(sequence)) is PreemptedBy.RECOMPUTE:
            sequence.kv = None
            sequence.prompt_done = False
            ladder_step, kind = LadderStep.PREEMPT, EventKind.PREEMPTED
        else:
            sequence.offloads += 1
            ladder_step, kind = LadderStep.OFFLOAD, EventKind.OFFLOADED
        sequence.note(kind, self._now_s, tokens)
        self._reclaimer.count(ladder_step, self._store.num_available - before)
        sequence.wanted_budget = None
        sequence.preemptions += 1
        self.totals.preemptions += 1
        step.is_short = True
        self._running.remove(sequence)
        self._waiting.append(sequence)

    # What a step brought.

    def apply(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take a step's result in; returns the new tokens. Sequences that ended wait for `release`."""
        sequences = {sequence.seq_id: sequence for sequence in self._running}
        outputs = []
        for row in plan.rows:
            sequence = sequences[row.seq_id]
            kv = _resident(sequence)
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


def _resident(sequence: Sequence) -> SequenceKV:
    assert sequence.kv is not None, "a running sequence has its KV"
    return sequence.kv


def _open_request(sequence: Sequence) -> OpenRequest:
    return OpenRequest(
        seq_id=sequence.seq_id,
        tokens=sequence.tokens,
        prompt_tokens=sequence.num_prompt,
        policy=sequence.policy,
        budget=sequence.budget,
        salt=sequence.request.cache_salt,
        tenant=sequence.tenant,
    )
