"""What engines were told that tenants' elastic sequences may hold, and what they may still believe. Pure.

An engine goes by a directive until it has a later one, and the manager knows of that only by its acknowledgement. So an
allowance counts as the largest of: the last acknowledged, all that were sent since, and the one to be sent next.
Lowering takes effect with the acknowledgement; raising uses only what is certainly left. Hence the sum over engines
never exceeds a tenant's room, whatever is lost or late.

An engine that has not yet acknowledged a directive of its present connection may go by anything: it is unsettled.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field

from kvorum.workers.governance import Directive

# A change smaller than this part of an allowance is not worth a directive.
_CLOSE = 8


@dataclass(slots=True)
class _Link:
    """What one engine was told. told: of each tenant the most that it may believe, `wanted` included."""

    is_settled: bool = False
    acknowledged: Mapping[str, int] = field(default_factory=dict)
    sent: deque[Directive] = field(default_factory=deque)
    last: Directive | None = None
    wanted: dict[str, int] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)

    def exposure(self, tenant: str) -> int:
        """Return the most that the engine may believe of a tenant."""
        most = max(self.acknowledged.get(tenant, 0), self.wanted.get(tenant, 0))
        for directive in self.sent:
            most = max(most, directive.allowances.get(tenant, 0))
        return most


class Allowances:
    """Allowances and directives of all engines; `limited` are the tenants that have a ceiling."""

    def __init__(self, limited: Collection[str]) -> None:
        self._limited = frozenset(limited)
        self._links: dict[str, _Link] = {}
        self._told: Counter[str] = Counter()
        self._unsettled: dict[str, None] = {}
        # Engines that may have to reclaim something else than they were told, or know nothing yet; and those that
        # there is something new to tell.
        self._touched: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        self._num_allowed = 0

    def set_limited(self, limited: Collection[str]) -> None:
        """Take other tenants with ceilings; every engine must be told."""
        if self._limited != (limited := frozenset(limited)):
            self._limited = limited
            for engine_id, link in self._links.items():
                self._changed[engine_id] = None
                self._check_settled(engine_id, link)

    def connect(self, engine_id: str) -> None:
        """Start anew with an engine, which may go by what it was told before."""
        before = self._links.get(engine_id, _Link())
        names = {*before.acknowledged, *before.wanted, *before.told}
        link = _Link(
            acknowledged={name: before.exposure(name) for name in names}, wanted=before.wanted, told=before.told
        )
        self._links[engine_id] = link
        self._unsettled[engine_id] = None
        self.touch(engine_id)

    def drop(self, engine_id: str) -> None:
        """Forget an engine that is given up."""
        link = self._links.pop(engine_id, None)
        if link:
            self._told.subtract(link.told)
        for engines in (self._unsettled, self._touched, self._changed):
            engines.pop(engine_id, None)

    def total(self, tenant: str) -> int:
        """Return what a tenant's elastic sequences may hold in the whole cluster."""
        return self._told[tenant]

    def elsewhere(self, tenant: str, engines: Container[str]) -> int:
        """Return what a tenant's elastic sequences may hold on other engines than these."""
        return sum(link.told.get(tenant, 0) for engine_id, link in self._links.items() if engine_id not in engines)

    def names(self, engine_id: str, tenant: str) -> bool:
        """Whether an engine goes by a directive that limits a tenant."""
        return self._links[engine_id].is_settled and tenant in self._links[engine_id].acknowledged

    @property
    def unsettled(self) -> Iterator[str]:
        """Engines of which it is not known what they go by."""
        return iter(self._unsettled)

    def share(self, tenant: str, targets: Mapping[str, int], room: int) -> bool:
        """Approach new allowances of a tenant, raising only into room; return whether all are reached."""
        is_over = self._told[tenant] > room
        links = {engine_id: self._links[engine_id] for engine_id in targets if engine_id in self._links}
        rising = []
        for engine_id, link in links.items():
            target, wanted = targets[engine_id], link.wanted.get(tenant, 0)
            if target > wanted and not _is_close(target, wanted):
                rising.append(engine_id)
            elif target < wanted and (is_over or not _is_close(target, wanted)):
                self._want(engine_id, tenant, target)
        is_reached = True
        for engine_id in rising:
            is_reached = self.raise_to(engine_id, tenant, targets[engine_id], room) and is_reached
        return is_reached

    def raise_to(self, engine_id: str, tenant: str, blocks: int, room: int) -> bool:
        """Raise one engine's allowance of a tenant to so many blocks, as far as there is room; return whether all."""
        link = self._links[engine_id]
        possible = link.told.get(tenant, 0) + max(0, room - self._told[tenant])
        if min(blocks, possible) > link.wanted.get(tenant, 0):
            self._want(engine_id, tenant, min(blocks, possible))
        return blocks <= possible

    def touch(self, engine_id: str) -> None:
        """Look at an engine again when directives are next taken: what it should reclaim may have changed."""
        if engine_id in self._links:
            self._touched[engine_id] = None

    def allow(self, num_engines: int) -> None:
        """Let so many engines be told of new allowances from now on."""
        self._num_allowed = num_engines

    def take_directives(self, reclaim_of: Callable[[str], int | None]) -> dict[str, Directive]:
        """Return new directives: of all engines that have to reclaim something else than before, or know nothing yet.

        Of others as far as `allow` goes; the rest is for later. reclaim_of is None while an engine is not connected.
        """
        taken = dict[str, Directive]()
        touched, self._touched = self._touched, {}
        for engine_id in touched:
            last, reclaim = self._links[engine_id].last, reclaim_of(engine_id)
            if reclaim is not None and (last is None or last.reclaim_blocks != reclaim):
                self._changed.pop(engine_id, None)
                taken[engine_id] = self._direct(engine_id, reclaim)
        while self._changed and self._num_allowed:
            engine_id = next(iter(self._changed))
            del self._changed[engine_id]
            last, reclaim = self._links[engine_id].last, reclaim_of(engine_id)
            if reclaim is not None and (last is None or last.allowances != self._wanted(engine_id)):
                taken[engine_id] = self._direct(engine_id, reclaim)
                self._num_allowed -= 1
        return taken

    def _wanted(self, engine_id: str) -> dict[str, int]:
        wanted = self._links[engine_id].wanted
        return {tenant: wanted.get(tenant, 0) for tenant in sorted(self._limited)}

    def _direct(self, engine_id: str, reclaim: int) -> Directive:
        link = self._links[engine_id]
        link.last = Directive(link.last.number + 1 if link.last else 1, self._wanted(engine_id), reclaim)
        link.sent.append(link.last)
        return link.last

    def acknowledge(self, engine_id: str, number: int) -> bool:
        """Take an engine's word that it goes by a directive; return whether that is news."""
        link = self._links.get(engine_id)
        if not link or not link.sent or link.sent[0].number > number:
            return False
        while link.sent and link.sent[0].number <= number:
            link.acknowledged = link.sent.popleft().allowances
        link.is_settled = True
        self._check_settled(engine_id, link)
        for tenant in tuple(link.told):
            self._tell(link, tenant)
        return True

    def audit(self) -> None:
        """Raise AssertionError where the sums are not those of their parts."""
        told: Counter[str] = Counter()
        for engine_id, link in self._links.items():
            for tenant, blocks in link.told.items():
                assert blocks == link.exposure(tenant), f"{engine_id}: allowance of {tenant}"
            told.update(link.told)
        assert told == self._told, "allowances of the cluster"

    def _want(self, engine_id: str, tenant: str, blocks: int) -> None:
        link = self._links[engine_id]
        link.wanted[tenant] = blocks
        self._changed[engine_id] = None
        self._tell(link, tenant)

    def _tell(self, link: _Link, tenant: str) -> None:
        exposure = link.exposure(tenant)
        self._told[tenant] += exposure - link.told.get(tenant, 0)
        link.told[tenant] = exposure

    def _check_settled(self, engine_id: str, link: _Link) -> None:
        if link.is_settled and self._limited <= link.acknowledged.keys():
            self._unsettled.pop(engine_id, None)
        else:
            self._unsettled[engine_id] = None


def _is_close(target: int, wanted: int) -> bool:
    return abs(target - wanted) * _CLOSE <= max(target, wanted)
