"""The prefix tree: full blocks of tokens that later sequences may share.

A node is one immutable block of block_size tokens; its key is those tokens below its parent, below a salt. The tree
holds one reference to each node's block. A node whose block nobody else holds is unreferenced; unreferenced leaves are
given back oldest first, those of tenants that have too much before all others. Sequences let go of their deepest blocks
first, so a chain is given back from its end.

A node may carry score snapshots: the attention that each of the first (depth * block_size) tokens had received from
exactly these tokens' own queries, under a decay. A sequence that keeps scores can start from such a node only; without
them prefix tokens would look worthless and be evicted first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvorum.kvstore.blocks import BlockPool
from kvorum.kvstore.types import BlockId, SnapshotId


@dataclass(slots=True, eq=False)
class Node:
    """One cached block.

    depth: blocks from the root, itself included. tenant: whose sequence computed it. released: a number that grows with
    each block that becomes unreferenced. snapshots: by decay.
    """

    tokens: tuple[int, ...]
    block_id: BlockId
    parent: Node | None
    depth: int
    salt: str
    tenant: str = ""
    released: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    snapshots: dict[float, SnapshotId] = field(default_factory=dict)


class PrefixTree:
    """Cached blocks of a pool. Cost: a few dictionary look-ups a block, and one a tenant to evict."""

    def __init__(self, pool: BlockPool, *, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._roots: dict[str, dict[tuple[int, ...], Node]] = {}
        self._by_block: dict[BlockId, Node] = {}
        self._lru: OrderedDict[BlockId, Node] = OrderedDict()
        self._lru_of: defaultdict[str, OrderedDict[BlockId, Node]] = defaultdict(OrderedDict)
        self._num_released = 0
        self._dropped_snapshots: list[SnapshotId] = []

    def __len__(self) -> int:
        """Cached blocks, shared ones included."""
        return len(self._by_block)

    @property
    def num_unreferenced(self) -> int:
        """Cached blocks that no sequence holds."""
        return len(self._lru)

    @property
    def unreferenced_by_tenant(self) -> Mapping[str, int]:
        """Cached blocks that no sequence holds, by the tenant that computed them."""
        return {tenant: len(nodes) for tenant, nodes in self._lru_of.items() if nodes}

    def match(self, tokens: Sequence[int], *, salt: str) -> list[Node]:
        """Return the chain of nodes that is the longest cached prefix of the tokens, root end first."""
        chain: list[Node] = []
        children = self._roots.get(salt, {})
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            node = children.get(tuple(tokens[start : start + self._block_size]))
            if node is None:
                break
            chain.append(node)
            children = node.children
        return chain

    def acquire(self, nodes: Sequence[Node]) -> None:
        """Add a sequence's reference to each node's block."""
        self._pool.share(node.block_id for node in nodes)
        for node in nodes:
            self._take_from_lru(node)

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop a sequence's references, deepest first; cached blocks become the newest unreferenced ones."""
        for block_id in reversed(block_ids):
            self._pool.release([block_id])
            node = self._by_block.get(block_id)
            if node is not None and self._pool.references(block_id) == 1:
                self._num_released += 1
                node.released = self._num_released
                self._lru[block_id] = self._lru_of[node.tenant][block_id] = node

    def _take_from_lru(self, node: Node) -> None:
        if self._lru.pop(node.block_id, None) is not None:
            del self._lru_of[node.tenant][node.block_id]

    def publish(
        self, tokens: Sequence[int], block_ids: Sequence[BlockId], *, salt: str, tenant: str = ""
    ) -> list[Node]:
        """Cache a sequence's leading full blocks; blocks that are cached already under these tokens stay its own.

        Returns the chain of nodes for the tokens, some of which may be another sequence's.
        """
        siblings = self._roots.setdefault(salt, {})
        chain: list[Node] = []
        for depth, block_id in enumerate(block_ids, start=1):
            key = tuple(tokens[(depth - 1) * self._block_size : depth * self._block_size])
            assert len(key) == self._block_size, "only full blocks are cached"
            node = siblings.get(key)
            if node is None:
                node = Node(key, block_id, chain[-1] if chain else None, depth, salt, tenant)
                siblings[key] = node
                self._by_block[block_id] = node
                self._pool.share([block_id])
            chain.append(node)
            siblings = node.children
        return chain

    def is_cached(self, block_id: BlockId) -> bool:
        """Say whether a block is in the tree, and so must not change."""
        return block_id in self._by_block

    def is_unreferenced(self, block_id: BlockId) -> bool:
        """Say whether a cached block is held by no sequence."""
        return block_id in self._lru

    def evict(self, count: int, *, first: Collection[str] = ()) -> None:
        """Give back at least count unreferenced blocks, oldest leaf first; the caller has checked num_unreferenced.

        first: tenants whose leaves go before all others.
        """
        wanted = self._pool.num_free + count
        while self._pool.num_free < wanted:
            self._forget(self._next_to_go(first))

    def _next_to_go(self, first: Collection[str]) -> Node:
        leaves = [leaf for tenant in first if (leaf := _first_leaf(self._lru_of[tenant].values())) is not None]
        if leaves:
            return min(leaves, key=lambda leaf: leaf.released)
        # Without a leaf, a sequence holds blocks below an unreferenced one (it computed the same prefix itself).
        return _first_leaf(self._lru.values()) or next(iter(self._lru.values()))

    def is_shared(self, block_id: BlockId) -> bool:
        """Say whether more than one sequence holds a block."""
        return self._pool.references(block_id) - int(self.is_cached(block_id)) > 1

    def nodes(self) -> list[Node]:
        """Return every node, in no order."""
        return list(self._by_block.values())

    def take_dropped_snapshots(self) -> list[SnapshotId]:
        """Return the snapshots whose nodes are gone since the last call."""
        dropped, self._dropped_snapshots = self._dropped_snapshots, []
        return dropped

    def withdraw(self, block_ids: Sequence[BlockId]) -> bool:
        """Take one sequence's blocks out of the tree, with what is below them; False if another sequence holds one."""
        nodes = [self._by_block[block_id] for block_id in block_ids if block_id in self._by_block]
        if any(self._pool.references(node.block_id) > 2 for node in nodes):
            return False
        for node in nodes:
            if self.is_cached(node.block_id):
                self._forget(node)
        return True

    def _forget(self, node: Node) -> None:
        """Take a node and all below it out of the tree; blocks that sequences hold stay theirs."""
        for child in tuple(node.children.values()):
            self._forget(child)
        siblings = self._roots[node.salt] if node.parent is None else node.parent.children
        del siblings[node.tokens]
        if node.parent is None and not siblings:
            del self._roots[node.salt]
        del self._by_block[node.block_id]
        self._take_from_lru(node)
        self._dropped_snapshots += node.snapshots.values()
        self._pool.release([node.block_id])

    def audit(self, holders: Counter[BlockId]) -> None:
        """Add the tree's references to the holders, and check which blocks nobody else holds."""
        unreferenced = {block_id for block_id in self._by_block if not holders[block_id]}
        assert unreferenced == self._lru.keys(), "unreferenced blocks drifted"
        by_tenant = Counter(node.tenant for node in self._lru.values())
        assert by_tenant == self.unreferenced_by_tenant, "unreferenced blocks drifted between tenants"
        reachable = 0
        stack = [node for children in self._roots.values() for node in children.values()]
        while stack:
            node = stack.pop()
            assert self._by_block[node.block_id] is node, "a node lost its block"
            reachable += 1
            stack += node.children.values()
        assert reachable == len(self._by_block), "a cached block cannot be reached"
        holders.update(self._by_block.keys())


def _first_leaf(nodes: Iterable[Node]) -> Node | None:
    return next((node for node in nodes if not node.children), None)
