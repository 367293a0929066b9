"""The leases that a router holds, and which of them the cache manager has to be told of again. Pure.

A manager hears of each lease when it grants it or is first connected, and from then on often enough that the lease does
not expire there: to tell it of all of them at every beat would take more than half of a core for a hundred thousand.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection
from itertools import islice, takewhile

from kvorum.cluster.manager.types import LeaseRecord


class HeldLeases:
    """Leases by id, with the time at which the manager that is there was last told of each."""

    def __init__(self) -> None:
        # The longest untold first.
        self._told: OrderedDict[str, tuple[LeaseRecord, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._told)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._told

    def add(self, record: LeaseRecord, *, told_s: float = -math.inf) -> None:
        """Hold a lease. told_s: when the manager was told, now if ever."""
        self._told[record.lease_id] = (record, told_s)
        self._told.move_to_end(record.lease_id, last=told_s > -math.inf)

    def remove(self, lease_id: str) -> None:
        """Hold a lease no more; nothing happens if it is not held."""
        self._told.pop(lease_id, None)

    def start_anew(self) -> None:
        """Nothing counts as told any more: there is another manager, or it has forgotten this router."""
        self._told = OrderedDict((lease_id, (record, -math.inf)) for lease_id, (record, _) in self._told.items())

    def due(self, told_until_s: float, *, at_most: int) -> list[LeaseRecord]:
        """Return leases that the manager was not told of since then; -inf: that it was never told of."""
        longest = takewhile(lambda entry: entry[1] <= told_until_s, self._told.values())
        return [record for record, _ in islice(longest, at_most)]

    def note_told(self, records: Collection[LeaseRecord], now_s: float) -> None:
        """The manager was told of these, as far as they are still held."""
        for record in records:
            if record.lease_id in self._told:
                self.add(record, told_s=now_s)
