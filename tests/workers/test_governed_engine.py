"""An engine's loop under a cache manager: directives, reports, leases and what receipts say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest

from kvorum.kvstore.types import SeqId
from kvorum.workers.communicator import Alone
from kvorum.workers.engine import Engine
from kvorum.workers.fake_engine import build_fake_engine
from kvorum.workers.governance import Directive, LeaseTerms
from kvorum.workers.plan import CurveQuery, MassQuery, RowPlan
from kvorum.workers.request import EngineInfo, EngineRequest, FinishReason, KVParams, RequestOutput
from kvorum.workers.worker import Worker
from kvtest.engines import collect, request, rig
from kvtest.models import random_weights, reference_backend, tiny_spec

T = TypeVar("T")

INFO = EngineInfo(
    engine_id="fake",
    model_name="fake",
    max_model_len=400,
    vocab_size=1000,
    num_blocks=60,
    block_size=4,
    max_num_seqs=8,
    max_num_waiting=50,
)


@asynccontextmanager
async def running() -> AsyncIterator[Engine]:
    engine = build_fake_engine(INFO, max_num_batched_tokens=256)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def in_loop(test: Callable[[], Coroutine[None, None, T]]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(20.0):
            return await test()

    return asyncio.run(limited())


def elastic(name: str, prompt_tokens: int, *, max_tokens: int, floor: float = 0.0) -> EngineRequest:
    kv = KVParams("sliding", None, floor)
    item = request(name, range(prompt_tokens), max_tokens=max_tokens, kv=kv)
    return replace(item, terms=LeaseTerms(f"lease-{name}", "red", reserved_blocks=5, least_tokens=16))


class TestDirectives:
    def test_an_idle_engine_carries_them_out_too(self) -> None:
        async def test() -> int:
            async with running() as engine:
                await asyncio.sleep(0)
                engine.obey(Directive(7, {"red": 1}, reclaim_blocks=5))
                while engine.directive_done != 7:
                    await asyncio.sleep(0)
                return engine.stats().steps_total

        assert in_loop(test) == 0

    def test_a_running_one_does_before_its_next_step(self) -> None:
        async def test() -> RequestOutput:
            async with running() as engine:
                session = engine.open_session()
                session.submit(elastic("a", 100, max_tokens=50))
                await session.outputs()
                engine.obey(Directive(1, {"red": 3}))
                while engine.directive_done != 1:
                    await session.outputs()
                assert engine.report().tenants["red"].elastic == 3
                while not (last := (await session.outputs())[-1]).finish_reason:
                    pass
                return last

        output = in_loop(test)
        assert output.finish_reason is FinishReason.LENGTH
        assert output.receipt is not None
        assert (output.receipt.kv_budget, output.receipt.shrinks) == (8 * 4 - 1, 1)
        assert (output.receipt.offloads, output.receipt.preemptions) == (0, 0)


class TestLeases:
    def test_they_are_told_as_they_come_and_go(self) -> None:
        async def test() -> None:
            async with running() as engine:
                session = engine.open_session()
                session.submit(elastic("a", 10, max_tokens=5))
                (use,) = engine.leases()
                assert (use.lease_id, use.tenant, use.reserved_blocks) == ("lease-a", "red", 5)
                assert engine.take_lease_changes() == ((use,), ())
                while not (await session.outputs())[-1].finish_reason:
                    pass
                assert engine.take_lease_changes() == ((), ("lease-a",))
                assert engine.leases() == ()
                assert engine.report().held_blocks == 0

        in_loop(test)


class TestFloors:
    def test_a_floor_holds_whatever_others_need(self) -> None:
        async def test() -> dict[str, float]:
            async with running() as engine:
                kept = elastic("kept", 150, max_tokens=40, floor=0.7)
                others = [request(f"full{n}", range(40), max_tokens=20) for n in range(3)]
                answers = await collect(engine, [kept, *others])
                return {name: it.receipt.retained_mass for name, it in answers.items() if it.receipt is not None}

        masses = in_loop(test)
        assert 0.7 <= masses["kept"] < 1.0
        assert all(mass == 1.0 for name, mass in masses.items() if name != "kept")


def test_a_ranks_curve_ends_with_the_mass_that_is_kept() -> None:
    spec = tiny_spec(num_heads=6, num_kv_heads=2)

    async def go() -> tuple[RowPlan, list[tuple[float, ...]], list[float]]:
        backend = reference_backend(spec, random_weights(spec))
        async with rig(backend, num_blocks=20) as it:
            await it.run([request("a", range(50), max_tokens=20, kv=KVParams("h2o", 30))])
            row = next(row for row in reversed([row for plan in it.recorder.plans for row in plan.rows]))
            rule = row.step.rule
            assert rule is not None
            num_tokens = row.step.start + 1
            curves = await it.recorder.retention_curves([CurveQuery(row.residence, rule, num_tokens, 16)])
            masses = await it.recorder.retained_masses([MassQuery(row.residence, rule, num_tokens)])
            return row, curves, masses

    row, (curve,), (mass,) = asyncio.run(go())
    assert row.seq_id == SeqId(0)
    assert len(curve) == 3
    assert curve[0] == 0.0
    assert curve[0] < curve[1] < curve[2] < 1.0
    assert curve[2] == pytest.approx(mass)


def test_without_queries_no_curve_is_measured() -> None:
    spec = tiny_spec()
    backend = reference_backend(spec, random_weights(spec))
    pool = backend.allocate_pool(num_blocks=2, block_size=16, max_num_seqs=1)
    worker = Worker(backend, pool, sampler=lambda _logits, _rows: [], ranks=Alone())
    assert worker.retention_curves([]) == []
