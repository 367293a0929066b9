"""What a running sequence holds, wants and is due, in blocks, and what it bids when the pool is short."""

from __future__ import annotations

from kvorum.kvstore.pricing import Bidder
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.store import KVStore
from kvorum.kvstore.types import blocks_for
from kvorum.workers.sequence import Sequence


def held_blocks(sequence: Sequence) -> int:
    """Return how many blocks a sequence has in its table."""
    return 0 if sequence.kv is None else len(sequence.kv.block_ids)


def least_blocks(sequence: Sequence, block_size: int) -> int:
    """Return the blocks below which an elastic sequence is never shrunk, its floor of retained mass aside."""
    return blocks_for(sequence.least_tokens + 1, block_size)


def surplus_blocks(sequence: Sequence) -> int:
    """Return what an elastic sequence holds beyond what its lease reserved."""
    return max(0, held_blocks(sequence) - sequence.request.terms.reserved_blocks)


def holds_more_than_due(sequence: Sequence, block_size: int) -> bool:
    """Say whether others may take blocks from a sequence, or its place."""
    due = max(sequence.request.terms.reserved_blocks, least_blocks(sequence, block_size))
    return sequence.is_elastic and held_blocks(sequence) > due


def growth_blocks(sequence: Sequence, block_size: int) -> int:
    """Return how many blocks more a running sequence will hold when it goes on."""
    kv = sequence.kv
    assert kv is not None, "a running sequence has its KV"
    if sequence.prompt_done:
        return 0 if kv.victim_pending or kv.over_budget else kv.missing_blocks(kv.num_slots + 1, block_size)
    remaining = len(sequence.tokens) - kv.num_tokens
    return kv.missing_blocks(_slots_kept(kv) + min(block_size, remaining), block_size)


def blocks_to_go_on(sequence: Sequence, store: KVStore) -> int:
    """Return how many blocks a running sequence must get to go on: to grow, or as copies of what it shares."""
    kv = sequence.kv
    assert kv is not None, "a running sequence has its KV"
    if sequence.prompt_done and (kv.victim_pending or kv.over_budget):
        return store.blocks_to_own(kv)
    return growth_blocks(sequence, store.block_size)


def _slots_kept(kv: SequenceKV) -> int:
    """Return the slots that a sequence keeps before its next chunk."""
    return kv.budget if kv.tight and kv.over_budget and kv.budget is not None else kv.num_slots


def can_be_shrunk(sequence: Sequence) -> bool:
    """Say whether a sequence takes part when blocks are shared out; one that is being measured does next time."""
    kv = sequence.kv
    return (
        sequence.is_elastic
        and sequence.prompt_done
        and sequence.wanted_budget is None
        and kv is not None
        and not kv.over_budget
    )


def bid(sequence: Sequence, block_size: int) -> Bidder:
    """Return what a running elastic sequence bids: for what it holds, and the next block where it needs one."""
    held = held_blocks(sequence)
    most = held + growth_blocks(sequence, block_size)
    gives_nothing = sequence.keeps_floor and held <= sequence.floor_blocks
    return _bidder(sequence, most if gives_nothing else min(most, least_blocks(sequence, block_size)), most)


def bid_of_newcomer(sequence: Sequence, block_size: int) -> Bidder:
    """Return what an elastic sequence bids that is to prefill its prompt; a floor needs all of it."""
    most = blocks_for(len(sequence.tokens), block_size)
    return _bidder(sequence, min(most, blocks_for(sequence.least_tokens + block_size, block_size)), most)


def bid_for_context(sequence: Sequence, block_size: int) -> Bidder:
    """Return what a running elastic sequence would bid if it could hold its whole context so far, and a block more."""
    most = max(held_blocks(sequence), blocks_for(len(sequence.tokens), block_size) + 1)
    return _bidder(sequence, min(most, least_blocks(sequence, block_size)), most)


def _bidder(sequence: Sequence, least: int, most: int) -> Bidder:
    return Bidder(
        name=str(sequence.seq_id),
        tenant=sequence.tenant,
        curve=curve_up_to(sequence.curve, most),
        least=least,
        most=most,
        weight=sequence.request.terms.weight,
    )


def curve_up_to(curve: tuple[float, ...], most: int) -> tuple[float, ...]:
    """Return a curve of most + 1 points: cut, or drawn on as it ended; a straight line where nothing was measured."""
    if len(curve) < 2:
        return tuple(blocks / max(1, most) for blocks in range(most + 1))
    last, slope = curve[-1], curve[-1] - curve[-2]
    beyond = (min(1.0, last + extra * slope) for extra in range(1, most + 2 - len(curve)))
    return (*curve[: most + 1], *beyond)
