"""The block pool against a stack of free ids and a count of holders."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvorum.kvstore.blocks import BlockPool
from kvorum.kvstore.types import BlockId, blocks_for

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Each holder is a list of blocks that were allocated together or shared from another."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = [BlockId(i) for i in reversed(range(NUM_BLOCKS))]
        self.holders: list[list[BlockId]] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            return
        expected = [self.free.pop() for _ in range(count)]
        assert self.pool.allocate(count) == expected
        self.holders.append(expected)

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), first=st.integers(0, NUM_BLOCKS), last=st.integers(0, NUM_BLOCKS))
    def share(self, pick: int, first: int, last: int) -> None:
        shared = self.holders[pick % len(self.holders)][first:last]
        self.pool.share(shared)
        self.holders.append(list(shared))

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 99), backwards=st.booleans())
    def release(self, pick: int, backwards: bool) -> None:
        released = self.holders.pop(pick % len(self.holders))
        released = released[::-1] if backwards else released
        self.pool.release(released)
        self.free += [block_id for block_id in released if not self.counts()[block_id]]

    def counts(self) -> Counter[BlockId]:
        return Counter(block_id for holder in self.holders for block_id in holder)

    @invariant()
    def counts_agree(self) -> None:
        counts = self.counts()
        self.pool.audit(counts)
        assert self.pool.num_free == len(self.free) == NUM_BLOCKS - len(counts)
        assert [self.pool.references(BlockId(i)) for i in range(NUM_BLOCKS)] == [
            counts[BlockId(i)] for i in range(NUM_BLOCKS)
        ]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_new_blocks_come_from_the_lowest_id_up() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]


def test_the_block_freed_last_is_used_first() -> None:
    pool = BlockPool(5)
    pool.allocate(5)
    pool.release([BlockId(1), BlockId(4), BlockId(2)])
    assert pool.allocate(3) == [2, 4, 1]


def test_a_shared_block_is_free_once_its_last_holder_is_gone() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.release([block])
    assert (pool.references(block), pool.num_free) == (1, 1)
    pool.release([block])
    assert (pool.references(block), pool.num_free) == (0, 2)


def test_more_than_is_free_cannot_be_taken() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)


def test_a_free_block_can_be_neither_shared_nor_released() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="block 1 is free"):
        pool.share([BlockId(1)])
    with pytest.raises(AssertionError, match="block 1 is free"):
        pool.release([BlockId(1)])


class TestAudit:
    def test_a_holder_that_was_not_counted_is_found(self) -> None:
        pool = BlockPool(2)
        pool.allocate(1)
        with pytest.raises(AssertionError, match="references drifted"):
            pool.audit(Counter({BlockId(0): 2}))

    def test_a_holder_that_vanished_is_found(self) -> None:
        pool = BlockPool(2)
        pool.allocate(1)
        with pytest.raises(AssertionError, match="references drifted"):
            pool.audit(Counter())

    def test_a_lost_block_is_found(self) -> None:
        pool = BlockPool(2)
        pool._free.pop()
        with pytest.raises(AssertionError, match="blocks were lost"):
            pool.audit(Counter())

    def test_a_block_that_is_free_twice_is_found(self) -> None:
        pool = BlockPool(2)
        pool._free[:] = [BlockId(0), BlockId(0)]
        with pytest.raises(AssertionError, match="free twice"):
            pool.audit(Counter())

    def test_a_block_that_is_free_and_held_is_found(self) -> None:
        pool = BlockPool(2)
        pool.allocate(1)
        pool._free[:] = [BlockId(0)]
        with pytest.raises(AssertionError, match="a held block is free"):
            pool.audit(Counter({BlockId(0): 1}))


@given(st.integers(0, 1000), st.integers(1, 64))
def test_blocks_for_is_the_fewest_that_hold_the_slots(num_slots: int, block_size: int) -> None:
    count = blocks_for(num_slots, block_size)
    assert count * block_size >= num_slots
    assert (count - 1) * block_size < num_slots or count == 0
