"""The prefix tree: what it finds, what it gives back first, and what it never lets go of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kvstore.blocks import BlockPool
from kvorum.kvstore.prefix_tree import Node, PrefixTree
from kvorum.kvstore.types import BlockId, SnapshotId

BLOCK_SIZE = 2
NUM_BLOCKS = 12


class Rig:
    """A tree over a pool, and the sequences that hold blocks."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.tree = PrefixTree(self.pool, block_size=BLOCK_SIZE)
        self.held: list[list[BlockId]] = []

    def compute(self, tokens: Sequence[int], *, salt: str = "", tenant: str = "") -> list[BlockId]:
        """Fill fresh blocks with the tokens and publish the full ones; the sequence goes on holding them."""
        blocks = self.pool.allocate(-(-len(tokens) // BLOCK_SIZE))
        self.tree.publish(tokens, blocks[: len(tokens) // BLOCK_SIZE], salt=salt, tenant=tenant)
        self.held.append(blocks)
        return blocks

    def let_go(self, blocks: list[BlockId]) -> None:
        self.held.remove(blocks)
        self.tree.release(blocks)

    def cache(self, tokens: Sequence[int], *, salt: str = "", tenant: str = "") -> list[BlockId]:
        blocks = self.compute(tokens, salt=salt, tenant=tenant)
        self.let_go(blocks)
        return blocks

    def found(self, tokens: Sequence[int], *, salt: str = "") -> list[BlockId]:
        return [node.block_id for node in self.tree.match(tokens, salt=salt)]

    def evict(self, count: int, *, first: Collection[str] = ()) -> list[BlockId]:
        """Return the blocks that became free, first to last."""
        num_free = self.pool.num_free
        self.tree.evict(count, first=first)
        freed = self.pool.allocate(self.pool.num_free - num_free)  # the last one freed comes first
        self.pool.release(reversed(freed))
        return freed[::-1]

    def audit(self) -> None:
        holders = Counter(block_id for blocks in self.held for block_id in blocks)
        self.tree.audit(holders)
        self.pool.audit(holders)


@pytest.fixture
def rig() -> Rig:
    return Rig()


class TestMatch:
    def test_the_longest_cached_prefix_is_found_root_end_first(self, rig: Rig) -> None:
        rig.cache([1, 2, 3, 4, 5, 6])
        assert rig.found([1, 2, 3, 4, 5, 6, 7]) == [0, 1, 2]
        assert rig.found([1, 2, 3, 4, 9, 9]) == [0, 1]

    def test_only_full_blocks_are_found(self, rig: Rig) -> None:
        rig.cache([1, 2, 3, 4])
        assert rig.found([1, 2, 3]) == [0]
        assert rig.found([1]) == []
        assert rig.found([]) == []

    def test_the_same_tokens_elsewhere_are_not_a_prefix(self, rig: Rig) -> None:
        rig.cache([1, 2, 3, 4])
        assert rig.found([3, 4]) == []
        assert rig.found([9, 1, 2]) == []

    def test_salts_do_not_see_each_other(self, rig: Rig) -> None:
        rig.cache([1, 2, 3, 4], salt="a")
        assert rig.found([1, 2, 3, 4], salt="b") == []
        assert rig.found([1, 2, 3, 4]) == []
        rig.cache([1, 2], salt="b")
        assert rig.found([1, 2, 3, 4], salt="b") == [2]
        assert rig.found([1, 2, 3, 4], salt="a") == [0, 1]

    def test_finding_changes_nothing(self, rig: Rig) -> None:
        rig.cache([1, 2])
        rig.cache([3, 4])
        rig.found([1, 2])
        assert rig.evict(2) == [0, 1]


class TestPublish:
    def test_a_branch_shares_its_trunk(self, rig: Rig) -> None:
        first = rig.compute([1, 2, 3, 4])
        second = rig.compute([1, 2, 5, 6])
        assert rig.found([1, 2, 3, 4]) == first == [0, 1]
        assert rig.found([1, 2, 5, 6]) == [0, 3]
        assert not rig.tree.is_cached(second[0])
        assert len(rig.tree) == 3
        rig.audit()

    def test_it_returns_the_nodes_of_the_tokens_whoever_computed_them(self, rig: Rig) -> None:
        rig.compute([1, 2, 3, 4])
        blocks = rig.pool.allocate(3)
        rig.held.append(blocks)
        chain = rig.tree.publish([1, 2, 3, 4, 5, 6], blocks, salt="")
        assert [(node.block_id, node.depth) for node in chain] == [(0, 1), (1, 2), (4, 3)]
        assert chain[2].parent is chain[1]
        rig.audit()

    def test_publishing_more_of_the_same_adds_what_is_new(self, rig: Rig) -> None:
        blocks = rig.pool.allocate(3)
        rig.held.append(blocks)
        rig.tree.publish([1, 2, 3, 4], blocks[:2], salt="")
        rig.tree.publish([1, 2, 3, 4, 5, 6], blocks, salt="")
        assert [rig.pool.references(block_id) for block_id in blocks] == [2, 2, 2]
        assert rig.found([1, 2, 3, 4, 5, 6]) == [0, 1, 2]
        rig.audit()

    def test_a_block_that_is_not_full_cannot_be_published(self, rig: Rig) -> None:
        with pytest.raises(AssertionError, match="only full blocks"):
            rig.tree.publish([1, 2, 3], rig.pool.allocate(2), salt="")


class TestRelease:
    def test_cached_blocks_wait_and_others_are_free_at_once(self, rig: Rig) -> None:
        rig.cache([1, 2, 3, 4, 5])
        assert rig.tree.num_unreferenced == 2
        assert rig.pool.num_free == NUM_BLOCKS - 2
        rig.audit()

    def test_a_sequence_lets_go_of_its_deepest_block_first(self, rig: Rig) -> None:
        rig.let_go(rig.compute([1, 2, 3, 4, 5]))
        assert list(rig.tree._lru) == [1, 0]
        blocks = rig.pool.allocate(3)
        assert blocks == [2, 3, 4]
        rig.tree.release(blocks)
        assert rig.pool.allocate(3) == [2, 3, 4]

    def test_a_block_waits_only_once_its_last_sequence_is_gone(self, rig: Rig) -> None:
        first = rig.compute([1, 2])
        rig.tree.acquire(rig.tree.match([1, 2], salt=""))
        rig.held.append([BlockId(0)])
        rig.let_go(first)
        assert rig.tree.num_unreferenced == 0
        rig.let_go([BlockId(0)])
        assert rig.tree.num_unreferenced == 1
        rig.audit()

    def test_acquired_blocks_do_not_wait(self, rig: Rig) -> None:
        rig.cache([1, 2, 3, 4])
        rig.tree.acquire(rig.tree.match([1, 2], salt=""))
        rig.held.append([BlockId(0)])
        assert rig.tree.num_unreferenced == 1
        assert rig.pool.references(BlockId(0)) == 2
        rig.audit()


class TestEvict:
    def test_a_chain_goes_from_its_end(self, rig: Rig) -> None:
        rig.cache([1, 2, 3, 4, 5, 6])
        assert rig.evict(1) == [2]
        assert rig.found([1, 2, 3, 4, 5, 6]) == [0, 1]
        assert rig.evict(2) == [1, 0]
        assert len(rig.tree) == 0
        rig.audit()

    def test_the_oldest_goes_first(self, rig: Rig) -> None:
        rig.cache([1, 2])
        rig.cache([3, 4])
        rig.cache([5, 6])
        assert rig.evict(2) == [0, 1]
        assert rig.found([5, 6]) == [2]

    def test_what_was_used_again_is_the_newest(self, rig: Rig) -> None:
        rig.cache([1, 2])
        rig.cache([3, 4])
        nodes = rig.tree.match([1, 2], salt="")
        rig.tree.acquire(nodes)
        rig.tree.release([BlockId(0)])
        assert rig.evict(2) == [1, 0]

    def test_an_old_trunk_outlives_its_newer_leaves(self, rig: Rig) -> None:
        rig.cache([1, 2])  # 0
        rig.cache([7, 8])  # 1
        rig.cache([1, 2, 3, 4])  # 2 below 0; its own copy of 1, 2 is free again
        assert rig.evict(1) == [1]
        assert rig.evict(2) == [3, 0]
        rig.audit()

    def test_what_sequences_hold_stays(self, rig: Rig) -> None:
        rig.compute([1, 2, 3, 4])
        rig.cache([5, 6])
        assert rig.evict(1) == [2]
        assert rig.found([1, 2, 3, 4]) == [0, 1]
        rig.audit()

    def test_an_unreferenced_node_above_held_ones_goes_with_its_subtree(self, rig: Rig) -> None:
        """The second sequence computed the trunk itself, so it holds a node below one that it does not hold."""
        trunk = rig.compute([1, 2])
        below = rig.compute([1, 2, 3, 4])
        rig.let_go(trunk)
        assert rig.tree.num_unreferenced == 1
        assert rig.evict(1) == [0]
        assert len(rig.tree) == 0
        assert [rig.pool.references(block_id) for block_id in below] == [1, 1]
        rig.audit()
        rig.let_go(below)
        assert rig.pool.num_free == NUM_BLOCKS

    def test_a_leaf_goes_before_an_older_node_above_held_ones(self, rig: Rig) -> None:
        trunk = rig.compute([1, 2])
        rig.compute([1, 2, 3, 4])
        rig.let_go(trunk)
        leaf = rig.cache([7, 8])
        assert rig.evict(1) == leaf
        assert rig.found([1, 2, 3, 4]) == [0, 2]
        rig.audit()

    def test_unreferenced_blocks_of_a_subtree_are_free_again(self, rig: Rig) -> None:
        trunk = rig.compute([1, 2])
        rig.compute([1, 2, 3, 4])  # holds a node below the trunk
        other = rig.compute([1, 2, 5, 6])
        rig.let_go(trunk)
        rig.let_go(other)
        # The leaf first, then the trunk with what is held below it.
        assert rig.evict(2) == [4, 0]
        assert rig.tree.num_unreferenced == 0
        rig.audit()

    def test_a_salt_without_blocks_leaves_nothing_behind(self, rig: Rig) -> None:
        rig.cache([1, 2], salt="a")
        rig.evict(1)
        assert rig.tree._roots == {}


class TestTenants:
    def test_leaves_of_tenants_that_go_first_go_before_older_ones_of_others(self, rig: Rig) -> None:
        rig.cache([1, 2], tenant="old")
        rig.cache([3, 4, 5, 6], tenant="red")
        rig.cache([7, 8], tenant="blue")
        assert rig.evict(1, first={"red"}) == [2]
        assert rig.evict(2, first={"red"}) == [1, 0]
        rig.audit()

    def test_among_them_the_oldest_goes_first(self, rig: Rig) -> None:
        rig.cache([1, 2], tenant="red")
        rig.cache([3, 4], tenant="blue")
        rig.cache([5, 6], tenant="red")
        assert rig.evict(3, first={"red", "blue"}) == [0, 1, 2]

    def test_a_block_above_another_tenants_is_no_leaf(self, rig: Rig) -> None:
        rig.cache([1, 2], tenant="red")
        rig.cache([1, 2, 3, 4], tenant="blue")
        rig.cache([5, 6], tenant="blue")
        assert rig.tree.unreferenced_by_tenant == {"red": 1, "blue": 2}
        assert rig.found([1, 2, 3, 4]) == [0, 2]
        assert rig.evict(1, first={"red"}) == [2]
        assert rig.evict(1, first={"red"}) == [0]

    def test_what_is_held_is_not_counted(self, rig: Rig) -> None:
        blocks = rig.compute([1, 2], tenant="red")
        assert rig.tree.unreferenced_by_tenant == {}
        rig.let_go(blocks)
        assert rig.tree.unreferenced_by_tenant == {"red": 1}


class TestWithdraw:
    def test_a_sequences_blocks_become_its_own(self, rig: Rig) -> None:
        blocks = rig.compute([1, 2, 3, 4])
        assert rig.tree.withdraw(blocks)
        assert rig.found([1, 2]) == []
        assert [rig.pool.references(block_id) for block_id in blocks] == [1, 1]
        rig.audit()

    @pytest.mark.parametrize("shared", [[1, 2], [1, 2, 3, 4]])
    def test_not_beside_a_sequence_that_shares_one(self, rig: Rig, shared: list[int]) -> None:
        blocks = rig.compute([1, 2, 3, 4])
        nodes = rig.tree.match(shared, salt="")
        rig.tree.acquire(nodes)
        rig.held.append([node.block_id for node in nodes])
        assert not rig.tree.withdraw(blocks)
        assert rig.found([1, 2, 3, 4]) == blocks
        rig.audit()

    def test_what_is_below_goes_too(self, rig: Rig) -> None:
        trunk = rig.compute([1, 2])
        held = rig.compute([1, 2, 3, 4])
        rig.cache([1, 2, 5, 6])
        assert rig.tree.withdraw(trunk)
        assert len(rig.tree) == 0
        assert [rig.pool.references(block_id) for block_id in held] == [1, 1]
        assert rig.pool.num_free == NUM_BLOCKS - 3
        rig.audit()

    def test_blocks_that_are_not_cached_are_left_alone(self, rig: Rig) -> None:
        rig.compute([1, 2])
        below = rig.compute([1, 2, 3, 4])  # its first block is a copy of what is cached
        assert rig.tree.withdraw(below)
        assert rig.found([1, 2, 3, 4]) == [0]
        rig.audit()


class TestSnapshots:
    def mark(self, rig: Rig, tokens: Sequence[int], snapshot_id: int, *, decay: float = 1.0) -> Node:
        node = rig.tree.match(tokens, salt="")[-1]
        node.snapshots[decay] = SnapshotId(snapshot_id)
        return node

    def test_they_are_dropped_with_their_node_and_told_once(self, rig: Rig) -> None:
        rig.cache([1, 2, 3, 4])
        self.mark(rig, [1, 2], 7)
        self.mark(rig, [1, 2, 3, 4], 8)
        self.mark(rig, [1, 2, 3, 4], 9, decay=0.95)
        assert rig.tree.take_dropped_snapshots() == []
        rig.evict(1)
        assert rig.tree.take_dropped_snapshots() == [8, 9]
        assert rig.tree.take_dropped_snapshots() == []
        rig.evict(1)
        assert rig.tree.take_dropped_snapshots() == [7]

    def test_those_of_a_forgotten_subtree_are_dropped_too(self, rig: Rig) -> None:
        trunk = rig.compute([1, 2])
        rig.compute([1, 2, 3, 4])
        self.mark(rig, [1, 2, 3, 4], 3)
        rig.let_go(trunk)
        rig.evict(1)
        assert rig.tree.take_dropped_snapshots() == [3]


class TestAudit:
    def test_an_unreferenced_block_that_does_not_wait_is_found(self, rig: Rig) -> None:
        rig.cache([1, 2])
        rig.tree._lru.clear()
        with pytest.raises(AssertionError, match="unreferenced blocks drifted"):
            rig.audit()

    def test_a_held_block_that_waits_is_found(self, rig: Rig) -> None:
        rig.compute([1, 2])
        rig.tree._lru.update(rig.tree._by_block)
        with pytest.raises(AssertionError, match="unreferenced blocks drifted"):
            rig.audit()

    def test_a_node_that_cannot_be_reached_is_found(self, rig: Rig) -> None:
        rig.compute([1, 2])
        rig.tree._roots.clear()
        with pytest.raises(AssertionError, match="cannot be reached"):
            rig.audit()

    def test_two_nodes_on_one_block_are_found(self, rig: Rig) -> None:
        rig.compute([1, 2, 3, 4])
        for node in rig.tree.nodes():
            node.block_id = BlockId(0)
        with pytest.raises(AssertionError, match="lost its block"):
            rig.audit()

    def test_a_reference_of_the_tree_that_was_dropped_is_found(self, rig: Rig) -> None:
        rig.compute([1, 2])
        rig.pool.release([BlockId(0)])
        with pytest.raises(AssertionError, match="references drifted"):
            rig.audit()


texts = st.lists(st.integers(0, 1), max_size=8)


@given(st.lists(st.tuples(texts, st.sampled_from("ab"))), texts, st.sampled_from("ab"))
def test_a_match_is_the_longest_common_prefix_of_full_blocks(
    cached: list[tuple[list[int], str]], tokens: list[int], salt: str
) -> None:
    pool = BlockPool(1000)
    tree = PrefixTree(pool, block_size=BLOCK_SIZE)
    contents: dict[BlockId, tuple[int, ...]] = {}
    prefixes = set()
    for text, salt_of_text in cached:
        blocks = pool.allocate(len(text) // BLOCK_SIZE)
        tree.publish(text, blocks, salt=salt_of_text)
        for index, block_id in enumerate(blocks):
            end = (index + 1) * BLOCK_SIZE
            contents[block_id] = tuple(text[:end])
            prefixes.add((tuple(text[:end]), salt_of_text))
    chain = tree.match(tokens, salt=salt)
    longest = max(
        (n for n in range(0, len(tokens) + 1, BLOCK_SIZE) if not n or (tuple(tokens[:n]), salt) in prefixes), default=0
    )
    assert len(chain) * BLOCK_SIZE == longest
    assert [contents[node.block_id] for node in chain] == [tuple(tokens[: node.depth * BLOCK_SIZE]) for node in chain]
