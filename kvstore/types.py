"""Ids that must not mix, and block arithmetic."""

from __future__ import annotations

from typing import NewType

BlockId = NewType("BlockId", int)
SeqId = NewType("SeqId", int)
SnapshotId = NewType("SnapshotId", int)


def blocks_for(num_slots: int, block_size: int) -> int:
    """Return how many blocks hold num_slots slots."""
    return -(-num_slots // block_size)
