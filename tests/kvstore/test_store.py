"""The store's bookkeeping, scenario by scenario, with exact block ids and memory operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pytest

from kvorum.kernels.plan import ShrinkRequest
from kvorum.kvstore.opening import OpenRequest
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
from kvorum.kvstore.policies import POLICIES, Policy, parse_policy
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.store import KVStore, PreemptedBy
from kvorum.kvstore.types import BlockId, SeqId, SnapshotId

BLOCK_SIZE = 4
FULL, H2O, SNAP = POLICIES["full"], POLICIES["h2o"], POLICIES["snap_h2o"]


def text(length: int, *, branch: int | None = None) -> list[int]:
    """Return the first tokens of one long text, or of another one from the branch on."""
    return [i if branch is None or i < branch else 1000 + i for i in range(length)]


class Rig:
    """A store whose steps are carried out at once, and whose operations are collected."""

    def __init__(self, *, num_blocks: int = 12, max_num_seqs: int = 3, caching: bool = True) -> None:
        self.store = KVStore(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=caching,
        )
        self._next_seq_id = 0

    def try_open(
        self,
        tokens: Sequence[int],
        policy: Policy = FULL,
        *,
        budget: int | None = None,
        salt: str = "",
        room_for: int | None = None,
    ) -> SequenceKV | None:
        request = OpenRequest(SeqId(self._next_seq_id), tokens, len(tokens), policy, budget, salt)
        self._next_seq_id += 1
        return self.store.open(request, room_for=len(tokens) if room_for is None else room_for)

    def open(
        self,
        tokens: Sequence[int],
        policy: Policy = FULL,
        *,
        budget: int | None = None,
        salt: str = "",
        room_for: int | None = None,
    ) -> SequenceKV:
        sequence = self.try_open(tokens, policy, budget=budget, salt=salt, room_for=room_for)
        assert sequence is not None
        return sequence

    def prefill(self, sequence: SequenceKV, tokens: Sequence[int], *, chunk: int = 10**6) -> list[int]:
        """Compute a prompt; returns the lengths of its chunks."""
        lengths = []
        while sequence.num_tokens < len(tokens):
            length = self.store.next_chunk(sequence, min(chunk, len(tokens) - sequence.num_tokens))
            assert self.store.extend(sequence, length, may_evict=True)
            self.store.wrote(sequence, length)
            self.store.finish_chunk(sequence, tokens, prompt_done=sequence.num_tokens == len(tokens))
            lengths.append(length)
        return lengths

    def run(self, tokens: Sequence[int], policy: Policy = FULL, *, budget: int | None = None) -> SequenceKV:
        sequence = self.open(tokens, policy, budget=budget)
        self.prefill(sequence, tokens)
        return sequence

    def cache(self, tokens: Sequence[int], policy: Policy = FULL) -> None:
        """Leave a prompt's full blocks behind, unreferenced, and no operations."""
        self.store.close(self.run(tokens, policy))
        self.store.take_ops()

    def decode(self, sequence: SequenceKV, count: int) -> list[bool]:
        """Take tokens; returns for each whether its step chooses victims."""
        chosen = []
        for _ in range(count):
            assert self.store.extend_decode(sequence)
            chosen.append(self.store.wrote_decode(sequence))
        return chosen

    def ops(self) -> tuple[MemoryOp, ...]:
        self.store.audit()
        return self.store.take_ops()

    def state(self) -> tuple[object, ...]:
        """Return all that a refusal must not change."""
        store = self.store
        sequences = [asdict(sequence) for sequence in store._sequences.values()]
        rows, ops = list(store._free_rows), list(store._ops)
        cached = sorted(node.block_id for node in store.cached_nodes())
        return store.num_free, store.num_held, cached, sequences, rows, ops


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, numbers))


class TestOpen:
    def test_a_cold_start_takes_blocks_for_its_whole_prompt(self) -> None:
        rig = Rig()
        sequence = rig.open(text(10))
        assert sequence.block_ids == [0, 1, 2]
        assert (sequence.num_tokens, sequence.num_slots, sequence.num_cached_tokens) == (0, 0, 0)
        assert rig.ops() == (ClearVictims(sequence.row),)

    def test_a_hit_shares_the_cached_blocks(self) -> None:
        rig = Rig()
        rig.cache(text(10))  # leaves blocks 0 and 1, block 2 is free again
        sequence = rig.open(text(15, branch=9))
        assert sequence.block_ids == [0, 1, 2, 3]
        assert (sequence.num_tokens, sequence.num_slots, sequence.num_cached_tokens) == (8, 8, 8)
        assert sequence.num_shared == 2
        assert rig.ops() == (ClearVictims(sequence.row),)

    def test_a_hit_leaves_a_token_to_compute(self) -> None:
        rig = Rig()
        rig.cache(text(8))
        assert rig.open(text(8)).num_cached_tokens == 4

    def test_running_sequences_share_too(self) -> None:
        rig = Rig()
        first = rig.run(text(10))
        second = rig.open(text(10))
        assert second.block_ids == [*first.block_ids[:2], 3]
        rig.store.audit()

    def test_another_salt_shares_nothing(self) -> None:
        rig = Rig()
        rig.cache(text(10))
        assert rig.open(text(10), salt="other").num_cached_tokens == 0

    def test_without_caching_nothing_is_kept(self) -> None:
        rig = Rig(caching=False)
        rig.cache(text(10), H2O)
        assert rig.store.num_free == 12
        sequence = rig.open(text(10), H2O)
        assert (sequence.num_cached_tokens, sequence.cuts) == (0, [])

    def test_tokens_asked_for_and_found_are_counted(self) -> None:
        rig = Rig()
        rig.cache(text(10))
        rig.open(text(10))
        assert (rig.store.prefix_queries_tokens, rig.store.prefix_hits_tokens) == (20, 8)

    def test_each_sequence_has_a_row_of_its_own(self) -> None:
        rig = Rig(max_num_seqs=2)
        first, second = rig.open(text(1)), rig.open(text(1))
        assert {first.row, second.row} == {0, 1}
        rig.store.close(first)
        assert rig.open(text(1)).row == first.row

    def test_old_cached_blocks_make_room(self) -> None:
        rig = Rig(num_blocks=4)
        rig.cache(text(8))  # blocks 0 and 1
        sequence = rig.open(text(12, branch=0))
        assert sequence.block_ids == [1, 2, 3]
        assert rig.store.num_cached == 1
        rig.store.audit()


class TestScoredHits:
    """Sequences that keep scores copy what they find, with the scores that its own queries gave it."""

    def test_a_prompt_saves_its_scores_at_its_last_full_block(self) -> None:
        rig = Rig()
        sequence = rig.open(text(11), H2O)
        assert sequence.cuts == [8]
        assert rig.prefill(sequence, text(11)) == [8, 3]
        assert rig.ops() == (ClearVictims(sequence.row), SaveScores(SnapshotId(0), ids(0, 1), 8))
        assert sequence.num_shared == 2

    def test_a_hit_is_copied_with_its_scores(self) -> None:
        rig = Rig()
        rig.cache(text(11), H2O)
        sequence = rig.open(text(11), H2O)
        assert sequence.block_ids == [2, 3, 4]
        assert (sequence.num_cached_tokens, sequence.num_slots, sequence.num_shared) == (8, 8, 0)
        assert rig.ops() == (
            ClearVictims(sequence.row),
            CopyBlocks(ids(0, 1), ids(2, 3)),
            LoadScores(SnapshotId(0), ids(2, 3), 8),
        )
        assert rig.store.num_cached == 2

    def test_blocks_without_scores_are_computed_again_and_scores_saved_where_they_end(self) -> None:
        rig = Rig()
        rig.cache(text(9))
        prompt = text(19, branch=9)
        sequence = rig.open(prompt, H2O)
        assert (sequence.num_cached_tokens, sequence.cuts) == (0, [8, 16])
        assert rig.prefill(sequence, prompt) == [8, 8, 3]
        assert rig.ops() == (
            ClearVictims(sequence.row),
            SaveScores(SnapshotId(0), ids(2, 3), 8),  # for the nodes on blocks 0 and 1
            SaveScores(SnapshotId(1), ids(2, 3, 4, 5), 16),
        )

    def test_a_hit_ends_at_the_deepest_scores(self) -> None:
        rig = Rig()
        rig.cache(text(19))  # four blocks without scores
        rig.cache(text(11, branch=9), H2O)  # scores after two of them
        sequence = rig.open(text(19), H2O)
        assert (sequence.num_cached_tokens, sequence.cuts) == (8, [16])

    def test_of_several_scores_the_deepest_are_used(self) -> None:
        rig = Rig(num_blocks=20)
        rig.cache(text(11), H2O)
        rig.cache(text(19), H2O)
        assert rig.open(text(23), H2O).num_cached_tokens == 16

    @pytest.mark.parametrize(("length", "cuts"), [(4, []), (5, [4]), (12, [8]), (13, [12])])
    def test_scores_are_saved_where_the_same_prompt_could_start(self, length: int, cuts: list[int]) -> None:
        assert Rig().open(text(length), H2O).cuts == cuts

    def test_what_a_branch_saved_serves_the_next_branch(self) -> None:
        rig = Rig()
        rig.cache(text(15), H2O)
        first = rig.run(text(15, branch=9), H2O)
        assert first.num_cached_tokens == 0
        second = rig.open([*text(9), 5, 5, 5], H2O)
        assert second.num_cached_tokens == 8

    def test_scores_under_another_decay_are_other_scores(self) -> None:
        rig = Rig()
        rig.cache(text(11), H2O)
        slow = parse_policy("h2o:decay=0.95")
        first = rig.run(text(11), slow)
        assert first.num_cached_tokens == 0
        assert SaveScores(SnapshotId(1), ids(2, 3), 8) in rig.ops()
        assert rig.open(text(11), slow).num_cached_tokens == 8
        assert LoadScores(SnapshotId(1), ids(5, 6), 8) in rig.ops()

    def test_other_numbers_of_a_policy_share_scores(self) -> None:
        rig = Rig()
        rig.cache(text(11), H2O)
        assert rig.open(text(11), parse_policy("h2o_avg:recent=0.1")).num_cached_tokens == 8

    def test_scores_are_saved_once(self) -> None:
        rig = Rig(num_blocks=20)
        first, second = rig.open(text(11), H2O), rig.open(text(11), H2O)
        rig.prefill(first, text(11))
        rig.prefill(second, text(11))
        assert [op for op in rig.ops() if isinstance(op, SaveScores)] == [SaveScores(SnapshotId(0), ids(0, 1), 8)]

    def test_a_prefix_that_no_counted_query_saw_starts_from_zero(self) -> None:
        rig = Rig(num_blocks=40)
        prompt = text(46)
        rig.cache(prompt)  # 11 full blocks, the first 14 tokens before the last 32 queries
        sequence = rig.open(prompt, SNAP)
        assert (sequence.num_cached_tokens, sequence.cuts) == (12, [])
        copied, loaded = rig.ops()[1:]
        assert copied == CopyBlocks(ids(0, 1, 2), ids(*sequence.block_ids[:3]))
        assert loaded == LoadScores(None, ids(*sequence.block_ids[:3]), 12)

    def test_a_hit_that_fits_only_without_its_copy_is_computed_again(self) -> None:
        rig = Rig(num_blocks=4)
        rig.cache(text(11), H2O)  # blocks 0 and 1
        sequence = rig.open(text(11), H2O)
        assert sequence.block_ids == [1, 2, 3]
        assert (sequence.num_cached_tokens, sequence.num_slots) == (0, 0)
        assert rig.ops() == (ClearVictims(sequence.row), DropScores(SnapshotId(0)))

    def test_scores_are_dropped_with_their_node_after_all_else(self) -> None:
        rig = Rig(num_blocks=4)
        rig.store.close(rig.run(text(11), H2O))
        sequence = rig.open(text(12, branch=0))
        assert rig.ops() == (
            ClearVictims(sequence.row),
            SaveScores(SnapshotId(0), ids(0, 1), 8),
            ClearVictims(sequence.row),
            DropScores(SnapshotId(0)),
        )


class TestPublishing:
    def test_a_prompt_is_published_when_it_is_done(self) -> None:
        rig = Rig()
        sequence = rig.open(text(11))
        assert rig.prefill(sequence, text(11), chunk=4) == [4, 4, 3]
        assert sorted(node.block_id for node in rig.store.cached_nodes()) == [0, 1]
        assert sequence.num_shared == 2

    def test_chunks_before_the_end_are_not_published(self) -> None:
        rig = Rig()
        sequence = rig.open(text(11))
        rig.store.wrote(sequence, 8)
        rig.store.finish_chunk(sequence, text(11), prompt_done=False)
        assert rig.store.cached_nodes() == []

    def test_of_two_that_computed_the_same_the_first_one_is_cached(self) -> None:
        rig = Rig()
        first, second = rig.open(text(8)), rig.open(text(8))
        rig.prefill(first, text(8))
        rig.prefill(second, text(8))
        assert sorted(node.block_id for node in rig.store.cached_nodes()) == [0, 1]
        rig.store.close(second)
        rig.store.close(first)
        assert (rig.store.num_free, rig.store.num_cached) == (10, 2)
        rig.store.audit()

    def test_a_prompt_that_could_not_be_cut_beside_its_blocks_is_not_published(self) -> None:
        rig = Rig(num_blocks=5)
        sequence = rig.run(text(18), H2O, budget=8)  # all five blocks, and a cut copy needs three
        assert rig.store.cached_nodes() == []
        assert rig.store.shrink(sequence, 8)
        assert sequence.block_ids == [0, 1]

    def test_old_cached_blocks_count_as_room_for_the_cut(self) -> None:
        rig = Rig(num_blocks=7)
        rig.cache(text(8))
        rig.run(text(18, branch=0), H2O, budget=7)
        assert len(rig.store.cached_nodes()) == 6

    def test_a_prompt_that_was_evicted_from_is_not_published(self) -> None:
        rig = Rig()
        tokens = text(20)
        sequence = rig.open(tokens, H2O, budget=8, room_for=12)
        rig.prefill(sequence, tokens, chunk=4)
        assert sequence.num_evicted > 0
        assert rig.store.cached_nodes() == []


class TestPrefill:
    def test_room_is_counted_in_slots(self) -> None:
        rig = Rig(num_blocks=6)
        rig.cache(text(8))
        sequence = rig.open(text(6, branch=0))
        rig.store.wrote(sequence, 6)
        assert rig.store.room(sequence) == 6 * BLOCK_SIZE - 6

    def test_a_short_pool_cuts_to_the_budget_before_the_next_chunk(self) -> None:
        rig = Rig(num_blocks=4)
        tokens = text(30)
        sequence = rig.open(tokens, H2O, budget=6, room_for=12)
        assert (sequence.tight, sequence.cuts, sequence.block_ids) == (True, [], [0, 1, 2])
        assert rig.prefill(sequence, tokens, chunk=8) == [8, 8, 8, 6]
        assert (sequence.num_tokens, sequence.num_slots, sequence.evicted_in_prefill) == (30, 12, True)
        cuts = [op for op in rig.ops() if isinstance(op, ShrinkRequest)]
        assert [(op.num_slots, op.keep, op.newest) for op in cuts] == [(8, 6, 7), (14, 6, 15), (14, 6, 23)]
        assert [op.targets for op in cuts] == [(0, 1)] * 3

    def test_a_sequence_that_outgrows_the_pool_is_cut_from_then_on(self) -> None:
        rig = Rig(num_blocks=5)
        sequence = rig.open(text(12), H2O, budget=6)
        rig.store.wrote(sequence, 12)
        rig.open(text(8))  # the other two blocks
        assert rig.store.extend(sequence, 6, may_evict=True)
        assert (sequence.tight, sequence.evicted_in_prefill, sequence.num_slots) == (True, True, 6)
        assert sequence.block_ids == [0, 1, 2]
        rig.store.audit()

    def test_a_sequence_that_may_not_be_cut_yet_has_to_wait(self) -> None:
        rig = Rig(num_blocks=5)
        sequence = rig.open(text(12), H2O, budget=6)
        rig.store.wrote(sequence, 12)
        rig.open(text(8))
        before = rig.state()
        assert not rig.store.extend(sequence, 6, may_evict=False)
        assert rig.state() == before

    def test_a_sequence_within_its_budget_has_nothing_to_give(self) -> None:
        rig = Rig(num_blocks=3)
        sequence = rig.open(text(12), H2O, budget=12)
        rig.store.wrote(sequence, 12)
        before = rig.state()
        assert not rig.store.extend(sequence, 1, may_evict=True)
        assert rig.state() == before

    def test_slots_cannot_outrun_blocks(self) -> None:
        rig = Rig()
        sequence = rig.open(text(4))
        with pytest.raises(AssertionError, match="slots outrun blocks"):
            rig.store.wrote(sequence, 5)


class TestShrink:
    def test_a_sequence_that_shares_nothing_is_cut_in_place(self) -> None:
        rig = Rig(caching=False)
        sequence = rig.run(text(15), H2O, budget=9)
        rig.ops()
        assert rig.store.shrink(sequence, 9)
        assert (sequence.block_ids, sequence.num_slots, sequence.num_tokens) == ([0, 1, 2], 9, 15)
        rule = H2O.rule(9, prompt_tokens=15)
        assert rig.ops() == (ShrinkRequest(sequence.row, (0, 1, 2, 3), (0, 1, 2), 15, 9, 14, rule),)
        assert rig.store.num_free == 9

    def test_a_sequence_that_shares_is_cut_into_blocks_of_its_own(self) -> None:
        rig = Rig()
        sequence = rig.run(text(15), H2O, budget=9)
        rig.ops()
        assert rig.store.shrink(sequence, 9)
        assert (sequence.block_ids, sequence.num_shared) == ([4, 5, 6], 0)
        rule = H2O.rule(9, prompt_tokens=15)
        assert rig.ops() == (ShrinkRequest(sequence.row, (0, 1, 2, 3), (4, 5, 6), 15, 9, 14, rule),)
        assert (rig.store.num_cached, rig.store.num_free) == (3, 6)

    def test_without_blocks_of_its_own_it_stops_sharing_and_is_cut_in_place(self) -> None:
        rig = Rig(num_blocks=7)
        sequence = rig.run(text(15), H2O, budget=9)
        rig.open(text(4, branch=0))
        rig.ops()
        assert rig.store.shrink(sequence, 9)
        assert (sequence.block_ids, sequence.num_shared) == ([0, 1, 2], 0)
        rule = H2O.rule(9, prompt_tokens=15)
        assert rig.ops() == (
            ShrinkRequest(sequence.row, (0, 1, 2, 3), (0, 1, 2), 15, 9, 14, rule),
            DropScores(SnapshotId(0)),
        )
        assert rig.store.cached_nodes() == []

    def test_beside_a_sequence_that_shares_its_blocks_it_is_not_cut_in_place(self) -> None:
        rig = Rig(num_blocks=7)
        sequence = rig.run(text(15), H2O, budget=9)
        rig.open(text(6))  # shares block 0
        rig.open(text(4, branch=0))
        before = rig.state()
        assert not rig.store.shrink(sequence, 9)
        assert rig.state() == before

    def test_it_is_held_to_what_it_was_cut_to(self) -> None:
        rig = Rig(caching=False)
        sequence = rig.run(text(15), H2O)
        assert rig.store.shrink(sequence, 9)
        assert sequence.budget == 9
        assert rig.store.shrink(sequence, 7)
        assert (sequence.budget, sequence.block_ids) == (7, [0, 1])

    @pytest.mark.parametrize("keep", [15, 16])
    def test_a_cut_to_what_there_is_changes_nothing(self, keep: int) -> None:
        rig = Rig()
        sequence = rig.run(text(15), H2O, budget=9)
        before = rig.state()
        assert rig.store.shrink(sequence, keep)
        assert rig.state() == before

    @pytest.mark.parametrize(("prompt_done", "pool_width"), [(True, 5), (False, 1)])
    def test_values_are_pooled_at_the_prompts_end_only(self, prompt_done: bool, pool_width: int) -> None:
        rig = Rig()
        sequence = rig.run(text(15), SNAP, budget=9)
        rig.ops()
        assert rig.store.shrink(sequence, 9, prompt_done=prompt_done)
        (op,) = rig.ops()
        assert isinstance(op, ShrinkRequest)
        assert op.pool_width == pool_width

    def test_a_pending_victim_is_not_counted_as_kept(self) -> None:
        rig = Rig(caching=False)
        sequence = rig.run(text(8), H2O, budget=8)
        rig.decode(sequence, 1)
        rig.ops()
        before = rig.state()
        assert rig.store.shrink(sequence, 8)
        assert rig.state() == before
        assert rig.store.shrink(sequence, 7)
        assert (sequence.num_slots, sequence.victim_pending) == (7, False)
        (op,) = rig.ops()
        assert isinstance(op, ShrinkRequest)
        assert (op.num_slots, op.keep, op.newest) == (9, 7, 8)

    def test_a_policy_that_keeps_everything_is_never_cut(self) -> None:
        rig = Rig()
        sequence = rig.run(text(15))
        with pytest.raises(AssertionError, match="never shrunk"):
            rig.store.shrink(sequence, 9)


class TestDecode:
    def test_without_a_budget_it_grows_block_by_block(self) -> None:
        rig = Rig()
        sequence = rig.run(text(7))
        assert rig.decode(sequence, 6) == [False] * 6
        assert (sequence.block_ids, sequence.num_slots, sequence.num_tokens) == ([0, 1, 2, 3], 13, 13)

    def test_at_the_budget_it_holds_one_slot_more_and_grows_no_further(self) -> None:
        rig = Rig(caching=False)
        sequence = rig.run(text(6), H2O, budget=8)
        assert rig.decode(sequence, 6) == [False, False, True, True, True, True]
        assert (sequence.num_slots, sequence.alive_slots, sequence.num_tokens) == (9, 8, 12)
        assert sequence.block_ids == [0, 1, 2]
        assert sequence.num_evicted == 4

    def test_shared_blocks_are_copied_before_the_first_victim_is_overwritten(self) -> None:
        rig = Rig()
        sequence = rig.run(text(9), H2O, budget=10)  # blocks 0 and 1 are cached
        rig.ops()
        assert rig.decode(sequence, 2) == [False, True]
        assert rig.ops() == ()
        assert sequence.block_ids == [0, 1, 2]
        rig.decode(sequence, 1)
        assert rig.ops() == (CopyBlocks(ids(0, 1), ids(3, 4)),)
        assert (sequence.block_ids, sequence.num_shared) == ([3, 4, 2], 0)
        rig.decode(sequence, 1)
        assert rig.ops() == ()
        assert rig.store.num_cached == 2

    def test_without_room_for_that_copy_it_stops_sharing(self) -> None:
        rig = Rig(num_blocks=5)
        sequence = rig.run(text(9), H2O, budget=10)
        rig.decode(sequence, 2)
        rig.open(text(4, branch=0))
        rig.ops()
        rig.decode(sequence, 1)
        assert (sequence.block_ids, sequence.num_shared) == ([0, 1, 2], 0)
        assert rig.store.cached_nodes() == []
        assert rig.ops() == (DropScores(SnapshotId(0)),)

    def test_beside_a_sequence_that_shares_its_blocks_it_waits_for_room(self) -> None:
        rig = Rig(num_blocks=5)
        sequence = rig.run(text(9), H2O, budget=10)
        rig.decode(sequence, 2)
        rig.open(text(7))  # shares block 0
        before = rig.state()
        assert not rig.store.extend_decode(sequence)
        assert rig.state() == before

    def test_without_a_free_block_it_waits(self) -> None:
        rig = Rig(num_blocks=2)
        sequence = rig.run(text(8))
        before = rig.state()
        assert not rig.store.extend_decode(sequence)
        assert rig.state() == before

    def test_a_spared_victim_lives_on_by_a_token_more_of_budget(self) -> None:
        rig = Rig(caching=False)
        sequence = rig.run(text(8), H2O, budget=8)
        rig.decode(sequence, 1)
        rig.ops()
        rig.store.spare_victim(sequence)
        assert (sequence.budget, sequence.alive_slots, sequence.num_evicted) == (9, 9, 0)
        assert rig.ops() == (ClearVictims(sequence.row),)
        assert rig.decode(sequence, 1) == [True]
        assert (sequence.num_slots, sequence.alive_slots) == (10, 9)

    @pytest.mark.parametrize("budget", [5, 8, 11, 12])
    def test_once_cut_it_never_holds_more_than_budget_and_one(self, budget: int) -> None:
        rig = Rig()
        sequence = rig.run(text(20), H2O, budget=budget)
        assert rig.store.shrink(sequence, budget, prompt_done=True)
        for _ in range(12):
            rig.decode(sequence, 1)
            assert len(sequence.block_ids) <= -(-(budget + 1) // BLOCK_SIZE)
        assert sequence.alive_slots == budget


class TestPreemption:
    def evicted(self, rig: Rig) -> SequenceKV:
        """Return a sequence of 8 tokens kept, a victim pending, in blocks 0, 1 and 2."""
        sequence = rig.run(text(8), H2O, budget=8)
        rig.decode(sequence, 3)
        rig.ops()
        return sequence

    def test_a_sequence_that_lost_nothing_is_dropped(self) -> None:
        rig = Rig()
        sequence = rig.run(text(10))
        rig.ops()
        assert rig.store.preempt(sequence) is PreemptedBy.RECOMPUTE
        assert (rig.store.num_held, rig.store.num_cached) == (0, 2)
        assert rig.ops() == ()
        assert len(rig.store._free_rows) == 3

    def test_a_sequence_that_was_evicted_from_moves_to_host_memory(self) -> None:
        rig = Rig(caching=False)
        sequence = self.evicted(rig)
        row = sequence.row
        assert rig.store.preempt(sequence) is PreemptedBy.SWAP
        assert rig.ops() == (SwapOut(sequence.seq_id, row, ids(0, 1, 2), 9),)
        assert (sequence.block_ids, sequence.num_slots, sequence.swapped) == ([], 8, True)
        assert (sequence.num_tokens, sequence.num_evicted, sequence.victim_pending) == (11, 3, False)
        assert (rig.store.num_free, len(rig.store._free_rows)) == (12, 3)

    def test_it_comes_back_with_room_for_a_token_more(self) -> None:
        rig = Rig(caching=False)
        sequence = self.evicted(rig)
        rig.store.preempt(sequence)
        rig.ops()
        neighbour = rig.open(text(4))
        rig.ops()
        assert rig.store.resume(sequence)
        assert sequence.row != neighbour.row
        assert sequence.block_ids == [1, 2, 3]
        assert rig.ops() == (ClearVictims(sequence.row), SwapIn(sequence.seq_id, ids(1, 2, 3)))
        assert rig.decode(sequence, 2) == [True, True]
        assert (sequence.num_slots, sequence.alive_slots, sequence.num_tokens) == (9, 8, 13)

    def test_without_blocks_it_stays_where_it_is(self) -> None:
        rig = Rig(num_blocks=3, caching=False)
        sequence = self.evicted(rig)
        rig.store.preempt(sequence)
        rig.open(text(4))
        before = rig.state()
        assert not rig.store.resume(sequence)
        assert rig.state() == before

    def test_without_a_row_it_stays_where_it_is(self) -> None:
        rig = Rig(max_num_seqs=1, caching=False)
        sequence = self.evicted(rig)
        rig.store.preempt(sequence)
        rig.open(text(4))
        before = rig.state()
        assert not rig.store.resume(sequence)
        assert rig.state() == before

    def test_closed_in_host_memory_it_is_forgotten_there(self) -> None:
        rig = Rig(caching=False)
        sequence = self.evicted(rig)
        rig.store.preempt(sequence)
        rig.ops()
        rig.store.close(sequence)
        assert rig.ops() == (DropSwap(sequence.seq_id),)
        assert len(rig.store._free_rows) == 3

    def test_what_it_shared_stays_cached(self) -> None:
        rig = Rig()
        sequence = rig.run(text(8), H2O, budget=8)
        rig.decode(sequence, 2)
        rig.store.preempt(sequence)
        assert (sequence.num_shared, rig.store.num_held, rig.store.num_cached) == (0, 0, 2)
        rig.ops()


class TestRefusal:
    """What does not fit now is answered None, and nothing has changed."""

    def test_a_prompt_that_does_not_fit(self) -> None:
        rig = Rig(num_blocks=4)
        rig.open(text(8))
        before = rig.state()
        assert rig.try_open(text(12, branch=0)) is None
        assert rig.state() == before

    @pytest.mark.parametrize("policy", [FULL, H2O])
    def test_a_prompt_whose_hit_does_not_help_enough(self, policy: Policy) -> None:
        rig = Rig(num_blocks=6)
        rig.cache(text(9), H2O)
        rig.open(text(8, branch=0))
        before = rig.state()
        assert rig.try_open(text(24), policy) is None
        assert rig.state() == before
        rig.store.audit()

    def test_more_sequences_than_rows(self) -> None:
        rig = Rig(max_num_seqs=1)
        rig.cache(text(9))
        rig.open(text(4))
        before = rig.state()
        assert rig.try_open(text(4)) is None
        assert rig.state() == before


class TestAudit:
    def test_a_block_that_nobody_holds_is_found(self) -> None:
        rig = Rig()
        rig.store._pool.allocate(1)
        with pytest.raises(AssertionError, match="references drifted"):
            rig.store.audit()

    def test_a_block_that_a_sequence_forgot_is_found(self) -> None:
        rig = Rig()
        rig.open(text(8)).block_ids.pop()
        with pytest.raises(AssertionError, match="references drifted"):
            rig.store.audit()

    def test_two_sequences_on_a_row_are_found(self) -> None:
        rig = Rig()
        rig.open(text(4)).row = rig.open(text(4)).row
        with pytest.raises(AssertionError, match="rows drifted"):
            rig.store.audit()

    def test_slots_without_blocks_are_found(self) -> None:
        rig = Rig()
        rig.open(text(4)).num_slots = 5
        with pytest.raises(AssertionError):
            rig.store.audit()

    def test_a_cached_block_that_its_sequence_thinks_its_own_is_found(self) -> None:
        rig = Rig()
        rig.run(text(8)).num_shared = 1
        with pytest.raises(AssertionError, match="not known as shared"):
            rig.store.audit()
