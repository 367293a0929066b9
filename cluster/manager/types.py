"""What routers ask of the cache manager and what it answers, as plain data. Blocks are KV blocks of one size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvorum.workers.governance import LeaseUse


class Refusal(StrEnum):
    """Why a request is not admitted."""

    NEVER_FITS = "never_fits"  # no engine, or not the tenant's ceiling, could ever hold it
    CONCURRENCY = "concurrency"  # the tenant runs as many requests as it may, and its queue is full
    RATE = "rate"  # the tenant sent more requests than it may in a minute
    QUOTA = "quota"  # the tenant's ceiling is reached, and its queue is full
    CAPACITY = "capacity"  # the cluster is full, and the queue is full
    NO_ENGINE = "no_engine"
    DEADLINE = "deadline"  # waited until its deadline
    UNKNOWN_TENANT = "unknown_tenant"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What the manager must know of a tenant.

    weight: share of service and of blocks, against other tenants'. floor, ceiling: blocks that it is sure of, and that
    it has at most: a count, or a fraction of the cluster's. max_running: requests at once. max_waiting: of its queue.
    """

    name: str
    weight: float = 1.0
    floor: int | float = 0
    ceiling: int | float | None = None
    max_running: int | None = None
    max_requests_per_minute: int | None = None
    max_waiting: int = 256


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """What a router asks for.

    sequence_blocks: for each sequence of the request the blocks to reserve. tokens: prompt and answer of all sequences,
    what it counts against its tenant's share of service. max_wait_s: how long it may stand in line. priority: lower is
    first within its tenant. prefix_runs: digests of the prompt's beginnings (prefix_affinity.py). router_id: who asks.
    """

    lease_id: str
    tenant: str
    sequence_blocks: tuple[int, ...]
    tokens: int
    max_wait_s: float
    priority: int = 0
    prefix_runs: tuple[int, ...] = ()
    router_id: str = ""

    @property
    def blocks(self) -> int:
        """Blocks to reserve in all."""
        return sum(self.sequence_blocks)


@dataclass(frozen=True, slots=True)
class Granted:
    """Leave to run on an engine; uncommitted (its sequences did not arrive there yet) until expires_at_s."""

    lease_id: str
    engine_id: str
    expires_at_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    """No. retry_after_s: when it may be worth another try; None when never."""

    lease_id: str
    reason: Refusal
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """In line; a Granted or Refused follows from a later `tick`, report or release."""

    lease_id: str


Outcome = Granted | Refused | Waiting


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease as the router that holds it knows it; a manager that has forgotten it takes it from here."""

    lease_id: str
    tenant: str
    engine_id: str
    sequence_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while an engine is connected. epoch: grows with each connection of the engine."""

    engine_id: str
    epoch: int
    total_blocks: int
    max_sequences: int


@dataclass(frozen=True, slots=True)
class LeaseChanges:
    """Which leases' sequences arrived at an engine and which have all ended, since the last report."""

    started: tuple[LeaseUse, ...] = ()
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine in a ClusterView. reserved_blocks: by leases."""

    engine_id: str
    total_blocks: int
    held_blocks: int
    reserved_blocks: int
    cached_blocks: int
    free_blocks: int
    num_leases: int
    price: float
    reclaimed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TenantView:
    """One tenant in a ClusterView; floor and ceiling in blocks."""

    tenant: str
    held_blocks: int
    reserved_blocks: int
    cached_blocks: int
    floor_blocks: int
    ceiling_blocks: int | None
    num_running: int
    num_waiting: int
    admitted_total: int
    refused_total: Mapping[str, int] = field(default_factory=dict)
    share_of_service: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The manager's whole knowledge at one moment.

    price: the highest of any engine. drift_blocks: difference between what engines say they hold and what their
    tenants add up to; 0 when the ledger is right. oldest_lease_s: age of the oldest lease, 0 without one.
    """

    engines: tuple[EngineView, ...] = ()
    tenants: tuple[TenantView, ...] = ()
    price: float = 0.0
    drift_blocks: int = 0
    oldest_lease_s: float = 0.0
