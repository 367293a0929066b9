"""What an engine tells the cache manager of its KV pool, and what it is told. Plain data, without torch.

Words: a *lease* is leave to run, given by the manager, for all sequences of one client request. It *reserves* blocks:
as many as its sequences may need without being shrunk further (their whole context, or for an *elastic* sequence, whose
owner let its policy evict and set no budget of its own, its least). What an elastic sequence holds beyond that it holds
as long as nobody needs it more. *Worth* is what one more block does for a sequence, under the rule in force.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

# Bin i of a histogram counts blocks worth at least 2**-(i + 1) and less than 2**-i; the last one also what is less.
NUM_WORTH_BINS = 40

NO_TENANT = ""


class LadderStep(StrEnum):
    """How blocks are got back when the pool is short, in this order."""

    PREFIX = "prefix"  # unreferenced prefix blocks, over-quota tenants' first
    SHRINK_OVER_QUOTA = "shrink_over_quota"  # elastic sequences of tenants that hold more than they may
    SHRINK = "shrink"  # every elastic sequence, down to its least
    OFFLOAD = "offload"  # sequences to host memory
    PREEMPT = "preempt"  # dropped and computed again


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a sequence brings along from its lease.

    lease_id: shared by all sequences of a request; empty without a manager. reserved_blocks: of this sequence alone.
    weight: of its tenant, by which its mass counts. least_tokens: an elastic sequence is never shrunk below this many.
    """

    lease_id: str = ""
    tenant: str = NO_TENANT
    reserved_blocks: int = 0
    weight: float = 1.0
    least_tokens: int = 128


@dataclass(frozen=True, slots=True)
class LeaseUse:
    """A lease whose sequences an engine has. reserved_blocks: of those that it has."""

    lease_id: str
    tenant: str
    reserved_blocks: int


@dataclass(frozen=True, slots=True)
class TenantUse:
    """Blocks of one tenant on one engine.

    held: by its sequences. reserved: by the leases of those sequences. elastic: what its elastic sequences hold beyond
    their reserved blocks. cached: unreferenced prefix blocks. worths: histogram of the worth of the blocks that its
    elastic sequences hold or could use beyond their reserved ones.
    """

    held: int = 0
    reserved: int = 0
    elastic: int = 0
    cached: int = 0
    worths: tuple[int, ...] = (0,) * NUM_WORTH_BINS


_NO_USE = TenantUse()


@dataclass(frozen=True, slots=True)
class EngineReport:
    """A consistent look at an engine's pool between two steps.

    price: worth of the best block that some elastic sequence wants and does not get; 0 when all get what they want.
    reclaimed: blocks got back since the engine started, by ladder step. unread_tokens: of prompts, that are still to be
    computed.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    price: float = 0.0
    tenants: Mapping[str, TenantUse] = field(default_factory=dict)
    reclaimed: Mapping[LadderStep, int] = field(default_factory=dict)
    unread_tokens: int = 0

    @property
    def held_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.total_blocks - self.free_blocks - self.cached_blocks

    def since(self, before: EngineReport) -> EngineReport:
        """Return this report with only the tenants that are not as they were; those that are gone have nothing."""
        old, new = before.tenants, self.tenants
        changed = {name: use for name, use in new.items() if use != old.get(name)}
        return replace(self, tenants=changed | {name: _NO_USE for name in old if name not in new})

    def onto(self, before: EngineReport) -> EngineReport:
        """Return the report of which this one is what changed since `before`."""
        uses = {**before.tenants, **self.tenants}
        return replace(self, tenants={name: use for name, use in uses.items() if use != _NO_USE})


@dataclass(frozen=True, slots=True)
class Directive:
    """What the manager tells an engine. Each one replaces the one before.

    allowances: blocks that a tenant's elastic sequences may hold here beyond their reserved ones; a tenant that is not
    named has no limit. reclaim_blocks: make this many free, by shrinking if need be, since a request is on its way.
    """

    number: int
    allowances: Mapping[str, int] = field(default_factory=dict)
    reclaim_blocks: int = 0


def worth_bin(worth: float) -> int:
    """Return the histogram bin of a worth > 0."""
    return min(NUM_WORTH_BINS - 1, max(0, -math.frexp(worth)[1]))


def least_worth(index: int) -> float:
    """Return the least worth that a bin counts."""
    return 0.0 if index == NUM_WORTH_BINS - 1 else 2.0 ** -(index + 1)
