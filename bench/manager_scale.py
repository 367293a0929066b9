"""How much one cache manager carries: a thousand engines, a hundred thousand leases, hundreds of admissions a second.

    python -P bench/manager_scale.py --engines 1000 --leases 100000 --rate 500 --seconds 30

The manager is a process of its own, the real server over real gRPC. A second one is a router, which asks for leases at
a Poisson rate, so that what it measures is not its own waiting for others' work. This process plays all engines, a
stream each, with reports as often as the manager asks for; it steps back where cores are short, since a real cluster
has a thousand machines for that. For each lease that is granted the oldest one ends. Reported: Admit's latency,
refusals, the manager's share of a core, its memory, and the bytes of messages both ways (without HTTP/2's framing).
Beside them, what gRPC alone takes: the latency of calls at the same rate which the same process, before any engine is
there, answers with what it was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import gc
import itertools
import json
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection

import grpc
import grpc.aio
import psutil
import uvloop

from kvorum.cluster.manager.cache_manager import CacheManager
from kvorum.cluster.manager.channel import ManagerAddress, open_channel
from kvorum.cluster.manager.pacing import next_turn_s
from kvorum.cluster.manager.service import ManagerServer, serve_promptly
from kvorum.cluster.manager.types import AdmitRequest, EngineFacts, LeaseChanges, TenantLimits
from kvorum.cluster.manager.wire import (
    Acknowledgement,
    Delta,
    EngineMessage,
    Snapshot,
    admit_request_to_pb,
    engine_message_to_pb,
    outcome_from_pb,
)
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
# An event loop's timers are as late as this without anybody's doing.
TIMER_S = 0.001
TENANTS = tuple(
    TenantLimits(f"tenant-{index}", weight=1 + index % 3, floor=0.02, ceiling=0.5 if index % 2 else None)
    for index in range(16)
)


@dataclass(frozen=True, slots=True)
class Report:
    """What was measured. cpu_share: of one core, by the manager. Bytes: of messages, a second."""

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
    up_bytes_per_s: float
    down_bytes_per_s: float
    connect_s: float


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--leases", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=500.0, help="admissions a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    manager = context.Process(target=serve, args=(theirs,), daemon=True)
    manager.start()
    address, echo_target = ManagerAddress(ours.recv(), TOKEN), ours.recv()
    asking, answers = context.Pipe()
    router = context.Process(target=ask, args=(answers, address, echo_target, args.rate, args.seconds), daemon=True)
    router.start()
    os.nice(3)
    gc.disable()  # a pause of this process would be one of all engines at once
    try:
        asking.recv()  # that the echo is measured
        cluster = Cluster(args.engines, args.leases)
        report = asyncio.run(cluster.run(address, psutil.Process(manager.pid), asking))
    finally:
        router.terminate()
        manager.terminate()
    print(json.dumps(asdict(report), indent=1))


def serve(pipe: Connection) -> None:
    """Run the manager; tell where it listens."""

    async def run() -> None:
        serve_promptly()
        manager = CacheManager(TENANTS, lease_s=30.0, engine_grace_s=10.0)
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
    """What a router saw. Bytes: of messages."""

    latencies_s: list[float] = field(default_factory=list)
    echo_latencies_s: list[float] = field(default_factory=list)
    refused: int = 0
    up_bytes: int = 0
    down_bytes: int = 0


def ask(pipe: Connection, address: ManagerAddress, echo_target: str, rate: float, seconds: float) -> None:
    """Be a router: once told to, ask for leases at a rate; tell what is granted, and at the end what was seen."""
    serve_promptly()
    uvloop.run(_ask(pipe, address, echo_target, rate, seconds))


async def _ask(pipe: Connection, address: ManagerAddress, echo_target: str, rate: float, seconds: float) -> None:
    rng, asked = random.Random(1), Asked()
    async with grpc.aio.insecure_channel(echo_target) as channel:
        echo: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/bench/Echo")

        async def call(number: int, start_s: float) -> None:
            await echo(bytes(200))
            asked.echo_latencies_s.append(time.monotonic() - start_s)

        await _at_rate(rng, rate, ECHO_S, call)
    pipe.send(None)
    async with open_channel(address, None) as channel:
        stub = pb_grpc.CacheManagerServiceStub(channel)  # type: ignore[no-untyped-call]

        async def admit(number: int, start_s: float) -> None:
            tenant = rng.choice(TENANTS).name
            runs = tuple(rng.getrandbits(64) for _ in range(16))
            lease_id = f"lease-{number}"
            request = AdmitRequest(lease_id, tenant, (LEASE_BLOCKS,), 1600, 10.0, prefix_runs=runs)
            message = admit_request_to_pb(request)
            answer = await stub.Admit(message, metadata=address.metadata)
            if start_s >= begun_s:
                asked.latencies_s.append(time.monotonic() - start_s)
            asked.up_bytes += message.ByteSize()
            asked.down_bytes += answer.ByteSize()
            outcome = outcome_from_pb(lease_id, answer)
            if isinstance(outcome, str):
                pipe.send((outcome, LeaseUse(lease_id, tenant, LEASE_BLOCKS)))
            elif start_s >= begun_s:
                asked.refused += 1

        await asyncio.to_thread(pipe.recv)
        begun_s = time.monotonic() + WARM_UP_S
        await _at_rate(rng, rate, WARM_UP_S + seconds, admit)
    pipe.send(asked)


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
    """All engines and one router."""

    def __init__(self, num_engines: int, num_leases: int) -> None:
        self._rng = random.Random(0)
        self._engines = {f"engine-{index}": Engine(f"engine-{index}") for index in range(num_engines)}
        self._oldest: collections.deque[tuple[str, str]] = collections.deque()
        names = list(self._engines)
        for index in range(num_leases):
            name = names[index % num_engines]
            use = LeaseUse(f"first-{index}", TENANTS[index % len(TENANTS)].name, LEASE_BLOCKS)
            self._engines[name].leases[use.lease_id] = use
            self._oldest.append((name, use.lease_id))
        self._up = self._down = 0
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
        self._up = self._down = 0
        before, begun_s = sum(manager.cpu_times()[:2]), time.monotonic()
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
            up_bytes_per_s=(self._up + asked.up_bytes) / elapsed_s,
            down_bytes_per_s=(self._down + asked.down_bytes) / elapsed_s,
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
            self._down += message.ByteSize()
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
        packed = engine_message_to_pb(message)
        self._up += packed.ByteSize()
        async with engine.writing:
            await call.write(packed)

    async def _follow(self, router: Connection) -> Asked:
        """Start what the router was granted, and end the oldest for each, until the router is done."""
        while True:
            news = await asyncio.to_thread(router.recv)
            if isinstance(news, Asked):
                return news
            engine_id, use = news
            self._engines[engine_id].start(use)
            self._oldest.append((engine_id, use.lease_id))
            oldest_engine, oldest = self._oldest.popleft()
            self._engines[oldest_engine].end(oldest)


if __name__ == "__main__":
    main()
