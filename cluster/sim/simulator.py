"""Replays a trace over modelled engines under one way of sharing their memory. Pure: the same trace, the same result.

Modes:
    managed  the real CacheManager admits and waits; elastic sequences are shrunk by a rule when blocks are short.
    preempt  the emptiest engine gets each request; when blocks are short whoever came last is dropped and recomputed.
    static   as preempt, but elastic sequences are held to a share of their context from their prompt's end on.
    reject   each request reserves its whole context; what does not fit anywhere at once is refused.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvorum.cluster.bench_trace import TraceEntry
from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.types import (
    AdmitRequest,
    EngineFacts,
    Granted,
    LeaseChanges,
    Outcome,
    Refused,
    TenantLimits,
)
from kvorum.cluster.sim.engine_model import BLOCK_SIZE, EngineSpec, SimEngine, SimSequence
from kvorum.kvstore.pricing import DEFAULT_RULE
from kvorum.kvstore.types import blocks_for
from kvorum.workers.governance import EngineReport, LeaseUse, TenantUse

STATIC_SHARE = 0.25
_TICK_S = 0.5
_LEASE_S = 1e9  # nobody is lost here
_MAX_WAITING = 1_000_000


class Mode(StrEnum):
    """See the module."""

    MANAGED = "managed"
    PREEMPT = "preempt"
    STATIC = "static"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class SimTenant:
    """A tenant of the simulation. share: of the requests. least_tokens: its requests are elastic, down to so many."""

    limits: TenantLimits
    share: float
    least_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """What a trace is replayed on. max_wait_s: how long a request may stand in line."""

    num_engines: int
    spec: EngineSpec
    tenants: tuple[SimTenant, ...]
    max_wait_s: float = 600.0
    seed: int = 0


@dataclass(slots=True)
class Outcomes:
    """Every request as it ended, and the engines."""

    mode: Mode
    sequences: list[SimSequence]
    engines: list[SimEngine]
    duration_s: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)


def simulate(entries: Sequence[TraceEntry], setup: Setup, mode: Mode) -> Outcomes:
    """Replay a trace until the last request has ended."""
    return _Simulation(entries, setup, mode).run()


def make_sequences(entries: Sequence[TraceEntry], setup: Setup) -> list[SimSequence]:
    """Give each request of a trace a tenant, by the tenants' shares."""
    rng = random.Random(setup.seed)
    shares = [tenant.share for tenant in setup.tenants]
    sequences = []
    for index, entry in enumerate(entries):
        (tenant,) = rng.choices(setup.tenants, shares)
        least = None if tenant.least_tokens is None else blocks_for(tenant.least_tokens + 1, BLOCK_SIZE)
        sequences.append(
            SimSequence(
                name=f"request-{index}",
                tenant=tenant.limits.name,
                arrived_s=entry.at_s,
                prompt_tokens=entry.prompt_tokens,
                answer_tokens=entry.output_tokens,
                block_ids=entry.block_ids,
                least=least,
            )
        )
    return sequences


class _Simulation:
    def __init__(self, entries: Sequence[TraceEntry], setup: Setup, mode: Mode) -> None:
        self._setup = setup
        self._mode = mode
        self._sequences = make_sequences(entries, setup)
        self._engines = {
            f"engine-{index}": SimEngine(
                f"engine-{index}",
                setup.spec,
                rule=DEFAULT_RULE if mode is Mode.MANAGED else None,
                budget_share=STATIC_SHARE if mode is Mode.STATIC else None,
            )
            for index in range(setup.num_engines)
        }
        self._wakes: list[tuple[float, str]] = []
        self._awaited: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        self._reserved = dict.fromkeys(self._engines, 0)
        self._managed = _Managed(self._engines, setup) if mode is Mode.MANAGED else None

    def run(self) -> Outcomes:
        arrivals = iter(self._sequences)
        arrival = next(arrivals, None)
        now_s, next_tick_s = 0.0, 0.0
        while arrival or self._wakes or (self._managed and self._managed.waiting):
            next_s = min(
                arrival.arrived_s if arrival else float("inf"),
                self._wakes[0][0] if self._wakes else float("inf"),
                next_tick_s if self._managed and self._managed.waiting else float("inf"),
            )
            now_s = max(now_s, next_s)
            if self._managed and now_s >= next_tick_s:
                next_tick_s = now_s + _TICK_S
                self._managed.tick(now_s)
                self._settle(now_s)
            if arrival and arrival.arrived_s <= now_s:
                self._arrive(arrival, now_s)
                arrival = next(arrivals, None)
            elif self._wakes and self._wakes[0][0] <= now_s:
                self._wake(heapq.heappop(self._wakes), now_s)
        return Outcomes(self._mode, self._sequences, [*self._engines.values()], now_s, self._refusals)

    def _arrive(self, sequence: SimSequence, now_s: float) -> None:
        if blocks_for(sequence.context_tokens + 1, BLOCK_SIZE) > self._setup.spec.num_blocks:
            self._refuse(sequence, "never_fits")
        elif self._managed:
            self._managed.ask(sequence, now_s)
            self._settle(now_s)
        elif self._mode is Mode.REJECT:
            needed = blocks_for(sequence.context_tokens + 1, BLOCK_SIZE)
            name = min(self._reserved, key=self._reserved.__getitem__)
            if self._reserved[name] + needed > self._setup.spec.num_blocks:
                self._refuse(sequence, "capacity")
            else:
                self._reserved[name] += needed
                self._submit(name, sequence, now_s)
        else:
            name = min(self._engines, key=lambda each: (self._load(self._engines[each]), each))
            self._submit(name, sequence, now_s)

    @staticmethod
    def _load(engine: SimEngine) -> float:
        queued = sum(sequence.prompt_tokens for sequence in engine.waiting) / BLOCK_SIZE
        return engine.held_blocks + queued

    def _refuse(self, sequence: SimSequence, reason: str) -> None:
        sequence.is_refused = True
        self._refusals[reason] = self._refusals.get(reason, 0) + 1

    def _settle(self, now_s: float) -> None:
        """Carry out what the manager has decided."""
        assert self._managed
        for sequence, outcome in self._managed.take():
            if isinstance(outcome, Refused):
                self._refuse(sequence, outcome.reason.value)
            elif isinstance(outcome, Granted):
                self._submit(outcome.engine_id, sequence, now_s)

    def _submit(self, name: str, sequence: SimSequence, now_s: float) -> None:
        engine = self._engines[name]
        self._advance(engine, now_s)
        engine.submit(sequence)
        if self._managed:
            self._managed.report(engine, now_s, started=sequence)
        self._plan_wake(engine)

    def _wake(self, wake: tuple[float, str], now_s: float) -> None:
        at_s, name = wake
        if self._awaited.get(name) == at_s:
            self._advance(self._engines[name], now_s)
            self._plan_wake(self._engines[name])

    def _advance(self, engine: SimEngine, now_s: float) -> None:
        """Move an engine to a time, over all that happens to it until then."""
        done: list[SimSequence] = []
        has_changed = False
        while (next_s := engine.next_event_s()) <= now_s:
            done += engine.advance(next_s)
            has_changed = True
        done += engine.advance(now_s)
        for sequence in done:
            self._reserved[engine.name] -= blocks_for(sequence.context_tokens + 1, BLOCK_SIZE)
        if has_changed and self._managed:
            self._managed.report(engine, now_s, done=done)
            self._settle(now_s)

    def _plan_wake(self, engine: SimEngine) -> None:
        at_s = engine.next_event_s()
        if at_s != float("inf"):
            self._awaited[engine.name] = at_s
            heapq.heappush(self._wakes, (at_s, engine.name))


class _Managed:
    """The real manager, and what routers and engines say to it."""

    def __init__(self, engines: dict[str, SimEngine], setup: Setup) -> None:
        self._setup = setup
        self._manager = CacheManager(
            [tenant.limits for tenant in setup.tenants], lease_s=_LEASE_S, engine_grace_s=_LEASE_S
        )
        self._numbers = dict.fromkeys(engines, 0)
        self.waiting: dict[str, SimSequence] = {}
        self._outcomes: list[tuple[SimSequence, Outcome]] = []
        blocks = setup.spec.num_blocks
        for name in engines:
            facts = EngineFacts(name, 1, blocks, setup.spec.max_sequences)
            self._manager.connect(facts, EngineReport(blocks, blocks, 0), (), 0.0)

    def ask(self, sequence: SimSequence, now_s: float) -> None:
        request = AdmitRequest(
            sequence.name,
            sequence.tenant,
            (self._reserved_blocks(sequence),),
            sequence.context_tokens,
            self._setup.max_wait_s,
            prefix_runs=sequence.block_ids,
        )
        self.waiting[sequence.name] = sequence
        outcome = self._manager.admit(request, now_s)
        self._note(sequence.name, outcome)
        self._sweep(now_s)

    def report(
        self,
        engine: SimEngine,
        now_s: float,
        *,
        started: SimSequence | None = None,
        done: Sequence[SimSequence] = (),
    ) -> None:
        """Report what has come and ended on an engine, and what is held there; the routers release the leases."""
        self._numbers[engine.name] += 1
        blocks = self._setup.spec.num_blocks
        held = min(blocks, int(engine.held_blocks))
        # Whose they are does not matter to a manager that is asked for no ceilings.
        use = {self._setup.tenants[0].limits.name: TenantUse(held=held)}
        unread = int(engine.unread_tokens)
        report = EngineReport(blocks, blocks - held, 0, tenants=use, unread_tokens=unread)
        uses = (LeaseUse(started.name, started.tenant, self._reserved_blocks(started)),) if started else ()
        changes = LeaseChanges(uses, tuple(sequence.name for sequence in done))
        self._manager.take_report(engine.name, 1, self._numbers[engine.name], report, changes, now_s)
        for sequence in done:
            self._manager.release(sequence.name, now_s)
        self._sweep(now_s)

    @staticmethod
    def _reserved_blocks(sequence: SimSequence) -> int:
        whole = blocks_for(sequence.context_tokens + 1, BLOCK_SIZE)
        return whole if sequence.least is None else min(whole, sequence.least + 1)

    def tick(self, now_s: float) -> None:
        self._manager.tick(now_s)
        self._sweep(now_s)

    def take(self) -> list[tuple[SimSequence, Outcome]]:
        taken, self._outcomes = self._outcomes, []
        return taken

    def _sweep(self, now_s: float) -> None:
        for outcome in self._manager.take_outcomes():
            self._note(outcome.lease_id, outcome)
        for name, directive in self._manager.take_directives(now_s).items():
            self._manager.acknowledge(name, 1, directive.number)

    def _note(self, lease_id: str, outcome: Outcome) -> None:
        if isinstance(outcome, Granted | Refused) and lease_id in self.waiting:
            self._outcomes.append((self.waiting.pop(lease_id), outcome))


def default_tenants(least_tokens: int) -> tuple[SimTenant, ...]:
    """Return two tenants of equal traffic: one whose requests are never shrunk, one whose are elastic."""
    return (
        SimTenant(TenantLimits("interactive", weight=2.0, max_waiting=_MAX_WAITING), 0.5),
        SimTenant(TenantLimits("batch", max_waiting=_MAX_WAITING), 0.5, least_tokens),
    )
