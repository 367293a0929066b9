"""Composing a step: which sequences compute what in it, and who gives way where blocks are missing. Pure.

A step is one batch under one token budget. Decodes come first, one token each, then prefill chunks, those of running
sequences before new ones of the same priority, each group in (priority, arrival) order. A chunk that does not end its
prompt ends at a multiple of the block size. Beside sequences of a higher priority, and for a while after the last of a
tenant that has one, prompts get but a part of the budget: so the step stays short, and with it the time to those ones'
next token, and to the first token of one that comes while the step runs.

When blocks are missing, elastic sequences are shrunk first (reclaim.py), before anything is computed in the step: for
what running sequences need next, and for the first one that waits. If a running sequence still finds no block, the last
in order is preempted until it does: moved to host memory, or recomputed later if there is no room for it and nothing of
it was evicted. Elastic sequences that hold more than they are due come after all others, in the step and to be kept.
A step in which blocks are missing admits nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvorum.kvstore.opening import OpenRequest
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.store import KVStore, PreemptedBy
from kvorum.kvstore.types import blocks_for
from kvorum.workers.bidding import blocks_to_go_on, holds_more_than_due
from kvorum.workers.governance import LadderStep
from kvorum.workers.plan import StepPlan
from kvorum.workers.reclaim import Reclaimer, is_measuring
from kvorum.workers.request import EventKind, lowest_priority, tenant_priority
from kvorum.workers.sequence import Sequence
from kvorum.workers.step_builder import StepBuilder, chunk_row, decode_row

# Of a step's budget, for all prompts together of a lower priority than a sequence that is here, or than a tenant that
# was lately: its next request may come any moment.
_BACKGROUND_PART = 4
_URGENT_S = 10.0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_batched_tokens: tokens computed in a step. max_num_seqs: sequences in a step."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Queues:
    """waiting: hold no block. running: in the pool."""

    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)


class Composer:
    """Composes one step after the other out of the queues, and moves sequences between these."""

    def __init__(self, store: KVStore, limits: SchedulerLimits, reclaimer: Reclaimer, queues: Queues) -> None:
        self._store = store
        self._limits = limits
        self._reclaimer = reclaimer
        self._waiting, self._running = queues.waiting, queues.running
        self._now_s = 0.0
        self._last_seen_s: dict[int, float] = {}  # by tenants' priority
        self.num_preemptions = 0

    def compose(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to do."""
        self._now_s = now_s
        step = StepBuilder(self._limits.max_num_batched_tokens, urgent=self._urgent_priority())
        self._waiting.sort(key=lambda sequence: sequence.order)
        self._reclaimer.begin_step(self._running, now_s=now_s)
        self._make_room(step)
        self._running.sort(key=self._rank)
        running = tuple(self._running)
        for sequence in running:
            if sequence in self._running and sequence.prompt_done:
                self._schedule_decode(sequence, step)
        for sequence in running:
            if sequence in self._running and not sequence.prompt_done:
                self._admit(step, before=sequence.request.priority)
                self._schedule_chunk(sequence, step)
        self._admit(step)
        ops = self._store.take_ops()
        if not ops and not step.rows:
            return None
        return StepPlan(ops, tuple(step.rows))

    def _urgent_priority(self) -> int | None:
        """Return the highest priority of what is here, or the lowest of the highest tenant's that was here lately."""
        here = [sequence.request.priority for sequence in (*self._waiting, *self._running)]
        self._last_seen_s |= dict.fromkeys(map(tenant_priority, here), self._now_s)
        since_s = self._now_s - _URGENT_S
        self._last_seen_s = {tenant: seen_s for tenant, seen_s in self._last_seen_s.items() if seen_s > since_s}
        return min((*here, *map(lowest_priority, self._last_seen_s)), default=None)

    def _rank(self, sequence: Sequence) -> tuple[bool, tuple[int, float, int]]:
        """Return a sort key: who gets blocks first, and keeps them longest."""
        return holds_more_than_due(sequence, self._store.block_size), sequence.order

    def _make_room(self, step: StepBuilder) -> None:
        """Shrink elastic sequences for what this step needs, and for the first that waits if that lets it start."""
        newcomer = self._waiting[0] if self._waiting and len(self._running) < self._limits.max_num_seqs else None
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
        kv = resident(sequence)
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
        kv = resident(sequence)
        if not kv.over_budget:
            return True
        assert kv.budget is not None
        alive = kv.alive_slots
        if not self._store.shrink(kv, kv.budget, prompt_done=True):
            return False
        sequence.note(EventKind.CUT, self._now_s, alive - kv.alive_slots)
        return True

    def _schedule_chunk(self, sequence: Sequence, step: StepBuilder) -> None:
        kv = resident(sequence)
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
        """Return how many tokens of a prompt a step may compute: few where there are higher priorities."""
        if step.urgent is None or sequence.request.priority <= step.urgent:
            return step.tokens_left
        part = max(self._store.block_size, self._limits.max_num_batched_tokens // _BACKGROUND_PART)
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
        if step.urgent is not None and sequence.request.priority > step.urgent:
            step.background_tokens += chunk

    def _admit(self, step: StepBuilder, *, before: int | None = None) -> None:
        """Start sequences that wait while there is room; before: only those that run before this priority."""
        while self._waiting and len(self._running) < self._limits.max_num_seqs and step.tokens_left > 0:
            sequence = self._waiting[0]
            if step.is_short or (before is not None and sequence.request.priority >= before):
                return
            if not sequence.prompt_done and not self._tokens_for(sequence, step):
                return
            if not (self._resume(sequence) if sequence.kv is not None else self._open(sequence, step)):
                return
            is_first = sequence.first_scheduled_s is None
            kept_tokens = resident(sequence).alive_slots
            sequence.note(EventKind.STARTED if is_first else EventKind.RESUMED, self._now_s, kept_tokens)
            self._waiting.remove(sequence)
            self._running.append(sequence)
            self._schedule_decode(sequence, step) if sequence.prompt_done else self._schedule_chunk(sequence, step)
            if sequence.first_scheduled_s is None:
                sequence.first_scheduled_s = self._now_s

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
        before, tokens = self._store.num_available, resident(sequence).alive_slots
        if self._store.preempt(resident(sequence)) is PreemptedBy.RECOMPUTE:
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
        self.num_preemptions += 1
        step.is_short = True
        self._running.remove(sequence)
        self._waiting.append(sequence)


def resident(sequence: Sequence) -> SequenceKV:
    """Return the KV of a sequence that runs."""
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
