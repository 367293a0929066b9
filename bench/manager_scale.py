"""How much one cache manager carries: a thousand engines, a hundred thousand leases, hundreds of admissions a second.

    python -P bench/manager_scale.py --engines 1000 --leases 100000 --rate 500 --seconds 60

The manager is a process of its own, the real server over real gRPC. A second one is a router with a router's own
connection: it holds all leases, renews them, asks for new ones at a Poisson rate and releases the oldest for each one
that is granted. This process plays all engines, a stream each, with reports as often as the manager asks for; it runs
when a core is idle, since a real cluster has a thousand machines for that. Reported: Admit's latency, refusals, the
manager's share of a core, its memory, the bytes on the loopback interface, and how many messages engines sent. Beside
them, what gRPC alone takes: the latency of calls at the same rate which the same process, before any engine is there,
answers with what it was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection

import grpc
import grpc.aio
import psutil
import uvloop

from kvorum.cluster.manager.actor import ENGINE_GRACE_S, LEASE_S
from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.channel import ManagerAddress, open_channel
from kvorum.cluster.manager.pacing import next_turn_s
from kvorum.cluster.manager.service import ManagerServer, serve_promptly
from kvorum.cluster.manager.types import AdmitRequest, EngineFacts, LeaseChanges, LeaseRecord, TenantLimits
from kvorum.cluster.manager.wire import (
    Acknowledgement,
    Delta,
    EngineMessage,
    Snapshot,
    engine_message_to_pb,
)
from kvorum.cluster.manager_link import ManagerLink
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvorum.protos.cache.v1 import cache_pb2_grpc as pb_grpc
from kvorum.workers.governance import NUM_WORTH_BINS, EngineReport, LeaseUse, TenantUse

TOKEN = "bench"
POOL_BLOCKS = 20_000
LEASE_BLOCKS = 100
NUM_CHANNELS = 8
# What is asked for at first is not counted: the router connects, and first directives are on their way.
WARM_UP_S = 3.0
ECHO_S = 10.0
# How often engines hear what the router was granted and has released, as if clients had brought it to them.
NEWS_S = 0.05
# An event loop's timers are as late as this without anybody's doing.
TIMER_S = 0.001
TENANTS = tuple(
    TenantLimits(f"tenant-{index}", weight=1 + index % 3, floor=0.02, ceiling=0.5 if index % 2 else None)
    for index in range(16)
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured. cpu_share: of one core, by the manager. wire_bytes_per_s: both ways, with TCP's headers."""

    engines: int
    leases: int
    admissions: int
    refused: int
    admit_p50_ms: float
    admit_p99_ms: float
    echo_p50_ms: float
    echo_p99_ms: float
    cpu_share: float
    memory_mib: float
    wire_bytes_per_s: float
    engine_messages_per_s: float
    connect_s: float


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--leases", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=500.0, help="admissions a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    manager = context.Process(target=serve, args=(theirs,), daemon=True)
    manager.start()
    address, echo_target = ManagerAddress(ours.recv(), TOKEN), ours.recv()
    asking, answers = context.Pipe()
    asked = (answers, address, echo_target, first_leases(args.engines, args.leases), args.rate, args.seconds)
    router = context.Process(target=ask, args=asked, daemon=True)
    router.start()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    gc.disable()  # a pause of this process would be one of all engines at once
    try:
        asking.recv()  # that the echo is measured
        cluster = Cluster(args.engines, first_leases(args.engines, args.leases))
        report = asyncio.run(cluster.run(address, psutil.Process(manager.pid), asking))
    finally:
        router.terminate()
        manager.terminate()
    print(json.dumps(asdict(report), indent=1))


def first_leases(num_engines: int, num_leases: int) -> list[LeaseRecord]:
    """Return the leases that there are from the start."""
    return [
        LeaseRecord(
            f"first-{index}", TENANTS[index % len(TENANTS)].name, f"engine-{index % num_engines}", (LEASE_BLOCKS,)
        )
        for index in range(num_leases)
    ]


def serve(pipe: Connection) -> None:
    """Run the manager; tell where it listens."""

    async def run() -> None:
        serve_promptly()
        manager = CacheManager(TENANTS, lease_s=LEASE_S, engine_grace_s=ENGINE_GRACE_S)
        server = ManagerServer(manager, token=TOKEN)
        pipe.send(f"127.0.0.1:{await server.start('127.0.0.1')}")
        echo = grpc.aio.server()
        echo.add_generic_rpc_handlers((_echo_handler(),))
        pipe.send(f"127.0.0.1:{echo.add_insecure_port('127.0.0.1:0')}")
        await echo.start()
        await asyncio.Event().wait()

    uvloop.run(run())  # as Ray runs its actors


def _echo_handler() -> grpc.GenericRpcHandler:
    async def echo(request: bytes, context: object) -> bytes:
        return request

    return grpc.method_handlers_generic_handler("bench", {"Echo": grpc.unary_unary_rpc_method_handler(echo)})


@dataclass(slots=True)
class Asked:
    """What a router saw."""

    latencies_s: list[float] = field(default_factory=list)
    echo_latencies_s: list[float] = field(default_factory=list)
    refused: int = 0


def ask(
    pipe: Connection,
    address: ManagerAddress,
    echo_target: str,
    held: Sequence[LeaseRecord],
    rate: float,
    seconds: float,
) -> None:
    """Be a router: hold leases, and once told to ask for others at a rate, and release the oldest for each.

    Tells what is granted and released, and at the end what was seen.
    """
    serve_promptly()
    uvloop.run(Router(pipe, address, held).run(echo_target, rate, seconds))


class Router:
    """A router's connection, and what it asks for."""

    def __init__(self, pipe: Connection, address: ManagerAddress, held: Sequence[LeaseRecord]) -> None:
        self._pipe = pipe
        self._address = address
        self._link = ManagerLink(self._find, router_id="router")
        self._rng = random.Random(1)
        self._leases = collections.deque(held)  # the oldest first
        self._news: list[tuple[LeaseRecord, LeaseRecord]] = []  # granted and released
        self._asked = Asked()
        self._begun_s = math.inf

    async def run(self, echo_target: str, rate: float, seconds: float) -> None:
        """Measure the echo; wait until told to go on; ask."""
        async with grpc.aio.insecure_channel(echo_target) as channel:
            echo: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/bench/Echo")

            async def call(number: int, start_s: float) -> None:
                await echo(bytes(200))
                self._asked.echo_latencies_s.append(time.monotonic() - start_s)

            await _at_rate(self._rng, rate, ECHO_S, call)
        self._pipe.send(None)
        await asyncio.to_thread(self._pipe.recv)
        background = [asyncio.create_task(work) for work in (self._link.run(), self._tell())]
        await self._hold_all()
        self._begun_s = time.monotonic() + WARM_UP_S
        await _at_rate(self._rng, rate, WARM_UP_S + seconds, self._admit)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self._pipe.send(self._asked)

    async def _hold_all(self) -> None:
        """Tell the manager of all leases, as after its restart; from then on each has its own time to be renewed."""
        for record in self._leases:
            self._link.held.add(record)
        while not self._link.is_up:
            await asyncio.sleep(0.05)
        for index, record in enumerate(self._leases):
            age = 1 - index / len(self._leases)
            self._link.held.add(record, told_s=time.monotonic() - LEASE_S / 2 * age)

    async def _admit(self, number: int, start_s: float) -> None:
        tenant = self._rng.choice(TENANTS).name
        runs = tuple(self._rng.getrandbits(64) for _ in range(16))
        request = AdmitRequest(f"lease-{number}", tenant, (LEASE_BLOCKS,), 1600, 10.0, prefix_runs=runs)
        outcome = await self._link.admit(request)
        if start_s >= self._begun_s:
            self._asked.latencies_s.append(time.monotonic() - start_s)
            self._asked.refused += not isinstance(outcome, str)
        if isinstance(outcome, str):
            granted = LeaseRecord(request.lease_id, tenant, outcome, request.sequence_blocks)
            over = self._leases.popleft()
            self._leases.append(granted)
            self._link.release(over.lease_id, has_ended=True)
            self._news.append((granted, over))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(NEWS_S)
            news, self._news = self._news, []
            self._pipe.send(news)

    async def _find(self) -> ManagerAddress:
        return self._address


async def _at_rate(
    rng: random.Random, rate: float, seconds: float, act: Callable[[int, float], Coroutine[None, None, None]]
) -> None:
    """Begin to act at a Poisson rate, with a number and when that was due; wait for all."""
    tasks = set[asyncio.Task[None]]()
    due_s = time.monotonic()
    end_s = due_s + seconds
    for number in itertools.count(1):
        due_s += rng.expovariate(rate)
        if due_s > end_s:
            break
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        start_s = min(due_s + TIMER_S, time.monotonic())  # a later start counts
        task = asyncio.create_task(act(number, start_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


class Engine:
    """One simulated engine: which leases it has."""

    def __init__(self, name: str) -> None:
        self.facts = EngineFacts(name, 1, POOL_BLOCKS, 1000)
        self.leases: dict[str, LeaseUse] = {}
        self.writing = asyncio.Lock()  # a stream takes one message at a time
        self.report_period_s = 1.0
        self._started: list[LeaseUse] = []
        self._ended: list[str] = []

    def start(self, use: LeaseUse) -> None:
        """Take a lease's sequences."""
        self.leases[use.lease_id] = use
        self._started.append(use)

    def end(self, lease_id: str) -> None:
        """End a lease's sequences."""
        del self.leases[lease_id]
        self._ended.append(lease_id)

    def take_changes(self) -> LeaseChanges:
        """Return what came and went since the last call."""
        changes = LeaseChanges(tuple(self._started), tuple(self._ended))
        self._started, self._ended = [], []
        return changes

    def report(self) -> EngineReport:
        """Add up what the leases hold."""
        held: dict[str, int] = collections.Counter()
        for use in self.leases.values():
            held[use.tenant] += use.reserved_blocks
        tenants = {
            name: TenantUse(blocks, blocks, 0, 0, tuple(blocks // (2 + index) for index in range(NUM_WORTH_BINS)))
            for name, blocks in held.items()
        }
        free = POOL_BLOCKS - sum(held.values())
        return EngineReport(POOL_BLOCKS, free, 0, price=1 - free / POOL_BLOCKS, tenants=tenants)


class Cluster:
    """All engines."""

    def __init__(self, num_engines: int, leases: Sequence[LeaseRecord]) -> None:
        self._rng = random.Random(0)
        self._engines = {f"engine-{index}": Engine(f"engine-{index}") for index in range(num_engines)}
        for record in leases:
            self._engines[record.engine_id].leases[record.lease_id] = _use(record)
        self._num_sent = 0
        self._settled = 0

    async def run(self, address: ManagerAddress, manager: psutil.Process, router: Connection) -> Report:
        """Connect everything, then have the router ask for leases."""
        channels = [open_channel(address, None) for _ in range(NUM_CHANNELS)]
        stubs = [pb_grpc.CacheManagerServiceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
        begun_s = time.monotonic()
        tasks = [
            asyncio.create_task(self._coordinate(engine, stubs[index % NUM_CHANNELS], address))
            for index, engine in enumerate(self._engines.values())
        ]
        while self._settled < len(tasks):
            await asyncio.sleep(0.05)
        connect_s = time.monotonic() - begun_s
        await asyncio.sleep(2.0)
        self._num_sent = 0
        before, begun_s, sent_before = sum(manager.cpu_times()[:2]), time.monotonic(), _loopback_bytes()
        router.send("go")
        asked = await self._follow(router)
        elapsed_s = time.monotonic() - begun_s
        for task in tasks:
            if task.done():
                task.result()
        cpu_share = (sum(manager.cpu_times()[:2]) - before) / elapsed_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()
        admit_ms, echo_ms = (
            [1e3 * quantile for quantile in statistics.quantiles(latencies_s, n=100)]
            for latencies_s in (asked.latencies_s, asked.echo_latencies_s)
        )
        return Report(
            engines=len(self._engines),
            leases=sum(len(engine.leases) for engine in self._engines.values()),
            admissions=len(asked.latencies_s),
            refused=asked.refused,
            admit_p50_ms=admit_ms[49],
            admit_p99_ms=admit_ms[98],
            echo_p50_ms=echo_ms[49],
            echo_p99_ms=echo_ms[98],
            cpu_share=cpu_share,
            memory_mib=manager.memory_info().rss / 2**20,
            wire_bytes_per_s=(_loopback_bytes() - sent_before) / elapsed_s,
            engine_messages_per_s=self._num_sent / elapsed_s,
            connect_s=connect_s,
        )

    async def _coordinate(self, engine: Engine, stub: pb_grpc.CacheManagerServiceStub, address: ManagerAddress) -> None:
        call = stub.Coordinate(metadata=address.metadata)
        report = engine.report()
        await self._send(engine, call, Snapshot(engine.facts, report, tuple(engine.leases.values())))
        engine.take_changes()
        reading = asyncio.create_task(self._read(engine, call))
        try:
            phase = self._rng.random()
            for number in itertools.count(1):
                now_s = time.monotonic()
                await asyncio.sleep(next_turn_s(now_s, engine.report_period_s, phase) - now_s)
                before, report = report, engine.report()
                await self._send(engine, call, Delta(number, report.since(before), engine.take_changes()))
        finally:
            reading.cancel()
            call.cancel()

    async def _read(
        self, engine: Engine, call: grpc.aio.StreamStreamCall[pb.CoordinateRequest, pb.CoordinateResponse]
    ) -> None:
        acknowledged = 0
        while isinstance(message := await call.read(), pb.CoordinateResponse):
            engine.report_period_s = message.report_period_s
            if message.WhichOneof("message") == "send_snapshot":
                raise AssertionError("the manager lost count")
            if message.HasField("directive") and message.directive.number > acknowledged:
                self._settled += not acknowledged
                acknowledged = message.directive.number
                await self._send(engine, call, Acknowledgement(acknowledged))

    async def _send(
        self,
        engine: Engine,
        call: grpc.aio.StreamStreamCall[pb.CoordinateRequest, pb.CoordinateResponse],
        message: EngineMessage,
    ) -> None:
        self._num_sent += 1
        async with engine.writing:
            await call.write(engine_message_to_pb(message))

    async def _follow(self, router: Connection) -> Asked:
        """Start what the router was granted and end what it released, until it is done."""
        while True:
            news = await asyncio.to_thread(router.recv)
            if isinstance(news, Asked):
                return news
            for granted, over in news:
                self._engines[granted.engine_id].start(_use(granted))
                self._engines[over.engine_id].end(over.lease_id)


def _loopback_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent


def _use(record: LeaseRecord) -> LeaseUse:
    return LeaseUse(record.lease_id, record.tenant, sum(record.sequence_blocks))


if __name__ == "__main__":
    main()
