"""Tenants and their requests in line: who is next, who is blocked by what, and when a refused one may come again. Pure.

Within a tenant the order is strict: (priority, arrival). Between tenants the one due by its service counter is next;
one that is blocked, by its own limits or because no engine has room for its head, is passed over until something
changed that may help it. So that small requests cannot keep a big one waiting forever, a head that has waited
HOLD_AFTER_S is given an engine of its own to drain (Placement.hold).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from kvorum.cluster.manager.fairness import Line, ServiceCounters, Waiter
from kvorum.cluster.manager.meters import Flow, TokenBucket
from kvorum.cluster.manager.types import AdmitRequest, Refusal, TenantLimits

HOLD_AFTER_S = 2.0
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
# Nothing was released lately, so nothing is known.
_UNKNOWN_RETRY_S = 5.0


@dataclass(slots=True)
class Tenant:
    """One tenant's limits, line and totals.

    stuck: the head that was tried and could not be admitted, and why.
    """

    limits: TenantLimits
    line: Line = field(default_factory=Line)
    bucket: TokenBucket | None = None
    stuck: tuple[Waiter, Refusal] | None = None
    admitted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    served: Flow = field(default_factory=Flow)
    released: Flow = field(default_factory=Flow)

    def blocked_by(self, waiter: Waiter) -> Refusal | None:
        """Return why a head cannot be admitted, if it was tried."""
        return self.stuck[1] if self.stuck and self.stuck[0] is waiter else None

    def take_token(self, now_s: float) -> float:
        """Count a request against the rate limit; return the seconds to wait when there were too many."""
        if self.limits.max_requests_per_minute is None:
            return 0.0
        if self.bucket is None or self.bucket.per_minute != self.limits.max_requests_per_minute:
            self.bucket = TokenBucket.full(self.limits.max_requests_per_minute, now_s)
        return self.bucket.take(now_s)


class WaitingRoom:
    """All tenants by name, and their lines."""

    def __init__(self, limits: Collection[TenantLimits]) -> None:
        self.tenants = {each.name: Tenant(each) for each in limits}
        self._counters = ServiceCounters()
        self._deadlines: list[tuple[float, str]] = []
        self._in_line: dict[str, None] = {}
        self._tenant_of: dict[str, str] = {}
        self._released = Flow()

    def set_limits(self, limits: Collection[TenantLimits]) -> list[AdmitRequest]:
        """Take new limits; return the requests of tenants that are gone."""
        fresh = {each.name: each for each in limits}
        orphans = []
        for name in self.tenants.keys() - fresh.keys():
            tenant = self.tenants[name]
            orphans += [self.leave(waiter.request.lease_id).request for waiter in tenant.line.waiters]
            self._counters.forget(name)
            del self.tenants[name]
        for name, each in fresh.items():
            self.tenants.setdefault(name, Tenant(each)).limits = each
        return orphans

    @property
    def in_line(self) -> Iterator[Tenant]:
        """Tenants with waiting requests."""
        return (self.tenants[name] for name in self._in_line)

    def join(self, request: AdmitRequest, now_s: float) -> Waiter:
        """Put a request into its tenant's line."""
        name = request.tenant
        if name not in self._in_line:
            self._counters.enter(name, self._in_line)
            self._in_line[name] = None
        waiter = Waiter(request, now_s, now_s + request.max_wait_s)
        self.tenants[name].line.join(waiter)
        self._tenant_of[request.lease_id] = name
        heapq.heappush(self._deadlines, (waiter.deadline_s, request.lease_id))
        return waiter

    def leave(self, lease_id: str) -> Waiter:
        """Take a request out of its line."""
        name = self._tenant_of.pop(lease_id)
        line = self.tenants[name].line
        waiter = line.leave(lease_id)
        if not len(line):
            del self._in_line[name]
        return waiter

    def leave_of(self, router_ids: Collection[str]) -> None:
        """Take the requests of routers that are gone out of their lines."""
        waiters = [waiter for tenant in self.in_line for waiter in tenant.line.waiters]
        for waiter in waiters:
            if waiter.request.router_id in router_ids:
                self.leave(waiter.request.lease_id)

    def is_waiting(self, lease_id: str) -> bool:
        """Whether a request is in line."""
        return lease_id in self._tenant_of

    def is_head(self, waiter: Waiter) -> bool:
        """Whether a request is still the next of its tenant."""
        tenant = self.tenants.get(waiter.request.tenant)
        return tenant is not None and tenant.line.head is waiter

    def take_overdue(self, now_s: float) -> list[Waiter]:
        """Take those out of the lines whose deadlines have passed."""
        overdue = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._deadlines)
            name = self._tenant_of.get(lease_id)
            if name and self.tenants[name].line.deadline_of(lease_id) <= now_s:
                overdue.append(self.leave(lease_id))
        return overdue

    def serve(
        self, ready: Collection[str], has_room: bool, admit: Callable[[Tenant, Waiter], Refusal | None], now_s: float
    ) -> None:
        """Admit whom `admit` admits, in the order in which tenants are due; it returns why not.

        ready: tenants whose own limits may have eased. has_room: whether some engine may have more room than before.
        """
        turn = {name for name in self._in_line if self._may_move(self.tenants[name], name in ready, has_room)}
        while turn:
            name = self._counters.next(turn)
            tenant = self.tenants[name]
            waiter = tenant.line.head
            assert waiter, "an empty line is not in turn"
            refusal = admit(tenant, waiter)
            if refusal:
                tenant.stuck = (waiter, refusal)
                turn.remove(name)
                continue
            request = self.leave(waiter.request.lease_id).request
            self._counters.charge(name, request.tokens, tenant.limits.weight)
            tenant.served.add(request.tokens, now_s)
            tenant.admitted += 1
            tenant.stuck = None
            if name not in self._in_line:
                turn.remove(name)

    def try_all_again(self) -> None:
        """Forget what blocked whom: limits or engines changed."""
        for tenant in self.in_line:
            tenant.stuck = None

    def count_release(self, tenant: str, blocks: int, now_s: float) -> None:
        """Count blocks given back, for the estimates of when there is room."""
        self._released.add(blocks, now_s)
        if tenant in self.tenants:
            self.tenants[tenant].released.add(blocks, now_s)

    def retry_after_s(self, tenant: Tenant, reason: Refusal, blocks: int, now_s: float) -> float:
        """Estimate when so many blocks, and those of all in line before, will have been given back."""
        is_own = reason in (Refusal.QUOTA, Refusal.CONCURRENCY)
        ahead = tenant.line.blocks if is_own else sum(other.line.blocks for other in self.in_line)
        rate = (tenant.released if is_own else self._released).per_second(now_s)
        if rate * MAX_RETRY_S < 1.0:
            return _UNKNOWN_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, (ahead + blocks) / rate))

    @staticmethod
    def _may_move(tenant: Tenant, is_ready: bool, has_room: bool) -> bool:
        waiter = tenant.line.head
        refusal = waiter and tenant.blocked_by(waiter)
        return refusal is None or is_ready or (has_room and refusal == Refusal.CAPACITY)
