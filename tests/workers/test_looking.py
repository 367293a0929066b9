"""What an operator sees of a sequence is what is in the pool."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kernels.backend import SlotView
from kvorum.kernels.reference.attention import choose_victims
from kvorum.kvstore.errors import EngineLostError
from kvorum.protos.engine.v1 import engine_pb2 as pb
from kvorum.workers.engine import Engine, EngineOptions
from kvorum.workers.fake_engine import FakeExecutor
from kvorum.workers.looking import Phase, SequenceLook, SequenceRow
from kvorum.workers.looking_wire import look_from_pb, look_to_pb, rows_from_pb, rows_to_pb
from kvorum.workers.plan import HeadQuery, HeadSlots, StepPlan, StepResult
from kvorum.workers.request import EngineInfo, EventKind, KVParams, RequestId, SequenceEvent
from kvtest.engines import FULL, request, rig
from kvtest.models import random_weights, reference_backend, tiny_spec

LAYER, KV_HEAD = 1, 1
BUDGET = 24


def look_in_mid_answer(kv: KVParams) -> tuple[SequenceLook, HeadQuery | None, list[SlotView]]:
    """Look at a sequence of 40 + 30 tokens on a tiny model with real numbers.

    Returns what was seen, what the rank was asked for, and then the views of all layers and of LAYER alone.
    """
    spec = tiny_spec(num_heads=6, num_kv_heads=2)
    asked: list[HeadQuery] = []
    views: list[SlotView] = []

    async def go() -> SequenceLook:
        backend = reference_backend(spec, random_weights(spec))
        async with rig(backend, num_blocks=20, note_kept=False) as it:
            read_slots = it.recorder.look

            async def look(query: HeadQuery) -> HeadSlots:
                asked.append(query)
                views.extend(it.recorder.worker.view(query.residence, layer=layer) for layer in (None, query.layer))
                return await read_slots(query)

            it.recorder.look = look  # type: ignore[method-assign]
            running = asyncio.create_task(it.run([request("r", list(range(40)), max_tokens=30, kv=kv)]))
            while len(it.recorder.plans) < 10:
                await asyncio.sleep(0)
            seen = await it.engine.look(RequestId("r"), layer=LAYER, kv_head=KV_HEAD)
            await running
            assert seen is not None
            return seen

    seen = asyncio.run(go())
    return seen, asked[0] if asked else None, views


def test_an_evicting_sequence_shows_what_is_kept_and_who_goes_next() -> None:
    seen, query, (whole, _) = look_in_mid_answer(KVParams("h2o", BUDGET))
    assert query is not None
    slots = seen.slots
    assert slots is not None
    scores, positions = whole.scores[LAYER, KV_HEAD], whole.positions[LAYER, KV_HEAD]
    assert list(slots.positions) == positions.tolist()
    assert list(slots.scores) == scores.tolist()
    assert list(slots.alive) == whole.alive[LAYER, KV_HEAD].tolist()
    kept = {position for position, alive in zip(slots.positions, slots.alive, strict=True) if alive}
    assert len(kept) == BUDGET == seen.num_written - seen.row.evicted_tokens
    assert kept < set(range(seen.num_written))
    next_to_go = int(choose_victims(query.rule, scores[None], positions[None], newest=query.newest))
    assert slots.values.index(min(slots.values)) == next_to_go
    assert not slots.alive[next_to_go]
    assert math.inf in slots.values, "the recent window is protected"
    assert (seen.row.phase, seen.row.kv_budget) == (Phase.DECODE, BUDGET)
    assert len(seen.block_ids) == seen.row.blocks == 2
    assert [event.kind for event in seen.events] == [EventKind.STARTED, EventKind.CUT]
    assert seen.events[1].tokens == 40 - BUDGET


def test_one_layer_is_read_as_all_are() -> None:
    _, _, (whole, one) = look_in_mid_answer(KVParams("h2o_avg", BUDGET))
    for name in ("positions", "scores", "alive"):
        torch.testing.assert_close(getattr(one, name)[0], getattr(whole, name)[LAYER])


def test_a_sequence_that_keeps_everything_shows_its_slots_in_order_and_no_scores() -> None:
    seen, query, _ = look_in_mid_answer(KVParams())
    assert query is None
    assert seen.slots == HeadSlots(tuple(range(seen.num_written)), (), (), (True,) * seen.num_written)
    assert seen.token_ids[:40] == tuple(range(40))
    assert len(seen.token_ids) == seen.num_written + 1 == seen.row.num_tokens


INFO = EngineInfo("fake", "fake", 200, 1000, num_blocks=8, block_size=4, max_num_seqs=1, max_num_waiting=9)


class Held(FakeExecutor):
    """Takes its second step only when it may, or fails."""

    def __init__(self) -> None:
        super().__init__(block_size=INFO.block_size)
        self.go = asyncio.Event()
        self.fails = False
        self.steps = 0

    async def execute(self, plan: StepPlan) -> StepResult:
        self.steps += bool(plan.rows)
        if self.steps == 2:
            await self.go.wait()
        if self.fails:
            raise RuntimeError("a rank burned down")
        return await super().execute(plan)


def on_a_held_engine(test: Callable[[Engine, Held], Awaitable[None]], *, kv: KVParams = FULL) -> None:
    async def go() -> None:
        executor = Held()
        engine = Engine(INFO, executor, EngineOptions(max_num_batched_tokens=64, enable_prefix_caching=True))
        await engine.start()
        session = engine.open_session()
        session.submit(request("runs" if kv is FULL else "evicts", [1, 2, 3], max_tokens=4, kv=kv))
        session.submit(request("waits", [4, 5], max_tokens=4))
        while executor.steps < 2:
            await asyncio.sleep(0)
        try:
            await test(engine, executor)
        finally:
            executor.go.set()
            await engine.stop()

    asyncio.run(go())


def test_everybody_is_listed_and_one_that_waits_has_no_slots() -> None:
    async def test(engine: Engine, executor: Held) -> None:
        assert [(row.request_id, row.phase) for row in engine.sequences()] == [
            ("runs", Phase.DECODE),
            ("waits", Phase.WAITING),
        ]
        looks = [asyncio.create_task(engine.look(RequestId(name), layer=0, kv_head=0)) for name in ("waits", "nobody")]
        await asyncio.sleep(0)
        executor.go.set()
        waiting, nobody = await asyncio.gather(*looks)
        assert waiting is not None
        assert (waiting.slots, waiting.block_ids, waiting.token_ids) == (None, (), (4, 5))
        assert nobody is None

    on_a_held_engine(test)


def test_an_idle_engine_answers_too() -> None:
    async def test(engine: Engine, executor: Held) -> None:
        executor.go.set()
        while engine.scheduler.has_work:
            await asyncio.sleep(0)
        assert await engine.look(RequestId("runs"), layer=0, kv_head=0) is None

    on_a_held_engine(test)


def test_who_looks_at_an_engine_that_fails_is_told_so() -> None:
    async def test(engine: Engine, executor: Held) -> None:
        look = asyncio.create_task(engine.look(RequestId("runs"), layer=0, kv_head=0))
        gone = asyncio.create_task(engine.look(RequestId("runs"), layer=0, kv_head=0))
        await asyncio.sleep(0)
        gone.cancel()
        executor.fails = True
        executor.go.set()
        with pytest.raises(EngineLostError, match="failed"):
            await look
        with pytest.raises(EngineLostError, match="burned"):
            await engine.look(RequestId("runs"), layer=0, kv_head=0)

    on_a_held_engine(test)


def test_who_looks_when_a_rank_is_lost_over_it_is_told_so() -> None:
    async def test(engine: Engine, executor: Held) -> None:
        async def fail(query: HeadQuery) -> HeadSlots:
            raise RuntimeError("a rank burned down")

        executor.look = fail  # type: ignore[method-assign]
        looks = [asyncio.create_task(engine.look(RequestId("evicts"), layer=0, kv_head=0)) for _ in range(3)]
        await asyncio.sleep(0)
        executor.go.set()
        for look in looks:
            with pytest.raises(EngineLostError, match="failed"):
                await look

    on_a_held_engine(test, kv=KVParams("h2o", 16))


counts = st.integers(0, 2**32 - 1)
numbers = st.floats(allow_nan=False)
texts = st.text(max_size=5)
rows = st.builds(
    SequenceRow,
    request_id=texts.map(RequestId),
    tenant=texts,
    policy=texts,
    phase=st.sampled_from(Phase),
    num_prompt=counts,
    num_tokens=counts,
    blocks=counts,
    reserved_blocks=counts,
    kv_budget=st.none() | counts,
    evicted_tokens=counts,
    shrinks=counts,
    offloads=counts,
    preemptions=counts,
)
ids = st.lists(counts, max_size=4).map(tuple)
slots = st.builds(
    HeadSlots, ids, st.lists(numbers).map(tuple), st.lists(numbers).map(tuple), st.lists(st.booleans()).map(tuple)
)
events = st.lists(st.builds(SequenceEvent, st.sampled_from(EventKind), numbers, counts), max_size=3).map(tuple)


@given(st.lists(rows, max_size=3).map(tuple))
def test_a_list_arrives_as_it_left(listed: tuple[SequenceRow, ...]) -> None:
    assert rows_from_pb(pb.ListSequencesResponse.FromString(rows_to_pb(listed).SerializeToString())) == listed


@given(st.none() | st.builds(SequenceLook, rows, ids, counts, counts, ids, counts, st.none() | slots, events))
def test_a_look_arrives_as_it_left(look: SequenceLook | None) -> None:
    assert look_from_pb(pb.LookAtSequenceResponse.FromString(look_to_pb(look).SerializeToString())) == look
