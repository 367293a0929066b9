"""Who reserves what where: leases by engine, sums by tenant, and the room that is left. Pure; nothing here waits.

A lease stands on one engine and has up to two sides:
    promise  what the manager granted or a router says it holds; ends with its release, or when nobody renews it;
    use      what the engine says its sequences hold; begins and ends with the engine's reports alone.
It reserves the larger of the two. So a commit that arrives after the release counts as long as the sequences are there
and no longer, and snapshots and renewals give the same ledger in any order.

Room. A tenant's floor is spread over engines by size: floor share f = floor * total / cluster total, rounded down. An
engine may reserve while  sum over tenants of max(reserved, f) <= total:  what a tenant is sure of stays free for it.

    total = reserved + sum of (f - reserved) where positive + free          free may be below 0 after a recovery

Costs: each change O(1); a change of the cluster's size or the floors O(engines * floored tenants), once, when room is
next asked for. Invariants: `audit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from kvorum.cluster.manager.room_index import RoomIndex
from kvorum.cluster.manager.types import EngineFacts, LeaseRecord, TenantLimits
from kvorum.workers.governance import EngineReport, LeaseUse


@dataclass(slots=True)
class Lease:
    """One lease on one engine. since_s: when it was first heard of here. router_id: who holds its promise."""

    lease_id: str
    tenant: str
    since_s: float
    promised: tuple[int, ...] = ()
    used_blocks: int | None = None
    expires_at_s: float = 0.0
    router_id: str = ""

    @property
    def blocks(self) -> int:
        """Blocks that it reserves."""
        return max(sum(self.promised), self.used_blocks or 0)

    @property
    def num_sequences(self) -> int:
        """Sequences it counts for; one when only the engine knows it."""
        return len(self.promised) or 1

    @property
    def uncommitted_blocks(self) -> int:
        """Blocks that it will ask for once its sequences arrive."""
        return sum(self.promised) if self.used_blocks is None else 0


@dataclass(slots=True)
class Engine:
    """One engine, connected or not. facts: None while only leases are known of it. drop_at_s: when it is given up.

    held_for: the tenant whose head of the line waits for this engine to drain.
    """

    engine_id: str
    facts: EngineFacts | None = None
    report: EngineReport = field(default_factory=lambda: EngineReport(0, 0, 0))
    is_connected: bool = False
    drop_at_s: float = 0.0
    num_deltas: int = 0
    held_for: str | None = None
    leases: dict[str, Lease] = field(default_factory=dict)
    reserved: Counter[str] = field(default_factory=Counter)
    floors: Mapping[str, int] = field(default_factory=dict)
    reserved_blocks: int = 0
    kept_for_floors: int = 0
    uncommitted_blocks: int = 0
    num_sequences: int = 0

    @property
    def epoch(self) -> int | None:
        """Number of its latest connection."""
        return self.facts.epoch if self.facts else None

    @property
    def total_blocks(self) -> int:
        """Size of its pool."""
        return self.facts.total_blocks if self.facts else 0

    @property
    def max_sequences(self) -> int:
        """Sequences it runs at once."""
        return self.facts.max_sequences if self.facts else 0

    @property
    def free_blocks(self) -> int:
        """Blocks that anybody may reserve."""
        return self.total_blocks - self.reserved_blocks - self.kept_for_floors

    @property
    def unheld_blocks(self) -> int:
        """Blocks that no sequence holds, as last reported, less those that leases on their way will ask for."""
        return self.report.free_blocks + self.report.cached_blocks - self.uncommitted_blocks

    def floor_room(self, tenant: str) -> int:
        """Blocks that are kept for a tenant alone."""
        return max(0, self.floors.get(tenant, 0) - self.reserved[tenant])

    def room(self, tenant: str) -> int:
        """Blocks that a tenant may reserve."""
        return self.free_blocks + self.floor_room(tenant)

    def most_room(self, tenant: str) -> int:
        """Blocks that a tenant could reserve if no lease stood here."""
        return self.total_blocks - sum(floor for name, floor in self.floors.items() if name != tenant)


class Ledger:
    """All engines and leases."""

    def __init__(self, tenants: Collection[TenantLimits]) -> None:
        self.engines: dict[str, Engine] = {}
        self.reserved: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.total_blocks = 0
        self._homes: dict[str, str] = {}
        # When each lease was first heard of, the oldest first.
        self._since_s: dict[str, float] = {}
        self._shapes: Counter[tuple[int, int]] = Counter()
        self._index = RoomIndex()
        self._tenants = tuple(tenants)
        self._floors: dict[str, int] = {}
        self._floors_are_current = False

    # Tenants.

    def set_tenants(self, tenants: Collection[TenantLimits]) -> None:
        """Take new floors."""
        self._tenants = tuple(tenants)
        self._floors_are_current = False

    def floor_blocks(self, tenant: str) -> int:
        """Return the blocks that a tenant is sure of; floors above the whole cluster are scaled down together."""
        self._spread_floors()
        return self._floors.get(tenant, 0)

    # Engines.

    def engine(self, engine_id: str) -> Engine:
        """Return an engine, known or new."""
        return self.engines.setdefault(engine_id, Engine(engine_id))

    def set_facts(self, engine: Engine, facts: EngineFacts) -> None:
        """Take what an engine says of itself; it is connected from now on."""
        if engine.facts:
            self._count_shape(engine, -1)
        engine.facts, engine.is_connected = facts, True
        self._count_shape(engine, 1)
        self._place(engine)

    def set_disconnected(self, engine: Engine) -> None:
        """Grant nothing there any more; what is reserved stays."""
        engine.is_connected, engine.held_for = False, None
        self._place(engine)

    def drop_engine(self, engine: Engine) -> None:
        """Forget an engine and its leases."""
        for lease in [*engine.leases.values()]:
            self._remove(engine, lease)
            self._since_s.pop(lease.lease_id, None)
        if engine.facts:
            self._count_shape(engine, -1)
        self._index.drop(engine.engine_id)
        del self.engines[engine.engine_id]

    def could_hold(self, blocks: int, num_sequences: int, tenant: str) -> bool:
        """Say whether some engine could take a lease if it ran nothing but what floors keep."""
        self._spread_floors()
        others = [floor for name, floor in self._floors.items() if name != tenant]
        return any(
            num_sequences <= max_sequences
            and blocks <= total - sum(floor * total // self.total_blocks for floor in others)
            for total, max_sequences in self._shapes
        )

    def roomiest(self, tenant: str, blocks: int) -> Iterator[Engine]:
        """Yield connected engines, roomiest first: all on which a tenant may reserve the blocks, and some others."""
        self._spread_floors()
        for engine_id in self._index.roomiest(blocks):
            yield self.engines[engine_id]
        if self._floors.get(tenant):
            for engine in self.engines.values():
                if engine.is_connected and engine.floor_room(tenant):
                    yield engine

    # Leases.

    def home_of(self, lease_id: str) -> Engine | None:
        """Return the engine that a lease is on."""
        engine_id = self._homes.get(lease_id)
        return None if engine_id is None else self.engines[engine_id]

    def expiry_of(self, lease_id: str) -> float | None:
        """Return when a lease's promise ends; None when there is none."""
        engine = self.home_of(lease_id)
        return engine.leases[lease_id].expires_at_s if engine and engine.leases[lease_id].promised else None

    def oldest_lease_s(self, now_s: float) -> float:
        """Return how long the oldest lease has been known; 0 without one."""
        return now_s - next(iter(self._since_s.values()), now_s)

    def promise(self, record: LeaseRecord, expires_at_s: float, *, router_id: str, now_s: float) -> Lease | None:
        """Set or prolong a lease's promise; None, and nothing happens, when it is promised elsewhere."""
        home = self.home_of(record.lease_id)
        if home and home.engine_id != record.engine_id:
            return None
        if home and home.leases[record.lease_id].promised:
            lease = home.leases[record.lease_id]
            lease.expires_at_s, lease.router_id = max(lease.expires_at_s, expires_at_s), router_id
            return lease
        engine = home or self.engine(record.engine_id)
        lease = self._take_out(engine, record.lease_id) or Lease(record.lease_id, record.tenant, now_s)
        lease.promised, lease.expires_at_s, lease.router_id = record.sequence_blocks, expires_at_s, router_id
        self._put(engine, lease)
        return lease

    def promised_to(self, router_ids: Collection[str]) -> list[str]:
        """Return the leases whose promises these routers hold; looks at all leases."""
        leases = (lease for engine in self.engines.values() for lease in engine.leases.values())
        return [lease.lease_id for lease in leases if lease.promised and lease.router_id in router_ids]

    def holder_of(self, lease_id: str) -> str | None:
        """Return the router that holds a lease's promise; None when there is none."""
        engine = self.home_of(lease_id)
        return engine.leases[lease_id].router_id if engine and engine.leases[lease_id].promised else None

    def end_promise(self, lease_id: str) -> Lease | None:
        """End a lease's promise and return it as it was; None when there is none."""
        engine = self.home_of(lease_id)
        if not engine or not engine.leases[lease_id].promised:
            return None
        lease = engine.leases[lease_id]
        before = Lease(lease_id, lease.tenant, lease.since_s, lease.promised, lease.used_blocks, lease.expires_at_s)
        self._remove(engine, lease)
        lease.promised = ()
        self._put(engine, lease)
        return before

    def begin_use(self, engine: Engine, use: LeaseUse, *, now_s: float) -> None:
        """Count what an engine says a lease's sequences hold."""
        lease = self._take_out(engine, use.lease_id) or Lease(use.lease_id, use.tenant, now_s)
        lease.used_blocks = use.reserved_blocks
        self._put(engine, lease)

    def end_use(self, engine: Engine, lease_id: str) -> None:
        """An engine has no sequence of a lease any more."""
        lease = self._take_out(engine, lease_id)
        if lease:
            lease.used_blocks = None
            self._put(engine, lease)

    def end_uses(self, engine: Engine) -> bool:
        """An engine has no sequence of any lease, as far as can be told; return whether promises are left."""
        for lease_id in [*engine.leases]:
            self.end_use(engine, lease_id)
        return bool(engine.leases)

    def _take_out(self, engine: Engine, lease_id: str) -> Lease | None:
        lease = engine.leases.get(lease_id)
        if lease:
            self._remove(engine, lease)
        return lease

    def _remove(self, engine: Engine, lease: Lease) -> None:
        del engine.leases[lease.lease_id]
        if self._homes.get(lease.lease_id) == engine.engine_id:
            del self._homes[lease.lease_id]
        self._count(engine, lease, -1)

    def _put(self, engine: Engine, lease: Lease) -> None:
        """Count a lease, unless neither side is left."""
        if lease.promised or lease.used_blocks is not None:
            engine.leases[lease.lease_id] = lease
            self._homes.setdefault(lease.lease_id, engine.engine_id)
            self._since_s.setdefault(lease.lease_id, lease.since_s)
            self._count(engine, lease, 1)
        else:
            self._since_s.pop(lease.lease_id, None)

    def _count(self, engine: Engine, lease: Lease, sign: int) -> None:
        blocks, tenant = sign * lease.blocks, lease.tenant
        engine.kept_for_floors -= engine.floor_room(tenant)
        engine.reserved[tenant] += blocks
        engine.kept_for_floors += engine.floor_room(tenant)
        engine.reserved_blocks += blocks
        engine.uncommitted_blocks += sign * lease.uncommitted_blocks
        engine.num_sequences += sign * lease.num_sequences
        self.reserved[tenant] += blocks
        self.running[tenant] += sign
        self._place(engine)

    def _place(self, engine: Engine) -> None:
        if engine.is_connected and engine.num_sequences < engine.max_sequences:
            self._index.put(engine.engine_id, engine.free_blocks)
        else:
            self._index.drop(engine.engine_id)

    def _count_shape(self, engine: Engine, sign: int) -> None:
        shape = (engine.total_blocks, engine.max_sequences)
        self._shapes[shape] += sign
        if not self._shapes[shape]:
            del self._shapes[shape]
        self.total_blocks += sign * engine.total_blocks
        self._floors_are_current = False

    # Floors.

    def _spread_floors(self) -> None:
        """Bring floor shares up to date with the cluster's size and the tenants' limits."""
        if self._floors_are_current:
            return
        self._floors_are_current = True
        asked = {tenant.name: in_blocks(tenant.floor, self.total_blocks) for tenant in self._tenants if tenant.floor}
        wanted = max(1, self.total_blocks, sum(asked.values()))
        self._floors = {name: floor * self.total_blocks // wanted for name, floor in asked.items()}
        for engine in self.engines.values():
            self._set_floors(engine)

    def _set_floors(self, engine: Engine) -> None:
        total = max(1, self.total_blocks)
        engine.floors = {name: floor * engine.total_blocks // total for name, floor in self._floors.items()}
        engine.kept_for_floors = sum(engine.floor_room(name) for name in engine.floors)
        self._place(engine)

    def audit(self) -> None:
        """Raise AssertionError where a sum is not what its parts add up to."""
        reserved: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for engine in self.engines.values():
            own: Counter[str] = Counter()
            for lease in engine.leases.values():
                assert lease.promised or lease.used_blocks is not None, f"lease {lease.lease_id} is empty"
                own[lease.tenant] += lease.blocks
                running[lease.tenant] += 1
            assert +own == +engine.reserved, f"{engine.engine_id}: tenants' reserved blocks"
            assert own.total() == engine.reserved_blocks, f"{engine.engine_id}: reserved blocks"
            leases = engine.leases.values()
            assert engine.num_sequences == sum(lease.num_sequences for lease in leases), engine.engine_id
            assert engine.uncommitted_blocks == sum(lease.uncommitted_blocks for lease in leases), engine.engine_id
            assert engine.kept_for_floors == sum(map(engine.floor_room, engine.floors)), engine.engine_id
            reserved += own
        assert reserved == +self.reserved, "reserved blocks of the cluster"
        assert running == +self.running, "leases of the cluster"
        assert self.total_blocks == sum(engine.total_blocks for engine in self.engines.values()), "total blocks"
        held = {lease_id for engine in self.engines.values() for lease_id in engine.leases}
        assert self._since_s.keys() == held, "ages of leases"
        for lease_id, engine_id in self._homes.items():
            assert lease_id in self.engines[engine_id].leases, f"lease {lease_id} is not at home"


def in_blocks(limit: int | float, total_blocks: int) -> int:
    """Return a limit as a count: a float is a fraction of the total."""
    return int(limit * total_blocks) if isinstance(limit, float) else limit
