"""Which requests may run, and on which engine.

`Admission` is the seam: behind it stands the cluster's cache manager (managed_admission.py), or `LocalAdmission`, which
decides within one router from what its engines report. A lease is a promise of room. Admitting and releasing are
idempotent by the lease's id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.prefix_affinity import RUN_TOKENS, PrefixAffinity, prefix_runs
from kvorum.kvstore.errors import CapacityError, EngineLostError, NeverFitsError
from kvorum.kvstore.policies import MIN_BUDGET_TOKENS, parse_policy, resolve_budget, smallest_footprint
from kvorum.kvstore.types import blocks_for
from kvorum.workers.request import EngineInfo, KVParams

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of an engine: its sequences' tokens (prompt and answer), all under the same KV params.

    expected_tokens: of each sequence, what to reserve for; less than context_tokens where the client left the answer's
    length open. least_tokens: what its tenant lets elastic sequences be shrunk to. max_wait_s: how long it may stand in
    line. prompt, cache_salt: of the first sequence, by which an engine that has it cached is found.
    """

    lease_id: str
    tenant: str
    context_tokens: tuple[int, ...]
    expected_tokens: tuple[int, ...]
    kv: KVParams
    least_tokens: int = 128
    priority: int = 0
    max_wait_s: float = 0.0
    prompt: tuple[int, ...] = ()
    cache_salt: str = ""

    def sequence_blocks(self, block_size: int) -> tuple[int, ...]:
        """Return the blocks to reserve for each sequence: what it cannot do without.

        A quality floor may keep an elastic sequence from being shrunk so far; how far is known only once it runs.
        """
        policy = parse_policy(self.kv.policy)
        is_elastic = policy.evicts and self.kv.kv_budget is None
        return tuple(
            smallest_footprint(
                max(MIN_BUDGET_TOKENS, self.least_tokens)
                if is_elastic
                else resolve_budget(policy, self.kv.kv_budget, context_tokens=context_tokens),
                context_tokens=expected_tokens,
                min_retained_mass=0.0 if is_elastic else self.kv.min_retained_mass,
                block_size=block_size,
            )
            for context_tokens, expected_tokens in zip(self.context_tokens, self.expected_tokens, strict=True)
        )

    def blocks_alone(self, block_size: int) -> int:
        """Return the blocks that its largest sequence may need even alone in an empty pool."""
        if self.kv.min_retained_mass > 0.0:
            return blocks_for(max(self.context_tokens), block_size)
        whole = replace(self, expected_tokens=self.context_tokens)
        return max(whole.sequence_blocks(block_size))


@dataclass(frozen=True, slots=True)
class Lease:
    """Leave to run on an engine. sequence_blocks: reserved for each sequence."""

    lease_id: str
    engine_id: str
    sequence_blocks: tuple[int, ...]


class Admission(Protocol):
    """Decides which requests run where."""

    async def admit(self, demand: Demand) -> Lease:
        """Grant a lease; the same one again for an id that has one.

        Raises:
            NeverFitsError: no engine could hold it even alone.
            CapacityError: not now.
            DeadlineError: not within max_wait_s.
            EngineLostError: there is no engine.
        """
        ...

    async def release(self, lease_id: str, *, has_ended: bool) -> None:
        """Give a lease back; nothing happens when there is none. has_ended: every sequence of it was seen to end."""


class LocalAdmission:
    """Admission by one router, from its engines' own reports and the leases it granted itself.

    The engine gets the request that would have to compute least of it and has most room: `_score`. At most as many
    sequences are in flight as the engines can run and queue, so that overload is answered here, at once, and not by
    growing queues.
    """

    def __init__(self, engines: Callable[[], Mapping[str, EngineStatus]]) -> None:
        """Decide among the healthy engines that `engines` returns, by id."""
        self._engines = engines
        self._leases: dict[str, Lease] = {}
        # By engine, of its leases.
        self._sequences = Counter[str]()
        self._blocks = Counter[str]()
        self._affinity = PrefixAffinity()

    @property
    def num_leases(self) -> int:
        """Requests in flight."""
        return len(self._leases)

    async def admit(self, demand: Demand) -> Lease:
        """Grant a lease on the best engine; see Admission."""
        if lease := self._leases.get(demand.lease_id):
            return lease
        engines = self._engines()
        check_fits(demand, engines)
        return self.grant(demand, self._with_room(demand, engines), demand.lease_id)

    def grant(self, demand: Demand, roomy: Mapping[str, EngineStatus], lease_id: str) -> Lease:
        """Grant a lease on the best of these engines, all of which have room."""
        runs = prefix_runs(demand.prompt, demand.cache_salt)
        cached = self._affinity.cached_runs(runs)
        engine_id = max(roomy, key=lambda name: (self._score(demand, roomy[name], cached.get(name, 0)), name))
        self._affinity.note(engine_id, runs)
        lease = Lease(lease_id, engine_id, demand.sequence_blocks(roomy[engine_id].info.block_size))
        self._take(lease)
        return lease

    async def release(self, lease_id: str, *, has_ended: bool) -> None:
        """Give a lease back; see Admission."""
        if lease := self._leases.pop(lease_id, None):
            self._count(lease, -1)

    def _take(self, lease: Lease) -> None:
        if lease.lease_id not in self._leases:
            self._leases[lease.lease_id] = lease
            self._count(lease, 1)

    def _count(self, lease: Lease, sign: int) -> None:
        self._sequences[lease.engine_id] += sign * len(lease.sequence_blocks)
        self._blocks[lease.engine_id] += sign * sum(lease.sequence_blocks)

    def _with_room(self, demand: Demand, engines: Mapping[str, EngineStatus]) -> Mapping[str, EngineStatus]:
        """Return the engines that can take all of a request's sequences; raise CapacityError when there is none."""
        limits = {name: status.info.max_num_seqs + status.info.max_num_waiting for name, status in engines.items()}
        in_line = {name: self._in_line(status) for name, status in engines.items()}
        roomy = {
            name: status
            for name, status in engines.items()
            if in_line[name] + len(demand.context_tokens) <= limits[name]
            and demand.blocks_alone(status.info.block_size) <= status.info.num_blocks
        }
        if not roomy:
            raise CapacityError(
                f"{sum(in_line.values())} sequences are running or waiting; the cluster takes {sum(limits.values())}",
                retry_after_s=RETRY_AFTER_S,
            )
        return roomy

    def _in_line(self, status: EngineStatus) -> int:
        """Return the sequences that an engine runs or queues, those included that it has not reported yet."""
        return max(status.stats.num_running + status.stats.num_waiting, self._sequences[status.info.engine_id])

    def _score(self, demand: Demand, status: EngineStatus, cached_runs: int) -> float:
        """Add up the share of the prompt that is probably cached and the share of blocks that are free, less the queue.

        So a whole prompt's prefix is worth as much as a whole pool, or as one batch of requests in line before it. What
        was granted counts at once, before the engine's reports show it.
        """
        info, stats = status.info, status.stats
        held = max(stats.blocks_held, self._blocks[info.engine_id])
        return (
            cached_runs * RUN_TOKENS / max(1, len(demand.prompt))
            + (1 - held / info.num_blocks)
            - self._in_line(status) / info.max_num_seqs
        )


def check_fits(demand: Demand, engines: Mapping[str, EngineStatus]) -> None:
    """Raise EngineLostError when there is no engine, NeverFitsError when none could hold a request even alone."""
    if not engines:
        raise EngineLostError("no engine is alive")
    infos = [status.info for status in engines.values()]
    if not any(demand.blocks_alone(info.block_size) <= info.num_blocks for info in infos):
        raise _never_fits(demand, max(infos, key=lambda info: info.num_blocks))


def _never_fits(demand: Demand, largest: EngineInfo) -> NeverFitsError:
    return NeverFitsError(
        f"prompt and answer of {max(demand.context_tokens)} tokens need {demand.blocks_alone(largest.block_size)} KV "
        f"blocks even alone and at the smallest allowed budget, but the pool has {largest.num_blocks}"
    )
