"""The scheduler: which sequences compute what in the next step, and what a step's result means.

Pure: no clock, no chance, no tensors; the KV store's bookkeeping is the only thing it changes beside its own queues.

A step is one batch under one token budget. Decodes come first, one token each, then prefill chunks of running
sequences, then new ones, each group in (priority, arrival) order. A chunk that does not end its prompt ends at a
multiple of the block size. When a running sequence needs a block and none is left, the last in order is preempted until
there is one: recomputed later if nothing of it was evicted, else moved to host memory. A step that preempts admits
nobody.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvorum.kernels.plan import SequenceStep
from kvorum.kvstore.errors import ContextLengthError, InvalidRequestError, NeverFitsError
from kvorum.kvstore.opening import OpenRequest
from kvorum.kvstore.policies import parse_policy, resolve_budget, smallest_footprint
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.store import KVStore, PreemptedBy
from kvorum.kvstore.types import SeqId
from kvorum.workers.plan import BudgetQuery, MassQuery, RowPlan, SampleRequest, StepPlan, StepResult
from kvorum.workers.request import EngineRequest, FinishReason, RequestId, RequestOutput
from kvorum.workers.sequence import Sequence


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

    def __init__(self, store: KVStore, limits: SchedulerLimits) -> None:
        self._store = store
        self.limits = limits
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._ended: list[Sequence] = []
        self._by_request: dict[RequestId, Sequence] = {}
        self._next_seq_id = 0
        self._last_tick_s: float | None = None
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

    # Requests come and go.

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError (or a child) when a request can never be served here."""
        limits, sampling = self.limits, request.sampling
        prompt = request.prompt_token_ids
        if request.request_id in self._by_request:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        self._check_token_ids(request)
        if not 0.0 <= request.kv.min_retained_mass <= 1.0:
            raise InvalidRequestError("min_retained_mass must be in 0..1", param="kvorum.min_retained_mass")
        if sampling.max_tokens < 1:
            raise InvalidRequestError(f"max_tokens must be at least 1, got {sampling.max_tokens}", param="max_tokens")
        if len(request.answer_token_ids) >= sampling.max_tokens:
            raise InvalidRequestError("the answer is as long as max_tokens already", param="answer_token_ids")
        context = len(prompt) + sampling.max_tokens
        if context > limits.max_model_len:
            raise ContextLengthError(
                f"prompt ({len(prompt)} tokens) plus max_tokens ({sampling.max_tokens}) exceed the model's context of "
                f"{limits.max_model_len} tokens",
                param="max_tokens" if len(prompt) < limits.max_model_len else "prompt",
            )
        policy = parse_policy(request.kv.policy)
        budget = resolve_budget(policy, request.kv.kv_budget, context_tokens=context)
        needed = smallest_footprint(
            budget,
            context_tokens=context,
            min_retained_mass=request.kv.min_retained_mass,
            block_size=self._store.block_size,
        )
        if needed > self._store.num_blocks:
            raise NeverFitsError(
                f"the request alone needs {needed} KV blocks, the pool has {self._store.num_blocks}",
                param="prompt",
            )

    def _check_token_ids(self, request: EngineRequest) -> None:
        last = self.limits.vocab_size - 1
        bad = next((token for token in request.prompt_token_ids if not 0 <= token <= last), None)
        if bad is not None:
            raise InvalidRequestError(f"token id {bad} is not in 0..{last}", param="prompt")
        others = {
            "logit_bias": request.sampling.logit_bias,
            "stop_token_ids": request.sampling.stop_token_ids,
            "answer_token_ids": request.answer_token_ids,
        }
        for name, token_ids in others.items():
            if any(not 0 <= token <= last for token in token_ids):
                raise InvalidRequestError(f"{name}: token ids must be in 0..{last}", param=name)

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
            outputs.append(
                RequestOutput(sequence.request.request_id, finish_reason=sequence.finish_reason, receipt=receipt)
            )
        self._ended = []
        return outputs

    # A step.

    def schedule(self, *, now_s: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to do."""
        self._tick(now_s)
        step = _StepBuilder(self.limits.max_num_batched_tokens)
        self._running.sort(key=lambda sequence: sequence.order)
        for decoding in (True, False):
            for sequence in tuple(self._running):
                if sequence in self._running and sequence.prompt_done == decoding:
                    self._schedule_decode(sequence, step) if decoding else self._schedule_chunk(sequence, step)
        if not step.preempted:
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
        elapsed_s = 0.0 if self._last_tick_s is None else now_s - self._last_tick_s
        self._last_tick_s = now_s
        for sequence in [*self._running, *self._ended]:
            if sequence.kv is not None:
                sequence.page_seconds += elapsed_s * len(sequence.kv.block_ids)

    def _schedule_decode(self, sequence: Sequence, step: _StepBuilder) -> None:
        kv = _resident(sequence)
        if step.tokens_left < 1:
            return
        while not self._cut_to_budget(kv) or not self._store.extend_decode(kv):
            if not self._preempt_after(sequence, step):
                self._preempt(sequence, step)
                return
        replace, num_slots = kv.victim_pending, kv.num_slots
        choose_victims = self._store.wrote_decode(kv)
        step.add(
            RowPlan(
                seq_id=sequence.seq_id,
                token_ids=(sequence.tokens[-1],),
                step=SequenceStep(
                    row=kv.row,
                    block_table=tuple(kv.block_ids),
                    start=kv.num_tokens - 1,
                    num_tokens=1,
                    num_slots=num_slots,
                    rule=kv.rule,
                    replace=replace,
                    choose_victims=choose_victims,
                ),
                sample=_sample_request(sequence),
                report_retained=choose_victims and sequence.keeps_floor,
            )
        )

    def _cut_to_budget(self, kv: SequenceKV) -> bool:
        """Cut a sequence whose prompt is done to its budget."""
        if not kv.over_budget:
            return True
        assert kv.budget is not None
        return self._store.shrink(kv, kv.budget, prompt_done=True)

    def _schedule_chunk(self, sequence: Sequence, step: _StepBuilder) -> None:
        kv = _resident(sequence)
        while True:
            chunk = self._chunk(sequence, kv, step.tokens_left)
            if chunk == 0:
                return
            if self._store.extend(kv, chunk, may_evict=not sequence.keeps_floor):
                break
            fitting = self._chunk(sequence, kv, min(chunk, self._store.room(kv)))
            if fitting and self._store.extend(kv, fitting, may_evict=False):
                chunk = fitting
                break
            if not self._preempt_after(sequence, step):
                return
        self._add_chunk(sequence, kv, chunk, step)

    def _chunk(self, sequence: Sequence, kv: SequenceKV, limit: int) -> int:
        """Return the next chunk's length within a limit: to the prompt's end, or to a multiple of the block size."""
        remaining = len(sequence.tokens) - kv.num_tokens
        chunk = self._store.next_chunk(kv, min(limit, remaining))
        if chunk == remaining:
            return chunk
        end = (kv.num_tokens + chunk) // self._store.block_size * self._store.block_size
        return max(0, end - kv.num_tokens)

    def _add_chunk(self, sequence: Sequence, kv: SequenceKV, chunk: int, step: _StepBuilder) -> None:
        start, num_slots = kv.num_tokens, kv.num_slots
        self._store.wrote(kv, chunk)
        sequence.evicted_in_prefill |= kv.evicted_in_prefill
        last = kv.num_tokens == len(sequence.tokens)
        step.add(
            RowPlan(
                seq_id=sequence.seq_id,
                token_ids=tuple(sequence.tokens[start : start + chunk]),
                step=SequenceStep(
                    row=kv.row,
                    block_table=tuple(kv.block_ids),
                    start=start,
                    num_tokens=chunk,
                    num_slots=num_slots,
                    rule=kv.rule,
                ),
                sample=_sample_request(sequence) if last else None,
            )
        )

    def _admit(self, step: _StepBuilder, *, now_s: float) -> None:
        self._waiting.sort(key=lambda sequence: sequence.order)
        while self._waiting and len(self._running) < self.limits.max_num_seqs and step.tokens_left > 0:
            sequence = self._waiting[0]
            if not (self._resume(sequence) if sequence.kv is not None else self._open(sequence, step)):
                return
            self._waiting.remove(sequence)
            self._running.append(sequence)
            self._schedule_decode(sequence, step) if sequence.prompt_done else self._schedule_chunk(sequence, step)
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = now_s

    def _resume(self, sequence: Sequence) -> bool:
        assert sequence.kv is not None
        return self._store.resume(sequence.kv)

    def _open(self, sequence: Sequence, step: _StepBuilder) -> bool:
        """Open a sequence's KV with room for its prompt, or for a chunk where that must do; False if there is none."""
        room_for = len(sequence.tokens)
        room = (self._store.num_free + self._store.num_cached) * self._store.block_size
        if room < room_for and sequence.budget is not None and not sequence.keeps_floor:
            # It may be cut to its budget between chunks, so it can start in less than its whole prompt needs.
            if room < sequence.budget + self._store.block_size:
                return False
            room_for = min(room, max(step.tokens_left, self._store.block_size))
        kv = self._store.open(
            OpenRequest(
                seq_id=sequence.seq_id,
                tokens=sequence.tokens,
                prompt_tokens=sequence.num_prompt,
                policy=sequence.policy,
                budget=sequence.budget,
                salt=sequence.request.cache_salt,
            ),
            room_for=room_for,
        )
        if kv is None:
            return False
        sequence.kv = kv
        if not sequence.preemptions:
            sequence.prompt_tokens_cached = kv.num_cached_tokens
        return True

    def _preempt_after(self, sequence: Sequence, step: _StepBuilder) -> bool:
        """Preempt the last running sequence that comes after this one in order and is not in the step yet."""
        candidates = [other for other in self._running if other.order > sequence.order and not step.holds(other)]
        if not candidates:
            return False
        self._preempt(max(candidates, key=lambda other: other.order), step)
        return True

    def _preempt(self, sequence: Sequence, step: _StepBuilder) -> None:
        if self._store.preempt(_resident(sequence)) is PreemptedBy.RECOMPUTE:
            sequence.kv = None
            sequence.prompt_done = False
        sequence.preemptions += 1
        self.totals.preemptions += 1
        step.preempted = True
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
            reason = sequence.ends_with(sample.token_id, max_model_len=self.limits.max_model_len)
            if reason is not None:
                self._end(sequence, reason)
        return outputs

    def budget_queries(self) -> dict[SeqId, BudgetQuery]:
        """Return the cuts at a prompt's end whose budget depends on a floor of retained mass."""
        queries = {}
        for sequence in self._running:
            kv = _resident(sequence)
            if sequence.prompt_done and sequence.keeps_floor and kv.over_budget and kv.budget is not None:
                queries[sequence.seq_id] = BudgetQuery(
                    residence=kv.residence,
                    policy=sequence.policy,
                    floor=sequence.request.kv.min_retained_mass,
                    budget=kv.budget,
                    prompt_tokens=sequence.num_prompt,
                    num_tokens=kv.num_tokens,
                )
        return queries

    def set_budgets(self, budgets: dict[SeqId, int]) -> None:
        """Take the answers to `budget_queries`."""
        for sequence in self._running:
            if sequence.seq_id in budgets:
                _resident(sequence).budget = budgets[sequence.seq_id]

    def audit(self) -> None:
        """Prove that the store's accounting is exact and that it serves just these sequences; AssertionError if not."""
        self._store.audit()
        everyone = [*self._waiting, *self._running, *self._ended]
        holders = {sequence.seq_id for sequence in everyone if sequence.kv is not None}
        assert holders == {kv.seq_id for kv in self._store.open_sequences()}, (
            "the store serves other sequences than the scheduler"
        )
        assert len(everyone) == len(self._by_request), "a request was lost"


class _StepBuilder:
    """A step while it is being decided."""

    def __init__(self, max_tokens: int) -> None:
        self.rows: list[RowPlan] = []
        self.tokens_left = max_tokens
        self.preempted = False
        self._seq_ids: set[SeqId] = set()

    def add(self, row: RowPlan) -> None:
        self.rows.append(row)
        self.tokens_left -= row.step.num_tokens
        self._seq_ids.add(row.seq_id)

    def holds(self, sequence: Sequence) -> bool:
        return sequence.seq_id in self._seq_ids


def _resident(sequence: Sequence) -> SequenceKV:
    assert sequence.kv is not None, "a running sequence has its KV"
    return sequence.kv


def _sample_request(sequence: Sequence) -> SampleRequest:
    params = sequence.request.sampling
    if not params.needs_history:
        return SampleRequest(params, sequence.num_answer)
    return SampleRequest(
        params,
        sequence.num_answer,
        prompt=sequence.request.prompt_token_ids,
        answer=tuple(sequence.tokens[sequence.num_prompt :]),
    )
