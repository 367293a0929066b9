"""The global cache manager's decisions: one object that owns the ledger of leases and the lines in front of it. Pure.

A request's way:
 1. `admit`: what can never fit, or comes too often, is refused at once; else it stands in its tenant's line, which is
    usually empty, and is served at once if its tenant's limits and some engine allow.
 2. Granted, it reserves blocks on one engine (ledger.py). The engine is told to make room if it must (Directive). The
    router keeps the lease by `renew`; the engine reports when its sequences arrive and end.
 3. `release` or the lease's end gives the blocks back, and those in line are served.

Ceilings bound what a tenant reserves and what its elastic sequences may hold beyond that: reserved + allowances (as
engines may still believe them, allowances.py) <= ceiling. Where only allowances are in the way of a request, they are
lowered first and the request waits for the engines' acknowledgements.

After a restart the manager knows nothing. Engines' snapshots bring what runs, routers' renewals what they hold. While
an engine that a renewal named is not there yet (for engine_grace_s at most), only room that is certainly free is given.

Every method takes the time and none waits; whoever calls sends on `take_outcomes` and `take_directives` afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from kvorum.cluster.manager.ceilings import Ceilings
from kvorum.cluster.manager.fairness import Waiter
from kvorum.cluster.manager.ledger import Engine, Ledger
from kvorum.cluster.manager.lifetimes import LOOKS_AT_ONCE, Lifetimes
from kvorum.cluster.manager.pacing import DIRECTIVES_PER_TICK
from kvorum.cluster.manager.placement import Placement, Terms
from kvorum.cluster.manager.safe_shares import Bounds, SafeShare, safe_shares
from kvorum.cluster.manager.types import (
    AdmitRequest,
    ClusterView,
    EngineFacts,
    Granted,
    LeaseChanges,
    LeaseRecord,
    Outcome,
    Refusal,
    Refused,
    TenantLimits,
    Waiting,
)
from kvorum.cluster.manager.viewing import tenant_names, view_of
from kvorum.cluster.manager.waiting_room import HOLD_AFTER_S, Tenant, WaitingRoom
from kvorum.workers.governance import Directive, EngineReport, LeaseUse


class CacheManager:
    """See the module. lease_s: life of a lease that is not renewed. engine_grace_s: how long a lost engine is kept."""

    def __init__(self, tenants: Collection[TenantLimits], *, lease_s: float, engine_grace_s: float) -> None:
        self.lease_s = lease_s
        self._engine_grace_s = engine_grace_s
        self._ledger = Ledger(tenants)
        self._ceilings = Ceilings(self._ledger, tenants)
        self._allowances = self._ceilings.allowances
        self._placement = Placement(self._ledger, self._allowances)
        self._room = WaitingRoom(tenants)
        self._lifetimes = Lifetimes()
        self._outcomes: dict[str, Granted | Refused] = {}
        # Engines that renewals named and that are not there yet.
        self._missing: set[str] = set()
        # What changed since lines were last served: engines that may have more room, tenants whose limits may have
        # eased.
        self._roomier: dict[str, None] = {}
        self._ready: set[str] = set()
        # Heads for which an engine is kept, by tenant.
        self._holds: dict[str, tuple[Waiter, str]] = {}
        self._was_recovering = False
        # Leases of routers that are gone, to be ended by and by.
        self._orphans: deque[str] = deque()

    @property
    def tenants(self) -> Mapping[str, TenantLimits]:
        """The limits in force, by name."""
        return {name: tenant.limits for name, tenant in self._room.tenants.items()}

    def set_tenants(self, tenants: Collection[TenantLimits]) -> None:
        """Take new limits for what is admitted from now on; requests of tenants that are gone are refused."""
        for request in self._room.set_limits(tenants):
            self._outcomes[request.lease_id] = _unknown_tenant(request)
        self._ledger.set_tenants(tenants)
        self._ceilings.set_tenants(tenants)
        self._room.try_all_again()

    # Engines.

    def connect(self, facts: EngineFacts, report: EngineReport, leases: Collection[LeaseUse], now_s: float) -> None:
        """Take an engine's snapshot in place of all that it said before; one of an older epoch is ignored."""
        self._lifetimes.begin(now_s)
        engine = self._ledger.engine(facts.engine_id)
        if engine.facts and engine.facts.epoch > facts.epoch:
            return
        is_new = not (engine.is_connected and engine.facts and engine.facts.epoch == facts.epoch)
        if is_new:
            self._allowances.connect(facts.engine_id)
        self._ledger.set_facts(engine, facts)
        self._missing.discard(facts.engine_id)
        engine.num_deltas = 0
        before = {lease.lease_id for lease in engine.leases.values() if lease.used_blocks is not None}
        ended = before - {use.lease_id for use in leases}
        self._take(engine, report, LeaseChanges(tuple(leases), tuple(ended)), now_s)
        if is_new:
            self._ceilings.keep(facts.engine_id, report)
        self._room.try_all_again()
        self._serve(now_s)

    def take_report(
        self,
        engine_id: str,
        epoch: int,
        number: int,
        report: EngineReport,
        changes: LeaseChanges,
        now_s: float,
    ) -> bool:
        """Take what is new since an engine's last report (EngineReport.since); return whether it could be.

        Where it could not, because something in between was lost, a snapshot is needed.
        One that was taken already, or comes from an older connection, is ignored.
        """
        engine = self._ledger.engines.get(engine_id)
        if engine is None or engine.epoch is None or engine.epoch < epoch:
            return False
        if engine.epoch > epoch or number <= engine.num_deltas or not engine.is_connected:
            return True
        if number > engine.num_deltas + 1:
            return False
        engine.num_deltas = number
        self._take(engine, report.onto(engine.report), changes, now_s)
        self._serve(now_s)
        return True

    def disconnect(self, engine_id: str, epoch: int, now_s: float) -> None:
        """Grant nothing on an engine until it is back; its leases stay reserved for engine_grace_s."""
        engine = self._connected(engine_id, epoch)
        if engine:
            self._ledger.set_disconnected(engine)
            self._ceilings.forget(engine_id)
            self._lifetimes.keep_engine(engine, now_s + self._engine_grace_s)

    def acknowledge(self, engine_id: str, epoch: int, number: int) -> None:
        """Take an engine's word that it goes by a directive; whom that helps is served by the next tick."""
        if self._connected(engine_id, epoch) and self._allowances.acknowledge(engine_id, number):
            self._ready.update(self._ceilings.tenants)
            self._roomier[engine_id] = None

    def _connected(self, engine_id: str, epoch: int) -> Engine | None:
        engine = self._ledger.engines.get(engine_id)
        return engine if engine and engine.is_connected and engine.epoch == epoch else None

    def _take(self, engine: Engine, report: EngineReport, changes: LeaseChanges, now_s: float) -> None:
        engine.report = report
        self._ceilings.take_report(engine.engine_id, report)
        for use in changes.started:
            self._placement.forget(engine.engine_id, use.lease_id)
            self._ledger.begin_use(engine, use, now_s=now_s)
        for lease_id in changes.ended:
            self._end_use(engine, lease_id, now_s)
        if changes.ended or self._is_recovering(now_s):
            self._roomier[engine.engine_id] = None
        self._allowances.touch(engine.engine_id)

    def _end_use(self, engine: Engine, lease_id: str, now_s: float) -> None:
        lease = engine.leases.get(lease_id)
        if lease:
            self._ready.add(lease.tenant)
            if not lease.promised:
                self._room.count_release(lease.tenant, lease.blocks, now_s)
            self._ledger.end_use(engine, lease_id)

    # Routers.

    def admit(self, request: AdmitRequest, now_s: float) -> Outcome:
        """Decide on a request; the same answer again for an id that has one, as far as it still holds."""
        self._lifetimes.begin(now_s)
        if request.router_id:
            self._lifetimes.hear_router(request.router_id, now_s)
        if known := self._known_outcome(request, now_s):
            return known
        tenant = self._room.tenants.get(request.tenant)
        if tenant is None:
            return _unknown_tenant(request)
        if refused := self._refusal_at_once(request, tenant, now_s):
            return self._remember(refused, tenant, now_s)
        self._room.join(request, now_s)
        self._serve(now_s)
        if outcome := self._outcomes.pop(request.lease_id, None):
            return outcome
        if request.max_wait_s > 0.0 and len(tenant.line) <= tenant.limits.max_waiting:
            return Waiting(request.lease_id)
        reason = tenant.stuck[1] if tenant.stuck else Refusal.CAPACITY
        self._room.leave(request.lease_id)
        return self._remember(self._refused(request, tenant, reason, now_s), tenant, now_s)

    def renew(self, router_id: str, records: Collection[LeaseRecord], now_s: float) -> bool:
        """Note that a router is there, prolong leases of it, and take over those that are not known here.

        One that was just released stays so. Returns whether the router is new here, and has to tell all it holds.
        """
        self._lifetimes.begin(now_s)
        is_new = self._lifetimes.meet_router(router_id, now_s)
        for record in records:
            if self._lifetimes.is_released(record.lease_id):
                continue
            self.cancel(record.lease_id)
            if self._ledger.holder_of(record.lease_id) is None:
                self._ceilings.reconsider(record.tenant)
            lease = self._ledger.promise(record, now_s + self.lease_s, router_id=router_id, now_s=now_s)
            if lease:
                self._lifetimes.watch_lease(lease)
            engine = self._ledger.engines.get(record.engine_id)
            if engine and not engine.facts and not engine.drop_at_s:
                self._missing.add(engine.engine_id)
                self._was_recovering = self._is_recovering(now_s)
                self._lifetimes.keep_engine(engine, now_s + self._engine_grace_s)
        return is_new

    def safe_shares(self) -> dict[str, SafeShare]:
        """Return what each router may give each tenant while it has to decide alone."""
        bounds = {
            name: Bounds(self._ledger.floor_blocks(name), self._ceilings.blocks_of(name))
            for name in tenant_names(self._ledger, self._room)
        }
        return safe_shares(self._ledger.total_blocks, bounds, self.tenants, num_routers=len(self._lifetimes.routers))

    def release(self, lease_id: str, now_s: float, *, has_ended: bool = False) -> None:
        """End a lease, granted or waiting; nothing happens when there is none, nor if it is asked for later.

        has_ended: its router saw every sequence end, so its blocks are free although the engine did not say so yet.
        """
        self._lifetimes.remember_release(lease_id, now_s)
        self.cancel(lease_id)
        engine = self._ledger.home_of(lease_id)
        self._end_promise(lease_id, now_s)
        if engine and has_ended:
            self._end_use(engine, lease_id, now_s)
        self._serve(now_s)

    def cancel(self, lease_id: str) -> None:
        """Take a request out of the line."""
        if self._room.is_waiting(lease_id):
            self._room.leave(lease_id)

    def _end_promise(self, lease_id: str, now_s: float) -> None:
        engine = self._ledger.home_of(lease_id)
        lease = self._ledger.end_promise(lease_id)
        if engine and lease:
            self._placement.forget(engine.engine_id, lease_id)
            self._ready.add(lease.tenant)
            self._roomier[engine.engine_id] = None
            self._allowances.touch(engine.engine_id)
            if lease.used_blocks is None:
                self._room.count_release(lease.tenant, lease.blocks, now_s)

    def _known_outcome(self, request: AdmitRequest, now_s: float) -> Outcome | None:
        lease_id = request.lease_id
        if self._lifetimes.is_released(lease_id):
            return Refused(lease_id, Refusal.DEADLINE, "this request was given up")
        if engine := self._ledger.home_of(lease_id):
            return self._grant(request, engine, now_s)
        if self._room.is_waiting(lease_id):
            return Waiting(lease_id)
        return self._lifetimes.refusal(lease_id, now_s)

    def _refusal_at_once(self, request: AdmitRequest, tenant: Tenant, now_s: float) -> Refused | None:
        """Refuse what can never be, or comes too often."""
        ceiling = self._ceilings.blocks_of(request.tenant)
        if not self._ledger.total_blocks:
            if self._missing or self._lifetimes.is_young(self._engine_grace_s, now_s):
                return None
            return self._refused(request, tenant, Refusal.NO_ENGINE, now_s)
        if not self._missing:
            if ceiling is not None and request.blocks > ceiling:
                return _never_fits(request, f"tenant {request.tenant!r} may have {ceiling}")
            if not self._ledger.could_hold(request.blocks, len(request.sequence_blocks), request.tenant):
                return _never_fits(request, "no engine has so many for it")
        wait_s = tenant.take_token(now_s)
        if wait_s:
            limit = tenant.limits.max_requests_per_minute
            message = f"tenant {request.tenant!r} may send {limit} requests a minute"
            return Refused(request.lease_id, Refusal.RATE, message, wait_s)
        return None

    def _refused(self, request: AdmitRequest, tenant: Tenant, reason: Refusal, now_s: float) -> Refused:
        retry_s = self._room.retry_after_s(tenant, reason, request.blocks, now_s)
        return Refused(request.lease_id, reason, _MESSAGES[reason].format(tenant=request.tenant), retry_s)

    def _remember(self, refused: Refused, tenant: Tenant, now_s: float) -> Refused:
        tenant.refused[refused.reason.value] += 1
        self._lifetimes.remember_refusal(refused, now_s)
        return refused

    # Serving the lines.

    def tick(self, now_s: float) -> None:
        """End what is over and serve those in line; to be called several times a second."""
        self._allowances.allow(DIRECTIVES_PER_TICK)
        for lease_id in self._lifetimes.take_expired(self._ledger.expiry_of, now_s):
            self._end_promise(lease_id, now_s)
        self._end_gone_routers(now_s)
        for engine_id in self._lifetimes.take_lost(now_s):
            self._give_up(engine_id, now_s)
        for waiter in self._room.take_overdue(now_s):
            tenant = self._room.tenants[waiter.request.tenant]
            reason = Refusal.DEADLINE if self._ledger.total_blocks else Refusal.NO_ENGINE
            refused = self._refused(waiter.request, tenant, reason, now_s)
            self._outcomes[refused.lease_id] = self._remember(refused, tenant, now_s)
        if self._was_recovering != self._is_recovering(now_s):
            self._was_recovering = not self._was_recovering
            self._room.try_all_again()
        self._serve(now_s)
        self._hold_engines(now_s)

    def _end_gone_routers(self, now_s: float) -> None:
        if gone := self._lifetimes.take_gone_routers(now_s):
            self._room.leave_of(gone)
            self._orphans.extend(self._ledger.promised_to(gone))
        for _ in range(min(len(self._orphans), LOOKS_AT_ONCE)):
            lease_id = self._orphans.popleft()
            holder = self._ledger.holder_of(lease_id)
            if holder is not None and holder not in self._lifetimes.routers:
                self._end_promise(lease_id, now_s)

    def resume(self, now_s: float) -> None:
        """Go on after a standstill, in which nobody could be heard."""
        self._lifetimes.hear_all_routers(now_s)

    def take_outcomes(self) -> list[Granted | Refused]:
        """Return what became of requests that waited, once."""
        taken, self._outcomes = [*self._outcomes.values()], {}
        return taken

    def _give_up(self, engine_id: str, now_s: float) -> None:
        engine = self._ledger.engines.get(engine_id)
        if engine and not engine.is_connected and engine.drop_at_s <= now_s:
            self._ready.update(engine.reserved)
            if self._ledger.end_uses(engine):
                # Routers still hold leases there, so it is this manager that lost it: those last as long as renewed.
                self._lifetimes.keep_engine(engine, now_s + self._engine_grace_s)
                return
            self._ledger.drop_engine(engine)
            self._allowances.drop(engine_id)
            self._placement.forget_engine(engine_id)
            self._missing.discard(engine_id)
            self._room.try_all_again()

    def _serve(self, now_s: float) -> None:
        self._end_holds()
        ready, roomier = self._ready, self._roomier
        self._ready, self._roomier = set(), {}
        self._room.serve(ready, bool(roomier), lambda tenant, waiter: self._try(tenant, waiter, roomier, now_s), now_s)

    def _try(self, tenant: Tenant, waiter: Waiter, roomier: Collection[str], now_s: float) -> Refusal | None:
        """Admit a head, or say what is in the way. One that found no room before looks only where there may be more."""
        request, limits = waiter.request, tenant.limits
        if limits.max_running is not None and self._ledger.running[limits.name] >= limits.max_running:
            return Refusal.CONCURRENCY
        if not self._ceilings.admits(limits.name, request.blocks):
            return Refusal.QUOTA
        terms = Terms(is_limited=limits.ceiling is not None, is_certain=self._is_recovering(now_s))
        if tenant.blocked_by(waiter) == Refusal.CAPACITY:
            engine = self._placement.choose_among(request, terms, roomier)
        else:
            engine = self._placement.choose(request, terms)
        if engine is None:
            return Refusal.CAPACITY
        self._outcomes[request.lease_id] = self._grant(request, engine, now_s)
        self._placement.note(engine.engine_id, request)
        return None

    def _grant(self, request: AdmitRequest, engine: Engine, now_s: float) -> Granted:
        record = LeaseRecord(request.lease_id, request.tenant, engine.engine_id, request.sequence_blocks)
        expires_at_s = now_s + self.lease_s
        lease = self._ledger.promise(record, expires_at_s, router_id=request.router_id, now_s=now_s)
        assert lease, "a lease is granted where it is"
        self._lifetimes.watch_lease(lease)
        self._allowances.touch(engine.engine_id)
        return Granted(request.lease_id, engine.engine_id, lease.expires_at_s)

    def _hold_engines(self, now_s: float) -> None:
        """Keep engines for heads that found no room for long."""
        for tenant in self._room.in_line:
            waiter = tenant.line.head
            assert waiter, "a line is not empty"
            is_stuck = tenant.blocked_by(waiter) == Refusal.CAPACITY
            if is_stuck and tenant.limits.name not in self._holds and now_s - waiter.arrived_s >= HOLD_AFTER_S:
                engine = self._placement.hold(waiter.request)
                if engine:
                    self._holds[tenant.limits.name] = (waiter, engine.engine_id)

    def _end_holds(self) -> None:
        """Give back engines that were kept for heads which are gone, and forget those that are lost."""
        for name, (waiter, engine_id) in [*self._holds.items()]:
            engine = self._ledger.engines.get(engine_id)
            is_held = engine is not None and engine.held_for == name
            if self._room.is_head(waiter) and is_held:
                continue
            del self._holds[name]
            if engine and is_held:
                engine.held_for = None
                self._roomier[engine_id] = None

    def _is_recovering(self, now_s: float) -> bool:
        return bool(self._missing) and self._lifetimes.is_young(self._engine_grace_s, now_s)

    # What engines are told, and what is shown.

    def take_directives(self, now_s: float) -> dict[str, Directive]:
        """Return what is new to say to engines, once; to few at a time, so that nobody waits while many are told."""
        self._ceilings.share(now_s)
        if self._ceilings.is_lowering or next(self._room.in_line, None):
            self._allowances.allow(DIRECTIVES_PER_TICK)
        return self._allowances.take_directives(self._reclaim_of)

    def _reclaim_of(self, engine_id: str) -> int | None:
        """Return the blocks that an engine must make free for leases on their way; None when it is not there."""
        engine = self._ledger.engines[engine_id]
        if not engine.is_connected:
            return None
        return engine.uncommitted_blocks if engine.unheld_blocks < 0 else 0

    def view(self) -> ClusterView:
        """Return what is known now; costs engines * tenants."""
        return view_of(self._ledger, self._ceilings, self._room)

    def oldest_lease_s(self, now_s: float) -> float:
        """Return how long the oldest lease has been known; 0 without one."""
        return self._ledger.oldest_lease_s(now_s)

    def audit(self) -> None:
        """Raise AssertionError where the books are not right."""
        self._ledger.audit()
        self._allowances.audit()


_MESSAGES = {
    Refusal.CONCURRENCY: "tenant {tenant!r} runs as many requests as it may",
    Refusal.QUOTA: "tenant {tenant!r} has as many KV blocks as it may",
    Refusal.CAPACITY: "the cluster's KV cache is full",
    Refusal.DEADLINE: "there was no room in the KV cache before the deadline",
    Refusal.NO_ENGINE: "no engine is connected",
}


def _never_fits(request: AdmitRequest, why: str) -> Refused:
    return Refused(request.lease_id, Refusal.NEVER_FITS, f"the request needs {request.blocks} KV blocks, but {why}")


def _unknown_tenant(request: AdmitRequest) -> Refused:
    return Refused(request.lease_id, Refusal.UNKNOWN_TENANT, f"tenant {request.tenant!r} is not known")
