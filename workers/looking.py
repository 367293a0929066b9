"""What an operator may look at in an engine: who is there, and one sequence's slots in one KV head. Plain data.

Routers use this module too; it imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvorum.workers.plan import HeadQuery, HeadSlots
from kvorum.workers.request import RequestId, SequenceEvent
from kvorum.workers.sequence import Sequence


class Phase(StrEnum):
    """What a sequence does."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    OFFLOADED = "offloaded"  # waiting, with its KV in host memory


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """One sequence at a glance.

    num_prompt, num_tokens: of the prompt, and with the answer so far. blocks: that it holds. reserved_blocks: of its
    lease. kv_budget: tokens per KV head it is held to; None without limit. evicted_tokens: per KV head.
    """

    request_id: RequestId
    tenant: str
    policy: str
    phase: Phase
    num_prompt: int
    num_tokens: int
    blocks: int
    reserved_blocks: int
    kv_budget: int | None
    evicted_tokens: int
    shrinks: int
    offloads: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class SequenceLook:
    """One sequence, and its slots in one KV head.

    token_ids: prompt and answer so far. num_written: of those, whose KV was written. num_cached: found in the prefix
    cache. block_ids: in order of slots. num_shared: leading blocks that others may hold too. slots: of the KV head that
    was asked for, without scores where nothing is ever evicted; None while nothing is there.
    """

    row: SequenceRow
    token_ids: tuple[int, ...]
    num_written: int
    num_cached: int
    block_ids: tuple[int, ...]
    num_shared: int
    slots: HeadSlots | None
    events: tuple[SequenceEvent, ...]


def row_of(sequence: Sequence) -> SequenceRow:
    """Return a sequence at a glance."""
    kv = sequence.kv
    return SequenceRow(
        request_id=sequence.request.request_id,
        tenant=sequence.tenant,
        policy=sequence.policy.name,
        phase=_phase(sequence),
        num_prompt=sequence.num_prompt,
        num_tokens=len(sequence.tokens),
        blocks=0 if kv is None else len(kv.block_ids),
        reserved_blocks=sequence.request.terms.reserved_blocks,
        kv_budget=sequence.budget if kv is None else kv.budget,
        evicted_tokens=0 if kv is None else kv.num_evicted,
        shrinks=sequence.shrinks,
        offloads=sequence.offloads,
        preemptions=sequence.preemptions,
    )


def _phase(sequence: Sequence) -> Phase:
    if sequence.kv is None:
        return Phase.WAITING
    if sequence.kv.swapped:
        return Phase.OFFLOADED
    return Phase.DECODE if sequence.prompt_done else Phase.PREFILL


def head_query(sequence: Sequence, *, layer: int, kv_head: int) -> HeadQuery | None:
    """Return what to ask the ranks; None when they have nothing of it, or nothing that the engine does not know."""
    kv = sequence.kv
    if kv is None or kv.rule is None or not kv.num_slots:
        return None
    return HeadQuery(kv.residence, kv.rule, kv.num_tokens - 1, layer, kv_head)


def look_at(sequence: Sequence, slots: HeadSlots | None) -> SequenceLook:
    """Put together what the engine knows and what a rank has answered."""
    kv = sequence.kv
    return SequenceLook(
        row=row_of(sequence),
        token_ids=tuple(sequence.tokens),
        num_written=0 if kv is None else kv.num_tokens,
        num_cached=sequence.prompt_tokens_cached,
        block_ids=() if kv is None else tuple(kv.block_ids),
        num_shared=0 if kv is None else kv.num_shared,
        slots=_all_slots(kv.num_slots) if slots is None and kv is not None else slots,
        events=tuple(sequence.events),
    )


def _all_slots(num_slots: int) -> HeadSlots:
    """Return the slots of a policy that keeps everything: in the order of the tokens, and without scores."""
    return HeadSlots(tuple(range(num_slots)), (), (), (True,) * num_slots)
