"""What ends by time: leases that nobody renews, lost engines and routers, memories of what was just answered. Pure.

Heaps hold one entry for each lease and lost engine, at a time that may since have been put off, so a tick costs as much
as what is due; that of a lease which is over stays until it would first have expired.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Collection

from kvorum.cluster.manager.ledger import Engine, Lease
from kvorum.cluster.manager.types import Refused

# A router that says nothing for so long is gone, and its leases with it.
ROUTER_TIMEOUT_S = 10.0
# For so long a message that was overtaken by its lease's release may still come.
RELEASE_MEMORY_S = 20.0
LOOKS_AT_ONCE = 2_000
# A refusal is the answer to a question that was sent twice, not to one that is asked again.
_REFUSAL_MEMORY_S = 1.0


class Lifetimes:
    """Times of one manager."""

    def __init__(self) -> None:
        self._started_s = math.inf
        self._leases: list[tuple[float, str]] = []
        self._watched: set[str] = set()
        self._engines: list[tuple[float, str]] = []
        # When each router was last heard of, and those that have told what they hold.
        self._routers: dict[str, float] = {}
        self._met: set[str] = set()
        self._released: OrderedDict[str, float] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, Refused]] = OrderedDict()

    def begin(self, now_s: float) -> None:
        """Count from the first time that anything is asked."""
        self._started_s = min(self._started_s, now_s)

    def is_young(self, age_s: float, now_s: float) -> bool:
        """Whether the manager began less than age_s ago."""
        return now_s - self._started_s < age_s

    def watch_lease(self, lease: Lease) -> None:
        """Look at a lease when it may expire."""
        if lease.lease_id not in self._watched:
            self._watched.add(lease.lease_id)
            heapq.heappush(self._leases, (lease.expires_at_s, lease.lease_id))

    def take_expired(self, expiry_of: Callable[[str], float | None], now_s: float) -> list[str]:
        """Return promised leases whose time is over; expiry_of is None for one that is promised no more.

        Where very many are due together, some are left to the next call.
        """
        expired: list[str] = []
        for _ in range(LOOKS_AT_ONCE):
            if not self._leases or self._leases[0][0] > now_s:
                break
            lease_id = self._leases[0][1]
            expires_at_s = expiry_of(lease_id)
            if expires_at_s is not None and expires_at_s > now_s:
                heapq.heapreplace(self._leases, (expires_at_s, lease_id))
                continue
            heapq.heappop(self._leases)
            self._watched.remove(lease_id)
            if expires_at_s is not None:
                expired.append(lease_id)
        return expired

    def keep_engine(self, engine: Engine, until_s: float) -> None:
        """Give an engine that is not connected until then."""
        engine.drop_at_s = until_s
        heapq.heappush(self._engines, (until_s, engine.engine_id))

    def take_lost(self, now_s: float) -> list[str]:
        """Return engines whose time to come back is over, if they did not."""
        lost = []
        while self._engines and self._engines[0][0] <= now_s:
            lost.append(heapq.heappop(self._engines)[1])
        return lost

    def hear_router(self, router_id: str, now_s: float) -> None:
        """Note that a router is there."""
        self._routers[router_id] = now_s

    def meet_router(self, router_id: str, now_s: float) -> bool:
        """Note that a router tells what it holds; return whether it has not done so before."""
        self.hear_router(router_id, now_s)
        is_new = router_id not in self._met
        self._met.add(router_id)
        return is_new

    def hear_all_routers(self, now_s: float) -> None:
        """Let none be gone yet."""
        self._routers = dict.fromkeys(self._routers, now_s)

    @property
    def routers(self) -> Collection[str]:
        """Routers that are there."""
        return self._routers.keys()

    def take_gone_routers(self, now_s: float) -> list[str]:
        """Return routers that have said nothing for too long."""
        gone = [router_id for router_id, heard_s in self._routers.items() if heard_s <= now_s - ROUTER_TIMEOUT_S]
        for router_id in gone:
            del self._routers[router_id]
            self._met.discard(router_id)
        return gone

    def remember_release(self, lease_id: str, now_s: float) -> None:
        """Keep in mind that a lease is over, and forget those of long ago."""
        self._released[lease_id] = now_s
        self._released.move_to_end(lease_id)
        while next(iter(self._released.values())) < now_s - RELEASE_MEMORY_S:
            self._released.popitem(last=False)

    def is_released(self, lease_id: str) -> bool:
        """Whether a lease was released not long ago."""
        return lease_id in self._released

    def remember_refusal(self, refused: Refused, now_s: float) -> None:
        """Keep in mind what was answered, and forget what was answered some time ago."""
        self._refused[refused.lease_id] = (now_s, refused)
        self._refused.move_to_end(refused.lease_id)
        while next(iter(self._refused.values()))[0] < now_s - _REFUSAL_MEMORY_S:
            self._refused.popitem(last=False)

    def refusal(self, lease_id: str, now_s: float) -> Refused | None:
        """Return how a request was refused just now."""
        answered_s, refused = self._refused.get(lease_id, (-math.inf, None))
        return refused if answered_s >= now_s - _REFUSAL_MEMORY_S else None
