"""The manager over a lossy network: engines, two routers, connections that break, messages that come late or twice.

The model engines do what real ones do: they keep to the allowance of the last directive that reached them, report what
changes, and are the truth that the manager's books must come back to. Model routers renew what they hold at each beat,
and ask a manager that was just started for nothing until it has had the time to hear of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.service import LEARN_S
from kvorum.cluster.manager.types import (
    AdmitRequest,
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
from kvorum.cluster.manager_link import BEAT_S
from kvorum.workers.governance import Directive, EngineReport, LeaseUse, TenantUse

LEASE_S, GRACE_S = 10.0, 5.0
POOL = 40
ENGINES = ("a", "b", "c")
ROUTERS = ("r", "s")
TENANTS = (
    TenantLimits("floored", floor=30, max_waiting=8),
    TenantLimits("capped", weight=2.0, ceiling=35, max_waiting=8),
    TenantLimits("free", max_running=6, max_waiting=8),
)
CEILING = 35
_BIN = 3


@dataclass
class ModelEngine:
    """One engine and its connection. up: messages on their way, calls to make of the manager that is there then."""

    name: str
    epoch: int = 0
    connected: bool = False
    number: int = 0
    leases: dict[str, LeaseUse] = field(default_factory=dict)
    elastic: int = 0  # blocks that the capped tenant's elastic sequences hold beyond their reserved ones
    allowance: int = 0
    up: deque[Callable[[], object]] = field(default_factory=deque)
    down: deque[Directive] = field(default_factory=deque)
    stale: list[Callable[[], object]] = field(default_factory=list)
    last_report: EngineReport = field(default_factory=lambda: EngineReport(POOL, POOL, 0))
    started: list[LeaseUse] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    @property
    def held(self) -> int:
        return sum(use.reserved_blocks for use in self.leases.values()) + self.elastic

    def held_of(self, tenant: str) -> int:
        own = sum(use.reserved_blocks for use in self.leases.values() if use.tenant == tenant)
        return own + (self.elastic if tenant == "capped" else 0)

    def report(self) -> EngineReport:
        uses = {}
        for tenant in TENANTS:
            elastic = self.elastic if tenant.name == "capped" else 0
            held = self.held_of(tenant.name)
            worths = tuple(8 if tenant.name == "capped" and index == _BIN else 0 for index in range(40))
            uses[tenant.name] = TenantUse(held, held - elastic, elastic, 0, worths)
        return EngineReport(POOL, POOL - self.held, 0, tenants=uses)


@dataclass
class ModelRouter:
    """One router: the leases that it holds, what it asked for, and when it last renewed."""

    router_id: str
    renewed_s: float = 0.0
    records: dict[str, LeaseRecord] = field(default_factory=dict)
    told_s: dict[str, float] = field(default_factory=dict)  # by lease, when the manager last heard of it
    asked: dict[str, AdmitRequest] = field(default_factory=dict)
    waiting: list[AdmitRequest] = field(default_factory=list)  # for a manager to ask


class LossyCluster(RuleBasedStateMachine):
    """Engines and routers around a manager that may be started anew."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.engines = {name: ModelEngine(name) for name in ENGINES}
        self.routers = {name: ModelRouter(name) for name in ROUTERS}
        self.knows_s = 0.0
        self.granted_on: dict[str, str] = {}
        self.num_asked = 0
        self.manager = self.new_manager()
        for engine in self.engines.values():
            self.reconnect(engine)

    def new_manager(self) -> CacheManager:
        return CacheManager(TENANTS, lease_s=LEASE_S, engine_grace_s=GRACE_S)

    # What goes over the network.

    def settle(self) -> None:
        """Send what the manager has decided; what goes to an engine that is not connected is lost."""
        for outcome in self.manager.take_outcomes():
            for router in self.routers.values():
                if outcome.lease_id in router.asked:
                    self.take(router, router.asked[outcome.lease_id], outcome)
        for name, directive in self.manager.take_directives(self.now_s).items():
            if self.engines[name].connected:
                self.engines[name].down.append(directive)

    def take(self, router: ModelRouter, request: AdmitRequest, outcome: Outcome) -> None:
        lease_id = request.lease_id
        match outcome:
            case Waiting():
                router.asked[lease_id] = request
            case Refused():
                router.asked.pop(lease_id, None)
            case Granted(engine_id=engine_id):
                assert self.granted_on.setdefault(lease_id, engine_id) == engine_id, "one lease on two engines"
                router.asked.pop(lease_id, None)
                record = LeaseRecord(lease_id, request.tenant, engine_id, request.sequence_blocks)
                router.records[lease_id] = record
                router.told_s[lease_id] = self.now_s

    def held(self, data: st.DataObject) -> tuple[ModelRouter, LeaseRecord]:
        """Draw a lease that some router holds."""
        lease_id = data.draw(st.sampled_from(sorted(self.records)))
        return next((it, it.records[lease_id]) for it in self.routers.values() if lease_id in it.records)

    @property
    def records(self) -> dict[str, LeaseRecord]:
        return {key: record for router in self.routers.values() for key, record in router.records.items()}

    @property
    def may_ask(self) -> bool:
        return self.now_s >= self.knows_s

    def reconnect(self, engine: ModelEngine) -> None:
        """Break a connection and begin a new one with a snapshot; what was on its way may still arrive, late."""
        self.disconnect(engine)
        engine.epoch += 1
        engine.number, engine.connected = 0, True
        engine.started, engine.ended = [], []
        facts = EngineFacts(engine.name, engine.epoch, POOL, 100)
        report, leases = engine.report(), tuple(engine.leases.values())
        engine.last_report = report
        engine.up.append(lambda: self.manager.connect(facts, report, leases, self.now_s))

    def disconnect(self, engine: ModelEngine) -> None:
        if engine.connected:
            engine.stale += engine.up
            engine.up.clear()
            engine.down.clear()
            engine.connected = False
            self.manager.disconnect(engine.name, engine.epoch, self.now_s)
            self.settle()

    def send_delta(self, engine: ModelEngine) -> None:
        engine.number += 1
        report = engine.report()
        epoch, number, news = engine.epoch, engine.number, report.since(engine.last_report)
        engine.last_report = report
        changes = LeaseChanges(tuple(engine.started), tuple(engine.ended))
        engine.started, engine.ended = [], []

        def deliver() -> None:
            known = self.manager.take_report(engine.name, epoch, number, news, changes, self.now_s)
            if not known and engine.connected and engine.epoch == epoch:
                self.reconnect(engine)  # a snapshot was asked for

        engine.up.append(deliver)

    def pump(self, engine: ModelEngine) -> None:
        """Deliver all that is on its way between an engine and the manager."""
        while engine.connected and (engine.up or engine.down):
            if engine.down:
                self.obey(engine)
            else:
                engine.up.popleft()()
                self.settle()

    def obey(self, engine: ModelEngine) -> None:
        directive = engine.down.popleft()
        engine.allowance = directive.allowances.get("capped", 0)
        engine.elastic = min(engine.elastic, engine.allowance)
        self.send_delta(engine)
        epoch = engine.epoch
        engine.up.append(lambda: self.manager.acknowledge(engine.name, epoch, directive.number))

    # What happens.

    @precondition(lambda self: self.may_ask)
    @rule(
        name=st.sampled_from(ROUTERS),
        tenant=st.sampled_from([tenant.name for tenant in TENANTS]),
        blocks=st.integers(1, 20),
        wait=st.booleans(),
    )
    def ask(self, name: str, tenant: str, blocks: int, wait: bool) -> None:
        self.num_asked += 1
        lease_id, wait_s = f"lease-{self.num_asked}", 30.0 if wait else 0.0
        request = AdmitRequest(lease_id, tenant, (blocks,), 16 * blocks, wait_s, router_id=name)
        self.take(self.routers[name], request, self.manager.admit(request, self.now_s))
        self.settle()

    @precondition(lambda self: self.may_ask and any(it.records or it.asked for it in self.routers.values()))
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        router = data.draw(st.sampled_from([it for it in self.routers.values() if it.records or it.asked]))
        lease_id = data.draw(st.sampled_from(sorted([*router.records, *router.asked])))
        record = router.records.get(lease_id)
        request = router.asked.get(lease_id)
        if record:
            request = AdmitRequest(
                lease_id, record.tenant, record.sequence_blocks, 16, 30.0, router_id=router.router_id
            )
        assert request
        self.take(router, request, self.manager.admit(request, self.now_s))
        self.settle()

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """A granted request's sequences reach their engine, with room that was promised."""
        _, record = self.held(data)
        engine = self.engines[record.engine_id]
        if record.lease_id in engine.leases:
            return
        blocks = sum(record.sequence_blocks)
        engine.elastic = max(0, min(engine.elastic, POOL - engine.held + engine.elastic - blocks))
        use = LeaseUse(record.lease_id, record.tenant, blocks)
        engine.leases[record.lease_id] = use
        engine.started.append(use)
        assert engine.held <= POOL, "more was promised than there is"

    @precondition(lambda self: self.records)
    @rule(data=st.data(), release_is_lost=st.booleans(), has_ended=st.booleans())
    def finish(self, data: st.DataObject, release_is_lost: bool, has_ended: bool) -> None:
        router, record = self.held(data)
        del router.records[record.lease_id]
        engine = self.engines[record.engine_id]
        if engine.leases.pop(record.lease_id, None):
            engine.ended.append(record.lease_id)
        if not release_is_lost:
            self.manager.release(record.lease_id, self.now_s, has_ended=has_ended)
            self.settle()

    @rule(name=st.sampled_from(ENGINES), blocks=st.integers(0, 40))
    def grow(self, name: str, blocks: int) -> None:
        """Elastic sequences take what they may."""
        engine = self.engines[name]
        engine.elastic = min(blocks, engine.allowance, POOL - engine.held + engine.elastic)

    @rule(name=st.sampled_from(ENGINES))
    def report(self, name: str) -> None:
        if self.engines[name].connected:
            self.send_delta(self.engines[name])

    @rule(name=st.sampled_from(ENGINES), twice=st.booleans())
    def deliver(self, name: str, twice: bool) -> None:
        engine = self.engines[name]
        if engine.up:
            message = engine.up.popleft()
            for _ in range(1 + twice):
                message()
                self.settle()

    @rule(name=st.sampled_from(ENGINES))
    def deliver_down(self, name: str) -> None:
        if self.engines[name].down:
            self.obey(self.engines[name])

    @rule(name=st.sampled_from(ENGINES), data=st.data())
    def deliver_late(self, name: str, data: st.DataObject) -> None:
        """A message of a connection that is gone arrives all the same."""
        engine = self.engines[name]
        if engine.stale:
            engine.stale.pop(data.draw(st.integers(0, len(engine.stale) - 1)))()
            self.settle()

    @rule(name=st.sampled_from(ENGINES))
    def break_connection(self, name: str) -> None:
        self.disconnect(self.engines[name])

    @rule(name=st.sampled_from(ENGINES))
    def connect_again(self, name: str) -> None:
        self.reconnect(self.engines[name])

    @rule(name=st.sampled_from(ENGINES))
    def lose_engine(self, name: str) -> None:
        """An engine is started anew: its sequences are gone, and the routers give their leases back."""
        engine = self.engines[name]
        engine.leases, engine.elastic, engine.allowance = {}, 0, 0
        for router in self.routers.values():
            for lease_id in [key for key, record in router.records.items() if record.engine_id == name]:
                del router.records[lease_id]
                self.manager.release(lease_id, self.now_s)
        self.settle()
        self.reconnect(engine)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        """Time goes by; routers renew what they hold when their beats are due."""
        self.now_s += seconds
        for router in self.routers.values():
            if self.now_s - router.renewed_s >= BEAT_S:
                self.renew(router)
        self.manager.tick(self.now_s)
        self.settle()
        self.ask_what_was_left()

    def renew(self, router: ModelRouter) -> None:
        router.renewed_s = self.now_s
        for _ in range(2):
            until_s = self.now_s - LEASE_S / 2
            due = [record for name, record in router.records.items() if router.told_s.get(name, -1e9) <= until_s]
            is_new = self.manager.renew(router.router_id, due, self.now_s)
            router.told_s = {} if is_new else router.told_s
            router.told_s |= {record.lease_id: self.now_s for record in due}
        self.settle()

    @rule(first=st.sampled_from(ROUTERS))
    def restart_manager(self, first: str) -> None:
        """The manager forgets everything; one router finds it at once, the other with its next beat."""
        for engine in self.engines.values():
            self.disconnect(engine)
            engine.stale.clear()  # a new manager has a port of its own
        self.manager = self.new_manager()
        self.knows_s = self.now_s + LEARN_S
        for router in self.routers.values():
            router.waiting, router.asked = [*router.waiting, *router.asked.values()], {}
        self.renew(self.routers[first])

    def ask_what_was_left(self) -> None:
        """Ask anew for what waited when a manager was lost, once that can be."""
        for router in self.routers.values():
            waiting, router.waiting = (router.waiting, []) if self.may_ask else ([], router.waiting)
            for request in waiting:
                self.take(router, request, self.manager.admit(request, self.now_s))
                self.settle()

    # What always holds.

    @invariant()
    def no_ceiling_is_exceeded(self) -> None:
        assert sum(engine.held_of("capped") for engine in self.engines.values()) <= CEILING

    @invariant()
    def the_books_are_right(self) -> None:
        self.manager.audit()

    def teardown(self) -> None:
        """Everything comes back and ends: each request in line is served, and nothing is left in the books."""
        for engine in self.engines.values():
            self.reconnect(engine)
        for _ in range(100):
            for engine in self.engines.values():
                self.pump(engine)
            self.wait(BEAT_S)
            for router in self.routers.values():
                for lease_id in sorted(router.records):
                    record = router.records.pop(lease_id)
                    engine = self.engines[record.engine_id]
                    if engine.leases.pop(lease_id, None):
                        engine.ended.append(lease_id)
                        self.send_delta(engine)
                    self.manager.release(lease_id, self.now_s)
                    self.settle()
        assert not any(router.asked or router.waiting for router in self.routers.values()), "a request starved"
        self.now_s += LEASE_S + GRACE_S
        for engine in self.engines.values():
            engine.elastic = 0
            self.send_delta(engine)
            self.pump(engine)
        self.manager.tick(self.now_s)
        self.settle()
        view = self.manager.view()
        assert [engine.total_blocks for engine in view.engines] == [POOL] * len(ENGINES)
        assert not any(engine.reserved_blocks or engine.held_blocks for engine in view.engines)
        assert view.drift_blocks == 0
        self.the_floor_is_reachable()

    def the_floor_is_reachable(self) -> None:
        """Others may take what they can get: a tenant still gets what it is sure of, at once."""
        for index in range(60):
            request = AdmitRequest(f"greedy-{self.num_asked}-{index}", "free", (2,), 32, 0.0)
            self.manager.admit(request, self.now_s)
            self.manager.take_outcomes()
        for index in range(10):
            request = AdmitRequest(f"sure-{self.num_asked}-{index}", "floored", (3,), 48, 0.0)
            assert isinstance(self.manager.admit(request, self.now_s), Granted)


LossyCluster.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
TestLossyCluster = LossyCluster.TestCase


def test_refusals_are_named_after_what_is_in_the_way() -> None:
    manager = CacheManager(
        (TenantLimits("t", ceiling=10, max_waiting=0), TenantLimits("u", max_waiting=0)),
        lease_s=LEASE_S,
        engine_grace_s=GRACE_S,
    )

    def ask(name: str, tenant: str, blocks: int) -> Outcome:
        return manager.admit(AdmitRequest(name, tenant, (blocks,), 16 * blocks, 1.0), 0.0)

    def reason(outcome: Outcome) -> Refusal:
        assert isinstance(outcome, Refused)
        return outcome.reason

    manager.connect(EngineFacts("a", 1, 40, 2), EngineReport(40, 40, 0), (), 0.0)
    assert reason(ask("1", "nobody", 1)) is Refusal.UNKNOWN_TENANT
    assert reason(ask("2", "t", 11)) is Refusal.NEVER_FITS
    assert reason(ask("3", "u", 41)) is Refusal.NEVER_FITS
    assert isinstance(ask("4", "u", 30), Granted)
    assert reason(ask("5", "u", 20)) is Refusal.CAPACITY
    assert isinstance(ask("6", "u", 1), Granted)
    assert reason(ask("7", "u", 1)) is Refusal.CAPACITY  # no sequence more
