"""Which requests may run, and on which engine.

`Admission` is the seam: a cluster-wide cache manager can stand behind it as well as `LocalAdmission`, which decides
within one router from what its engines report. A lease is a promise of room; it is renewed while its request lives, so
that a router that dies takes its promises with it. Admitting and releasing are idempotent by request id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.prefix_affinity import PrefixAffinity
from kvorum.kvstore.errors import CapacityError, EngineLostError, NeverFitsError
from kvorum.kvstore.policies import parse_policy, resolve_budget, smallest_footprint
from kvorum.workers.request import EngineInfo, KVParams, RequestId

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of an engine: its sequences' tokens (prompt and answer), all under the same KV params.

    prompt, cache_salt: of the first sequence, by which an engine that has it cached is found.
    """

    request_id: RequestId
    context_tokens: tuple[int, ...]
    kv: KVParams
    prompt: tuple[int, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """Leave to run on an engine, until expires_at_s unless it is renewed."""

    request_id: RequestId
    engine_id: str
    expires_at_s: float


class Admission(Protocol):
    """Decides which requests run where."""

    async def admit(self, demand: Demand) -> Lease:
        """Grant a lease; the same one again for a request that has one.

        Raises:
            NeverFitsError: no engine could hold it even alone.
            CapacityError: not now.
            EngineLostError: there is no engine.
        """
        ...

    async def renew(self, request_ids: Collection[RequestId]) -> None:
        """Prolong the leases of requests that still live."""

    async def release(self, request_id: RequestId) -> None:
        """Give a lease back; nothing happens when there is none."""


@dataclass(frozen=True, slots=True)
class _Grant:
    lease: Lease
    num_sequences: int
    num_blocks: int


class LocalAdmission:
    """Admission by one router, from its engines' own reports and the leases it granted itself.

    The engine gets the request that would have to compute least of it and has most room: `_score`. At most as many
    sequences are in flight as the engines can run and queue, so that overload is answered here, at once, and not by
    growing queues.
    """

    def __init__(
        self, engines: Callable[[], Mapping[str, EngineStatus]], *, clock: Callable[[], float], lease_s: float = 30.0
    ) -> None:
        """Decide among the healthy engines that `engines` returns, by id."""
        self._engines = engines
        self._clock = clock
        self._lease_s = lease_s
        self._grants: dict[RequestId, _Grant] = {}
        self._affinity = PrefixAffinity()

    @property
    def lease_s(self) -> float:
        """How long a lease lasts without renewal."""
        return self._lease_s

    @property
    def num_leases(self) -> int:
        """Requests in flight."""
        return len(self._grants)

    async def admit(self, demand: Demand) -> Lease:
        """Grant a lease on the best engine; see Admission."""
        self._drop_expired()
        if grant := self._grants.get(demand.request_id):
            return grant.lease
        engines = self._engines()
        if not engines:
            raise EngineLostError("no engine is alive")
        fitting = {engine_id: status for engine_id, status in engines.items() if _can_ever_fit(demand, status.info)}
        if not fitting:
            raise _never_fits(demand, max((status.info for status in engines.values()), key=lambda i: i.num_blocks))
        roomy = self._with_room(demand, fitting)
        self._affinity.keep_only(engines)
        engine_id = max(roomy, key=lambda engine_id: (self._score(demand, roomy[engine_id]), engine_id))
        self._affinity.note(engine_id, demand.prompt, demand.cache_salt)
        lease = Lease(demand.request_id, engine_id, self._clock() + self._lease_s)
        blocks = sum(_footprints(demand, roomy[engine_id].info))
        self._grants[demand.request_id] = _Grant(lease, len(demand.context_tokens), blocks)
        return lease

    async def renew(self, request_ids: Collection[RequestId]) -> None:
        """Prolong leases; see Admission."""
        expires_at_s = self._clock() + self._lease_s
        for request_id in request_ids:
            if grant := self._grants.get(request_id):
                lease = Lease(request_id, grant.lease.engine_id, expires_at_s)
                self._grants[request_id] = _Grant(lease, grant.num_sequences, grant.num_blocks)

    async def release(self, request_id: RequestId) -> None:
        """Give a lease back; see Admission."""
        self._grants.pop(request_id, None)

    def _with_room(self, demand: Demand, engines: Mapping[str, EngineStatus]) -> Mapping[str, EngineStatus]:
        """Return the engines that can take all of a request's sequences; raise CapacityError when there is none."""
        limits = {name: status.info.max_num_seqs + status.info.max_num_waiting for name, status in engines.items()}
        in_line = {name: self._in_line(status) for name, status in engines.items()}
        roomy = {
            name: status
            for name, status in engines.items()
            if in_line[name] + len(demand.context_tokens) <= limits[name]
        }
        if not roomy:
            raise CapacityError(
                f"{sum(in_line.values())} sequences are running or waiting; the cluster takes {sum(limits.values())}",
                retry_after_s=RETRY_AFTER_S,
            )
        return roomy

    def _in_line(self, status: EngineStatus) -> int:
        """Return the sequences that an engine runs or queues, those included that it has not reported yet."""
        grants = (grant for grant in self._grants.values() if grant.lease.engine_id == status.info.engine_id)
        return max(status.stats.num_running + status.stats.num_waiting, sum(grant.num_sequences for grant in grants))

    def _score(self, demand: Demand, status: EngineStatus) -> float:
        """Add up the share of the prompt that is probably cached and the share of blocks that are free, less the queue.

        So a whole prompt's prefix is worth as much as a whole pool, or as one batch of requests in line before it. What
        was granted counts at once, before the engine's reports show it.
        """
        info, stats = status.info, status.stats
        grants = [grant for grant in self._grants.values() if grant.lease.engine_id == info.engine_id]
        held = max(stats.blocks_held, sum(grant.num_blocks for grant in grants))
        cached = self._affinity.cached_tokens(info.engine_id, demand.prompt, demand.cache_salt)
        return (
            cached / max(1, len(demand.prompt))
            + (1 - held / info.num_blocks)
            - self._in_line(status) / info.max_num_seqs
        )

    def _drop_expired(self) -> None:
        now_s = self._clock()
        self._grants = {key: grant for key, grant in self._grants.items() if grant.lease.expires_at_s > now_s}


def _footprints(demand: Demand, info: EngineInfo) -> list[int]:
    policy = parse_policy(demand.kv.policy)
    return [
        smallest_footprint(
            resolve_budget(policy, demand.kv.kv_budget, context_tokens=context_tokens),
            context_tokens=context_tokens,
            min_retained_mass=demand.kv.min_retained_mass,
            block_size=info.block_size,
        )
        for context_tokens in demand.context_tokens
    ]


def _can_ever_fit(demand: Demand, info: EngineInfo) -> bool:
    return max(_footprints(demand, info)) <= info.num_blocks


def _never_fits(demand: Demand, largest: EngineInfo) -> NeverFitsError:
    return NeverFitsError(
        f"prompt and answer of {max(demand.context_tokens)} tokens need {max(_footprints(demand, largest))} KV blocks "
        f"even alone and at the smallest allowed budget, but the pool has {largest.num_blocks}"
    )
