"""Whose turn it is: lines of waiting requests, one for each tenant, and counters of the service tenants got. Pure.

Virtual token counters as in Sheng et al. 2024, "Fairness in Serving Large Language Models", section 4: each tenant's
counter grows by the tokens it was admitted for over its weight, and the tenant with the least is next. A tenant that
comes back to the line is lifted to the least of those in it (or to where the last one left it), so that it cannot save
up idle time. Different from the paper, an answer's length is charged when it is admitted (the most it may become), not
token by token: the manager is not on the way of a token.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvorum.cluster.manager.types import AdmitRequest


@dataclass(slots=True)
class Waiter:
    """A request in line."""

    request: AdmitRequest
    arrived_s: float
    deadline_s: float


class Line:
    """One tenant's requests, by priority and then arrival; those that leave early are skipped when they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiter]] = []
        self._waiters: dict[str, Waiter] = {}
        self._arrivals = 0
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._waiters

    @property
    def waiters(self) -> tuple[Waiter, ...]:
        """Who waits."""
        return tuple(self._waiters.values())

    @property
    def head(self) -> Waiter | None:
        """Who is next."""
        while self._heap and self._waiters.get(self._heap[0][2].request.lease_id) is not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def deadline_of(self, lease_id: str) -> float:
        """Return until when one waits."""
        return self._waiters[lease_id].deadline_s

    def join(self, waiter: Waiter) -> None:
        """Stand at the end of its priority."""
        self._arrivals += 1
        self._waiters[waiter.request.lease_id] = waiter
        self.blocks += waiter.request.blocks
        heapq.heappush(self._heap, (waiter.request.priority, self._arrivals, waiter))

    def leave(self, lease_id: str) -> Waiter:
        """Take one out, wherever it stands."""
        waiter = self._waiters.pop(lease_id)
        self.blocks -= waiter.request.blocks
        return waiter


class ServiceCounters:
    """Tokens over weight, by tenant."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._left_at = 0.0

    def enter(self, tenant: str, in_line: Iterable[str]) -> None:
        """Lift a tenant that comes back to the line, in which the others are."""
        least = min((self._counters.get(other, 0.0) for other in in_line), default=math.inf)
        floor = self._left_at if math.isinf(least) else least
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), floor)

    def charge(self, tenant: str, tokens: int, weight: float) -> None:
        """Count what a tenant was admitted for."""
        self._counters[tenant] = self._counters.get(tenant, 0.0) + tokens / weight
        self._left_at = self._counters[tenant]

    def next(self, tenants: Iterable[str]) -> str:
        """Return the tenant that is due."""
        return min(tenants, key=lambda tenant: (self._counters.get(tenant, 0.0), tenant))

    def forget(self, tenant: str) -> None:
        """Drop a tenant that does not exist any more."""
        self._counters.pop(tenant, None)
