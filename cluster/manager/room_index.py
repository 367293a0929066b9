"""Engines by how many blocks they have free, for finding the roomiest without looking at all. Pure.

Engines stand in buckets, eight to each doubling of free blocks (exact below 16), so that a change costs O(1) and the
roomiest bucket is one bit operation away. Within a bucket the engine whose count changed last comes last, so equal ones
take turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

_BITS = 3


class RoomIndex:
    """Which engines have at least so many free blocks."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[str, None]] = defaultdict(dict)
        self._bucket_of: dict[str, int] = {}
        self._occupied = 0

    def put(self, engine_id: str, free_blocks: int) -> None:
        """Say how many blocks an engine has free; one with less than none is left out."""
        self.drop(engine_id)
        if free_blocks >= 0:
            bucket = _bucket(free_blocks)
            self._buckets[bucket][engine_id] = None
            self._bucket_of[engine_id] = bucket
            self._occupied |= 1 << bucket

    def drop(self, engine_id: str) -> None:
        """Forget an engine, if it is known."""
        bucket = self._bucket_of.pop(engine_id, None)
        if bucket is not None:
            del self._buckets[bucket][engine_id]
            if not self._buckets[bucket]:
                self._occupied &= ~(1 << bucket)

    def roomiest(self, least_blocks: int) -> Iterator[str]:
        """Yield every engine that has least_blocks free, and some that have slightly fewer, the roomiest buckets first.

        Nothing may be put or dropped meanwhile.
        """
        last = _bucket(least_blocks)
        left = self._occupied >> last << last
        while left:
            bucket = left.bit_length() - 1
            yield from self._buckets[bucket]
            left ^= 1 << bucket


def _bucket(blocks: int) -> int:
    shift = max(0, blocks.bit_length() - _BITS - 1)
    return (shift << _BITS) + (blocks >> shift)
