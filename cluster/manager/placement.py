"""On which engine a request runs: where most of its prompt is cached, least waits and most room is left. Pure.

Looked at are the engines that have probably cached the prompt's beginning and a few of the roomiest, so that the choice
costs the same among ten engines and a thousand; an engine that fits is found whenever there is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from kvorum.cluster.manager.allowances import Allowances
from kvorum.cluster.manager.ledger import Engine, Ledger
from kvorum.cluster.manager.types import AdmitRequest
from kvorum.cluster.prefix_affinity import PrefixAffinity

_NUM_ROOMIEST = 8
# How much a prompt's whole prefix, or a whole free pool, must be worth more on the dearest of the engines looked at.
_PRICE_SHARE = 0.5
# Prompt tokens in front of a request that hardly matter: what a step or so computes.
_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for a request besides its size. is_limited: its tenant has a ceiling. is_certain: take no risk.

    is_certain is for the time after a manager's start in which leases may be unknown to it: only blocks that nobody
    holds or was promised will do.
    """

    is_limited: bool
    is_certain: bool


class Placement:
    """Chooses among a ledger's engines."""

    def __init__(self, ledger: Ledger, allowances: Allowances) -> None:
        self._ledger = ledger
        self._allowances = allowances
        self._affinity = PrefixAffinity()
        # Tokens of requests that were sent to an engine and have not arrived there yet, by engine and lease.
        self._on_their_way: defaultdict[str, dict[str, int]] = defaultdict(dict)

    def choose(self, request: AdmitRequest, terms: Terms) -> Engine | None:
        """Return the best engine that can take a request now."""
        cached = self._affinity.cached_runs(request.prefix_runs)
        candidates = {engine.engine_id: engine for engine in self._fitting(request, terms, cached)}
        return self._best(request, candidates.values(), cached)

    def choose_among(self, request: AdmitRequest, terms: Terms, engine_ids: Collection[str]) -> Engine | None:
        """Return the best of these engines that can take a request now."""
        known = [self._ledger.engines[engine_id] for engine_id in engine_ids if engine_id in self._ledger.engines]
        fitting = [engine for engine in known if self._fits(engine, request, terms)]
        return self._best(request, fitting, self._affinity.cached_runs(request.prefix_runs))

    def note(self, engine_id: str, request: AdmitRequest) -> None:
        """Remember that a request went to an engine."""
        self._affinity.note(engine_id, request.prefix_runs)
        self._on_their_way[engine_id][request.lease_id] = request.tokens

    def forget(self, engine_id: str, lease_id: str) -> None:
        """A request has arrived at its engine, which counts it from now on, or never will."""
        self._on_their_way.get(engine_id, {}).pop(lease_id, None)

    def forget_engine(self, engine_id: str) -> None:
        """An engine is gone, and what was sent there with it."""
        self._on_their_way.pop(engine_id, None)

    def hold(self, request: AdmitRequest) -> Engine | None:
        """Keep an engine, the one on which a request lacks least, for a request that has waited long.

        Until it is given back only that tenant's requests, and others' as far as their floors on it go, are placed
        there, so that it drains.
        """
        suited = (
            engine
            for engine in self._ledger.engines.values()
            if engine.is_connected
            and engine.held_for is None
            and engine.most_room(request.tenant) >= request.blocks
            and engine.max_sequences >= len(request.sequence_blocks)
        )
        best = max(suited, key=lambda engine: (engine.room(request.tenant), engine.engine_id), default=None)
        if best:
            best.held_for = request.tenant
        return best

    def _fitting(self, request: AdmitRequest, terms: Terms, cached: Mapping[str, int]) -> Iterator[Engine]:
        for engine_id in cached:
            engine = self._ledger.engines.get(engine_id)
            if engine and self._fits(engine, request, terms):
                yield engine
        roomiest = self._ledger.roomiest(request.tenant, request.blocks)
        yield from islice((e for e in roomiest if self._fits(e, request, terms)), _NUM_ROOMIEST)

    def _fits(self, engine: Engine, request: AdmitRequest, terms: Terms) -> bool:
        tenant, blocks = request.tenant, request.blocks
        return (
            engine.is_connected
            and blocks <= engine.room(tenant)
            and engine.num_sequences + len(request.sequence_blocks) <= engine.max_sequences
            and (engine.held_for in (None, tenant) or blocks <= engine.floor_room(tenant))
            and (not terms.is_limited or self._allowances.names(engine.engine_id, tenant))
            and (not terms.is_certain or blocks <= engine.unheld_blocks)
        )

    def _best(self, request: AdmitRequest, engines: Collection[Engine], cached: Mapping[str, int]) -> Engine | None:
        num_runs = max(1, len(request.prefix_runs))
        ahead = {
            engine.engine_id: engine.report.unread_tokens + sum(self._on_their_way.get(engine.engine_id, {}).values())
            for engine in engines
        }
        longest = max(ahead.values(), default=0) + request.tokens + _STEP_TOKENS
        dearest = max((engine.report.price for engine in engines), default=0.0)

        def score(engine: Engine) -> float:
            """Add the share of the prompt that is cached and the share of blocks left, less queues and price."""
            return (
                cached.get(engine.engine_id, 0) / num_runs
                + (1 - (engine.reserved_blocks + request.blocks) / engine.total_blocks)
                - ahead[engine.engine_id] / longest
                - engine.num_sequences / engine.max_sequences
                - (_PRICE_SHARE * engine.report.price / dearest if dearest else 0.0)
            )

        return max(engines, key=score, default=None)
