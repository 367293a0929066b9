"""The block pool: which blocks are free, and how many holders each other one has.

Pure bookkeeping: ids only, no memory. Freed blocks are handed out again last in, first out, so that a block that
is still in a cache is written next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvorum.kvstore.types import BlockId


class BlockPool:
    """Reference-counted blocks 0 .. num_blocks - 1.

    Invariant: a block is either in the free list, or has at least one reference; never both.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._references: Counter[BlockId] = Counter()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def references(self, block_id: BlockId) -> int:
        """Return how many holders a block has."""
        return self._references[block_id]

    def allocate(self, count: int) -> list[BlockId]:
        """Take free blocks, one reference each; the caller has checked num_free."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        self._references.update(taken)
        return taken

    def share(self, block_ids: Iterable[BlockId]) -> None:
        """Add a reference to blocks that have one already."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Drop a reference from each block; the last one frees it."""
        for block_id in block_ids:
            assert self._references[block_id] > 0, f"block {block_id} is free"
            self._references[block_id] -= 1
            if not self._references[block_id]:
                del self._references[block_id]
                self._free.append(block_id)

    def audit(self, holders: Counter[BlockId]) -> None:
        """Check the counts against the holders found by walking them all."""
        assert holders == self._references, (
            f"references drifted: {holders - self._references} / {self._references - holders}"
        )
        assert len(self._free) + len(self._references) == self.num_blocks, "blocks were lost"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not set(self._free) & self._references.keys(), "a held block is free"
