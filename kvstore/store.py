"""The KV store's bookkeeping: sequences, block pool and prefix tree under one roof.

Pure: it moves ids and counts, and leaves a list of memory operations (ops.py) for whoever holds the tensors. 'Does not
fit now' is an answer (False or None), never an exception, and leaves everything as it was except that unreferenced
prefix blocks may have been given back, or looked at and so be given back later.

A sequence's way: `open` (prefix hit) - `extend` and `wrote` for each chunk - `finish_chunk` (publish) - `shrink` to the
budget - `extend_decode` and `wrote` for each token - `close`; in between `preempt` and `resume`.

Invariants, which `audit` proves:
 - every reference to a block is a sequence's or the tree's, and every block without one is free;
 - shared blocks (in the tree) are never written, compacted or overwritten;
 - a sequence that keeps scores shares no block that it did not compute itself, since scores are its own: a prefix hit
   is copied, with the scores that the prefix's own queries gave it;
 - a sequence with a budget holds at most blocks_for(budget + 1) blocks once its prompt is done and cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum

from kvorum.kernels.plan import ShrinkRequest
from kvorum.kvstore.opening import OpenRequest, PrefixHit, score_cuts
from kvorum.kvstore.ops import (
    ClearVictims,
    CopyBlocks,
    DropScores,
    DropSwap,
    LoadScores,
    MemoryOp,
    SaveScores,
    SwapIn,
    SwapOut,
)
from kvorum.kvstore.pool_view import PoolView
from kvorum.kvstore.prefix_tree import Node
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.types import BlockId, SnapshotId, blocks_for


class PreemptedBy(Enum):
    """What became of a preempted sequence's KV."""

    RECOMPUTE = "recompute"  # dropped, the tokens are computed again
    SWAP = "swap"  # moved to host memory with scores and positions


class KVStore(PoolView):
    """Bookkeeping of one engine's pool; the engine's scheduler is its only caller.

    max_offloaded_blocks: host memory for preempted sequences that lost nothing; those that were evicted from cannot be
    computed again, so they move there whatever room there is.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        enable_prefix_caching: bool,
        max_offloaded_blocks: int = 0,
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
        self.max_offloaded_blocks = max_offloaded_blocks
        self.prefix_evicted_first: Collection[str] = ()
        self.prefix_evicted_blocks = 0
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._ops: list[MemoryOp] = []
        self._next_snapshot = 0
        self.prefix_queries_tokens = 0
        self.prefix_hits_tokens = 0

    def take_ops(self) -> tuple[MemoryOp, ...]:
        """Return the memory operations since the last call, to be carried out in order."""
        dropped = [DropScores(snapshot_id) for snapshot_id in self._tree.take_dropped_snapshots()]
        ops, self._ops = (*self._ops, *dropped), []
        return ops

    # A sequence comes and goes.

    def open(self, request: OpenRequest, *, room_for: int) -> SequenceKV | None:
        """Start a sequence from the longest usable cached prefix, with blocks for its first room_for tokens.

        None when it does not fit now. At least one token is left to compute; a hit is the result's num_cached_tokens.
        room_for shorter than the tokens: the sequence is cut to its budget after each chunk, and starts without a hit.
        """
        if not self._free_rows:
            return None
        whole = room_for >= len(request.tokens)
        hit = self._find_prefix(request) if whole else PrefixHit()
        cached, depth = self._acquire(hit.nodes), hit.depth
        fresh = self._allocate(blocks_for(room_for, self.block_size) - (0 if request.policy.evicts else depth))
        if fresh is None and request.policy.evicts:
            # The prefix is to be copied, and there is no room for both: compute it again.
            self._tree.release(cached)
            cached, depth = [], 0
            fresh = self._allocate(blocks_for(room_for, self.block_size))
        if fresh is None:
            self._tree.release(cached)
            return None

        sequence = SequenceKV(
            seq_id=request.seq_id,
            row=self._free_rows.pop(),
            policy=request.policy,
            budget=request.budget,
            prompt_tokens=request.prompt_tokens,
            salt=request.salt,
            tenant=request.tenant,
            num_tokens=depth * self.block_size,
            num_slots=depth * self.block_size,
            num_cached_tokens=depth * self.block_size,
            tight=not whole,
        )
        self._ops.append(ClearVictims(sequence.row))
        if request.policy.evicts:
            sequence.block_ids = fresh
            self._start_from_copy(sequence, cached, hit.snapshot)
            used = PrefixHit(hit.chain, depth)
            if whole and self.enable_prefix_caching:
                sequence.cuts = score_cuts(request, used, block_size=self.block_size)
        else:
            sequence.block_ids = cached + fresh
            sequence.num_shared = depth
        self._sequences[sequence.seq_id] = sequence
        self.prefix_queries_tokens += len(request.tokens)
        self.prefix_hits_tokens += sequence.num_cached_tokens
        return sequence

    def _acquire(self, nodes: Sequence[Node]) -> list[BlockId]:
        self._tree.acquire(nodes)
        return [node.block_id for node in nodes]

    def _start_from_copy(self, sequence: SequenceKV, cached: list[BlockId], snapshot: SnapshotId | None) -> None:
        if not cached:
            return
        own = tuple(sequence.block_ids[: len(cached)])
        self._ops.append(CopyBlocks(tuple(cached), own))
        self._ops.append(LoadScores(snapshot, own, sequence.num_slots))
        self._tree.release(cached)

    def close(self, sequence: SequenceKV) -> None:
        """Let go of everything a sequence holds."""
        if sequence.swapped:
            self._ops.append(DropSwap(sequence.seq_id))
        else:
            self._tree.release(sequence.block_ids)
            self._free_rows.append(sequence.row)
        del self._sequences[sequence.seq_id]

    # Prefill.

    def next_chunk(self, sequence: SequenceKV, num_tokens: int) -> int:
        """Clip a chunk so that it ends where scores are to be saved."""
        for cut in sequence.cuts:
            if cut > sequence.num_tokens:
                return min(num_tokens, cut - sequence.num_tokens)
        return num_tokens

    def room(self, sequence: SequenceKV) -> int:
        """Return how many more slots the sequence could get now."""
        blocks = len(sequence.block_ids) + self.num_available
        return blocks * self.block_size - sequence.num_slots

    def extend(self, sequence: SequenceKV, num_tokens: int, *, may_evict: bool) -> bool:
        """Make room for a prefill chunk; when the pool is short, by a cut to the budget first if it may_evict."""
        if not sequence.tight and self._grow(sequence, sequence.num_slots + num_tokens):
            return True
        if may_evict and sequence.over_budget:
            assert sequence.budget is not None
            if not self.shrink(sequence, sequence.budget):
                return False
            sequence.tight = sequence.evicted_in_prefill = True
            sequence.cuts = []
        return self._grow(sequence, sequence.num_slots + num_tokens)

    def wrote(self, sequence: SequenceKV, num_tokens: int) -> None:
        """Record that a step writes the next tokens into the slots that were made ready."""
        sequence.num_tokens += num_tokens
        sequence.num_slots += num_tokens
        assert sequence.num_slots <= len(sequence.block_ids) * self.block_size, "slots outrun blocks"

    def finish_chunk(self, sequence: SequenceKV, tokens: Sequence[int], *, prompt_done: bool) -> None:
        """Publish what a computed chunk completed, with its scores where they are to be saved."""
        if not self.enable_prefix_caching or sequence.num_evicted or sequence.swapped:
            return
        at_cut = sequence.num_tokens in sequence.cuts
        if not (at_cut or prompt_done) or not self._may_publish(sequence):
            return
        num_full = sequence.num_tokens // self.block_size
        if num_full <= sequence.num_shared:
            return
        chain = self._tree.publish(tokens, sequence.block_ids[:num_full], salt=sequence.salt, tenant=sequence.tenant)
        sequence.num_shared = num_full
        if at_cut and sequence.policy.decay not in chain[-1].snapshots:
            self._save_scores(sequence, chain[-1])

    def _may_publish(self, sequence: SequenceKV) -> bool:
        """Say whether the pool can hold the prompt's blocks and the cut copy at once."""
        if not sequence.over_budget:
            return True
        assert sequence.budget is not None
        return blocks_for(sequence.budget + 1, self.block_size) <= self.num_available

    def _save_scores(self, sequence: SequenceKV, node: Node) -> None:
        snapshot_id = SnapshotId(self._next_snapshot)
        self._next_snapshot += 1
        node.snapshots[sequence.policy.decay] = snapshot_id
        self._ops.append(SaveScores(snapshot_id, tuple(sequence.block_ids[: node.depth]), sequence.num_slots))

    def shrink(self, sequence: SequenceKV, keep: int, *, prompt_done: bool = False) -> bool:
        """Hold a sequence to a budget of `keep` tokens per KV head and free the blocks behind them.

        Returns False when the survivors need blocks of their own and there are none.

        prompt_done: this is the cut at the prompt's end, where a policy may pool.
        """
        if keep >= sequence.alive_slots:
            return True
        kept_blocks = blocks_for(keep, self.block_size)
        targets = self._allocate(kept_blocks) if sequence.num_shared else None
        if targets is None:
            if not self._withdraw(sequence):
                return False
            targets = sequence.block_ids[:kept_blocks]
        sequence.budget = keep
        rule = sequence.rule
        assert rule is not None, "a policy that keeps everything is never shrunk"
        self._ops.append(
            ShrinkRequest(
                row=sequence.row,
                sources=tuple(sequence.block_ids),
                targets=tuple(targets),
                num_slots=sequence.num_slots,
                keep=keep,
                newest=sequence.num_tokens - 1,
                rule=rule,
                pool_width=sequence.policy.pool_width if prompt_done else 1,
            )
        )
        self._tree.release(sequence.block_ids if sequence.num_shared else sequence.block_ids[kept_blocks:])
        sequence.block_ids = list(targets)
        sequence.num_shared = 0
        sequence.num_slots = keep
        sequence.victim_pending = False
        return True

    def lift_budget(self, sequence: SequenceKV) -> None:
        """Let a sequence that was held to a budget grow again; a pending victim lives on."""
        if sequence.victim_pending:
            self._ops.append(ClearVictims(sequence.row))
            sequence.victim_pending = False
        sequence.budget = None

    # Decode.

    def extend_decode(self, sequence: SequenceKV) -> bool:
        """Make room for one token: the next slot, or the victim's once its blocks are the sequence's own."""
        if sequence.victim_pending:
            return self._own_blocks(sequence)
        return self._grow(sequence, sequence.num_slots + 1)

    def wrote_decode(self, sequence: SequenceKV) -> bool:
        """Record that a step writes one token; returns whether that step must choose victims."""
        sequence.num_tokens += 1
        if not sequence.victim_pending:
            sequence.num_slots += 1
            sequence.victim_pending = sequence.budget is not None and sequence.num_slots > sequence.budget
        return sequence.victim_pending

    def spare_victim(self, sequence: SequenceKV) -> None:
        """Let the pending victims live, by one token more of budget."""
        assert sequence.victim_pending
        assert sequence.budget is not None
        self._ops.append(ClearVictims(sequence.row))
        sequence.victim_pending = False
        sequence.budget += 1

    def _own_blocks(self, sequence: SequenceKV) -> bool:
        """Replace shared blocks by copies, or stop sharing them when there is no room."""
        if not sequence.num_shared:
            return True
        own = self._allocate(sequence.num_shared)
        if own is None:
            return self._withdraw(sequence)
        shared = sequence.block_ids[: sequence.num_shared]
        self._ops.append(CopyBlocks(tuple(shared), tuple(own)))
        sequence.block_ids[: sequence.num_shared] = own
        self._tree.release(shared)
        sequence.num_shared = 0
        return True

    def _withdraw(self, sequence: SequenceKV) -> bool:
        """Stop sharing a sequence's blocks; False if another sequence holds one of them."""
        if not self._tree.withdraw(sequence.block_ids[: sequence.num_shared]):
            return False
        sequence.num_shared = 0
        return True

    # Preemption.

    def preempt(self, sequence: SequenceKV) -> PreemptedBy:
        """Take all blocks from a sequence: to host memory if it must or there is room, else dropped and closed."""
        num_blocks = blocks_for(sequence.num_slots, self.block_size)
        has_room = sequence.num_slots > 0 and self.num_offloaded + num_blocks <= self.max_offloaded_blocks
        if not sequence.num_evicted and not has_room:
            self.close(sequence)
            return PreemptedBy.RECOMPUTE
        self._ops.append(SwapOut(sequence.seq_id, sequence.row, tuple(sequence.block_ids), sequence.num_slots))
        self._tree.release(sequence.block_ids)
        self._free_rows.append(sequence.row)
        sequence.num_slots = sequence.alive_slots
        sequence.victim_pending = False
        sequence.block_ids = []
        sequence.num_shared = 0
        sequence.swapped = True
        return PreemptedBy.SWAP

    def resume(self, sequence: SequenceKV) -> bool:
        """Bring a swapped sequence back, with room for one more token."""
        if not self._free_rows:
            return False
        blocks = self._allocate(blocks_for(sequence.num_slots + 1, self.block_size))
        if blocks is None:
            return False
        sequence.row = self._free_rows.pop()
        sequence.block_ids = blocks
        sequence.swapped = False
        self._ops += [ClearVictims(sequence.row), SwapIn(sequence.seq_id, tuple(blocks))]
        return True

    # Memory.

    def _grow(self, sequence: SequenceKV, num_slots: int) -> bool:
        fresh = self._allocate(sequence.missing_blocks(num_slots, self.block_size))
        if fresh is None:
            return False
        sequence.block_ids += fresh
        return True

    def _allocate(self, count: int) -> list[BlockId] | None:
        short = count - self._pool.num_free
        if short > self._tree.num_unreferenced:
            return None
        if short > 0:
            num_free = self._pool.num_free
            self._tree.evict(short, first=self.prefix_evicted_first)
            self.prefix_evicted_blocks += self._pool.num_free - num_free
        return self._pool.allocate(count)

    def audit(self) -> None:
        """Prove the accounting by walking every holder; raises AssertionError."""
        holders: Counter[BlockId] = Counter()
        for sequence in self._sequences.values():
            holders.update(sequence.block_ids)
            self._audit_sequence(sequence)
        self._tree.audit(holders)
        self._pool.audit(holders)
        rows = [sequence.row for sequence in self._sequences.values() if not sequence.swapped]
        assert sorted(rows + self._free_rows) == list(range(len(rows) + len(self._free_rows))), "rows drifted"

    def _audit_sequence(self, sequence: SequenceKV) -> None:
        assert sequence.swapped or sequence.num_slots <= len(sequence.block_ids) * self.block_size
        assert 0 <= sequence.alive_slots <= sequence.num_tokens
        shared = [self._tree.is_cached(block_id) for block_id in sequence.block_ids]
        assert not any(shared[sequence.num_shared :]), "a cached block is not known as shared"
