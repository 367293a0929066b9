"""What is where in an engine's pool: the look of a KV store that changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvorum.kvstore.blocks import BlockPool
from kvorum.kvstore.opening import OpenRequest, PrefixHit, blocks_taken, find_prefix
from kvorum.kvstore.prefix_tree import Node, PrefixTree
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.types import BlockId, SeqId, blocks_for


class PoolView:
    """Who holds which blocks, and what a change would cost or bring."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(self._pool, block_size=block_size)
        self._sequences: dict[SeqId, SequenceKV] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Unreferenced prefix blocks, free for the taking."""
        return self._tree.num_unreferenced

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be had without taking them from a sequence."""
        return self.num_free + self.num_cached

    @property
    def num_offloaded(self) -> int:
        """Blocks' worth of host memory that moved sequences take."""
        moved = (sequence.num_slots for sequence in self._sequences.values() if sequence.swapped)
        return sum(blocks_for(num_slots, self.block_size) for num_slots in moved)

    def held_by_tenant(self) -> Mapping[str, int]:
        """Return the blocks that each tenant's sequences hold; one that several hold is the first one's."""
        held: Counter[str] = Counter()
        shared: set[BlockId] = set()
        for sequence in self._sequences.values():
            leading = sequence.block_ids[: sequence.num_shared]
            held[sequence.tenant] += len(sequence.block_ids) - len(leading) + len(set(leading) - shared)
            shared.update(leading)
        return held

    def cached_by_tenant(self) -> Mapping[str, int]:
        """Return the unreferenced prefix blocks by the tenant that computed them."""
        return self._tree.unreferenced_by_tenant

    def open_sequences(self) -> list[SequenceKV]:
        """Return the sequences that are open, swapped ones included."""
        return list(self._sequences.values())

    def cached_nodes(self) -> list[Node]:
        """Return every cached block's node."""
        return self._tree.nodes()

    def blocks_to_open(self, request: OpenRequest) -> int:
        """Return how many of the available blocks a sequence takes that is opened with room for all its tokens."""
        return blocks_taken(self._tree, request, self._find_prefix(request), block_size=self.block_size)

    def _find_prefix(self, request: OpenRequest) -> PrefixHit:
        if not self.enable_prefix_caching:
            return PrefixHit()
        return find_prefix(self._tree, request, block_size=self.block_size)

    def gain_of_cut(self, sequence: SequenceKV, keep: int) -> int:
        """Return how many more blocks would be available after a shrink to `keep`; negative when copies cost more."""
        leading = sequence.block_ids[: sequence.num_shared]
        own = len(sequence.block_ids) - sum(map(self._tree.is_shared, leading))
        return own - blocks_for(keep, self.block_size)

    def blocks_to_own(self, sequence: SequenceKV) -> int:
        """Return how many blocks a sequence needs for copies before it may change what others hold too."""
        leading = sequence.block_ids[: sequence.num_shared]
        return len(leading) if any(map(self._tree.is_shared, leading)) else 0
