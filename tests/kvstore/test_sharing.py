"""What the store knows of tenants, what a cut would bring, and where sequences go that must leave the pool."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvorum.kvstore.opening import OpenRequest
from kvorum.kvstore.ops import ClearVictims, SwapIn, SwapOut
from kvorum.kvstore.policies import POLICIES, Policy
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.store import KVStore, PreemptedBy
from kvorum.kvstore.types import SeqId

BLOCK_SIZE = 4
FULL, H2O = POLICIES["full"], POLICIES["h2o"]


class Rig:
    """A store, and prompts that are computed at once."""

    def __init__(self, *, num_blocks: int = 40, caching: bool = True, max_offloaded_blocks: int = 0) -> None:
        self.store = KVStore(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            enable_prefix_caching=caching,
            max_offloaded_blocks=max_offloaded_blocks,
        )
        self._next_seq_id = 0

    def request(self, tokens: Sequence[int], policy: Policy, *, tenant: str = "") -> OpenRequest:
        self._next_seq_id += 1
        return OpenRequest(SeqId(self._next_seq_id), tokens, len(tokens), policy, None, "", tenant)

    def run(self, tokens: Sequence[int], policy: Policy = FULL, *, tenant: str = "") -> SequenceKV:
        sequence = self.store.open(self.request(tokens, policy, tenant=tenant), room_for=len(tokens))
        assert sequence is not None
        while sequence.num_tokens < len(tokens):
            length = self.store.next_chunk(sequence, len(tokens) - sequence.num_tokens)
            assert self.store.extend(sequence, length, may_evict=True)
            self.store.wrote(sequence, length)
            self.store.finish_chunk(sequence, tokens, prompt_done=sequence.num_tokens == len(tokens))
        self.store.audit()
        self.store.take_ops()
        return sequence


def text(length: int, *, seed: int = 0) -> list[int]:
    return [1000 * seed + i for i in range(length)]


class TestTenants:
    def test_a_block_that_several_hold_is_counted_once(self) -> None:
        rig = Rig()
        first = rig.run(text(10), tenant="red")
        rig.run(text(18), tenant="blue")  # the first two blocks are red's
        assert rig.store.held_by_tenant() == {"red": 3, "blue": 3}
        rig.store.close(first)
        assert rig.store.held_by_tenant() == {"blue": 5}
        assert rig.store.num_held == 5

    def test_cached_blocks_are_whose_sequence_computed_them(self) -> None:
        rig = Rig()
        for sequence in (rig.run(text(10), tenant="red"), rig.run(text(18), tenant="blue")):
            rig.store.close(sequence)
        assert rig.store.cached_by_tenant() == {"red": 2, "blue": 2}

    def test_cached_blocks_of_tenants_that_have_too_much_go_first(self) -> None:
        rig = Rig(num_blocks=8)
        rig.store.close(rig.run(text(8, seed=1), tenant="old"))
        rig.store.close(rig.run(text(8, seed=2), tenant="red"))
        rig.store.prefix_evicted_first = {"red"}
        rig.run(text(24, seed=3))
        assert rig.store.cached_by_tenant() == {"old": 2}
        assert rig.store.prefix_evicted_blocks == 2


class TestBlocksToOpen:
    def test_what_others_hold_is_had_for_nothing(self) -> None:
        rig = Rig()
        rig.run(text(10))
        assert rig.store.blocks_to_open(rig.request(text(18), FULL)) == 5 - 2

    def test_what_only_the_tree_holds_is_taken_from_what_is_available(self) -> None:
        rig = Rig()
        rig.store.close(rig.run(text(10)))
        assert rig.store.blocks_to_open(rig.request(text(18), FULL)) == 5

    def test_a_sequence_that_keeps_scores_needs_copies(self) -> None:
        rig = Rig()
        rig.run(text(10), H2O)
        assert rig.store.blocks_to_open(rig.request(text(18), H2O)) == 5


class TestCuts:
    @pytest.mark.parametrize(("keep", "gain"), [(7, 3), (8, 3), (9, 2), (19, 0)])
    def test_a_cut_brings_the_blocks_behind_it(self, keep: int, gain: int) -> None:
        rig = Rig(caching=False)
        sequence = rig.run(text(20), H2O)
        available = rig.store.num_available
        assert rig.store.gain_of_cut(sequence, keep) == gain
        rig.store.shrink(sequence, keep)
        assert rig.store.num_available - available == gain

    def test_what_others_hold_too_does_not_come_free_and_survivors_need_copies(self) -> None:
        rig = Rig()
        sequence = rig.run(text(20), H2O)
        rig.run(text(20), FULL)
        available = rig.store.num_available
        assert rig.store.gain_of_cut(sequence, 7) == -1  # of five, one is its own, and two copies are needed
        rig.store.shrink(sequence, 7)
        assert rig.store.num_available - available == -1

    def test_copies_are_needed_only_of_what_others_hold_too(self) -> None:
        rig = Rig()
        sequence = rig.run(text(20), H2O)
        assert rig.store.blocks_to_own(sequence) == 0
        rig.run(text(30), FULL)
        assert rig.store.blocks_to_own(sequence) == 5


class TestLifting:
    def test_a_sequence_grows_again_and_its_pending_victim_lives(self) -> None:
        rig = Rig(caching=False)
        sequence = rig.run(text(20), H2O)
        rig.store.shrink(sequence, 7)
        assert rig.store.extend_decode(sequence)
        assert rig.store.wrote_decode(sequence)
        rig.store.take_ops()
        rig.store.lift_budget(sequence)
        assert rig.store.take_ops() == (ClearVictims(sequence.row),)
        assert (sequence.budget, sequence.alive_slots, sequence.victim_pending) == (None, 8, False)
        assert rig.store.extend_decode(sequence)
        assert not rig.store.wrote_decode(sequence)
        assert (sequence.num_slots, len(sequence.block_ids)) == (9, 3)

    def test_without_a_victim_no_memory_is_touched(self) -> None:
        rig = Rig(caching=False)
        sequence = rig.run(text(20), H2O)
        sequence.budget = 30
        rig.store.lift_budget(sequence)
        assert rig.store.take_ops() == ()


class TestOffloading:
    def test_a_sequence_that_lost_nothing_moves_to_host_memory_while_there_is_room(self) -> None:
        rig = Rig(caching=False, max_offloaded_blocks=5)
        first, second = rig.run(text(10, seed=1)), rig.run(text(12, seed=2))
        row, block_ids = first.row, tuple(first.block_ids)
        assert rig.store.preempt(first) is PreemptedBy.SWAP
        assert rig.store.take_ops() == (SwapOut(first.seq_id, row, block_ids, 10),)
        assert rig.store.num_offloaded == 3
        assert rig.store.preempt(second) is PreemptedBy.RECOMPUTE
        rig.store.audit()

    def test_room_is_there_again_once_it_is_back(self) -> None:
        rig = Rig(caching=False, max_offloaded_blocks=5)
        first, second = rig.run(text(10, seed=1)), rig.run(text(12, seed=2))
        rig.store.preempt(first)
        rig.store.take_ops()
        assert rig.store.resume(first)
        assert SwapIn(first.seq_id, tuple(first.block_ids)) in rig.store.take_ops()
        assert (rig.store.num_offloaded, first.num_slots, first.num_evicted) == (0, 10, 0)
        assert rig.store.preempt(second) is PreemptedBy.SWAP

    def test_one_that_was_evicted_from_moves_whatever_room_there_is(self) -> None:
        rig = Rig(caching=False, max_offloaded_blocks=0)
        sequence = rig.run(text(20), H2O)
        rig.store.shrink(sequence, 7)
        assert rig.store.preempt(sequence) is PreemptedBy.SWAP

    def test_what_it_shared_stays_in_the_tree(self) -> None:
        rig = Rig(max_offloaded_blocks=5)
        sequence = rig.run(text(10))
        rig.store.preempt(sequence)
        assert (rig.store.num_cached, rig.store.num_held) == (2, 0)
        rig.store.audit()

    def test_one_that_has_computed_nothing_is_dropped(self) -> None:
        rig = Rig(max_offloaded_blocks=5)
        sequence = rig.store.open(rig.request(text(10), FULL), room_for=10)
        assert sequence is not None
        assert rig.store.preempt(sequence) is PreemptedBy.RECOMPUTE
