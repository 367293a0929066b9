"""A real rank in a real actor: it answers as one in this process does, and its death is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from kvorum.kvstore.errors import CheckpointError, EngineLostError
from kvorum.workers import group
from kvorum.workers.config import EngineConfig
from kvorum.workers.engine import Engine, build_engine
from kvorum.workers.group import build_ray_engine
from kvorum.workers.local import LocalExecutor
from kvorum.workers.request import KVParams
from kvorum.workers.worker import load_worker
from kvtest.checkpoints import tiny_checkpoint
from kvtest.cluster import ClusterUnderTest
from kvtest.engines import collect, request

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

REQUESTS = [
    request("full", range(5, 45), max_tokens=12),
    request("h2o", range(5, 75), max_tokens=12, kv=KVParams("h2o", 24)),
    request("floor", range(9, 80), max_tokens=12, kv=KVParams("h2o_avg", 24, 0.7)),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint("llama", folder, num_heads=6, num_kv_heads=3)
    return EngineConfig(model=str(folder), model_name="tiny", kv_cache_memory_bytes=2**22, max_num_seqs=4)


def run(build: Callable[[], Awaitable[Engine]], use: Callable[[Engine], Awaitable[None]]) -> None:
    async def go() -> None:
        engine = await build()
        await engine.start()
        try:
            await use(engine)
        finally:
            await engine.stop()

    asyncio.run(go())


def test_a_rank_in_an_actor_answers_as_one_in_this_process(config: EngineConfig) -> None:
    answers = []

    async def ask(engine: Engine) -> None:
        answers.append(await collect(engine, REQUESTS))

    async def local() -> Engine:
        worker, shape = load_worker(config)
        return build_engine(config, shape, LocalExecutor(worker), engine_id="local")

    run(local, ask)
    run(lambda: build_ray_engine(config, num_engines=2, engine_id="ray", on_progress=lambda _, __: None), ask)
    here, there = answers
    for name, answer in here.items():
        ours, theirs = answer.receipt, there[name].receipt
        assert there[name].token_ids == answer.token_ids
        assert ours is not None
        assert theirs is not None
        assert theirs.retained_mass == pytest.approx(ours.retained_mass, abs=1e-6)
        assert theirs.kv_tokens_held == ours.kv_tokens_held


async def keep_checking(engine: Engine) -> None:
    while True:  # Ray kills in its own time; until then the rank answers
        await engine.check_health()


def test_a_dead_rank_is_an_engine_lost(config: EngineConfig) -> None:
    async def use(engine: Engine) -> None:
        await engine.check_health()
        executor = engine._executor
        assert isinstance(executor, group.RayExecutor)
        ray.kill(executor._ranks[0])
        with pytest.raises(EngineLostError, match="rank 0 died"):
            await asyncio.wait_for(keep_checking(engine), timeout=10.0)
        async with asyncio.timeout(10.0):  # Ray has it dead before its process is gone
            while (await collect(engine, REQUESTS[:1]))["full"].finish_reason != "error":
                pass

    run(lambda: build_ray_engine(config, num_engines=2, engine_id="ray", on_progress=lambda _, __: None), use)


def test_a_model_that_cannot_be_read_leaves_nothing_behind(config: EngineConfig, tmp_path: Path) -> None:
    before = ray.available_resources()
    absent = replace(config, model=str(tmp_path / "absent"))
    with pytest.raises(CheckpointError, match="absent") as caught:
        asyncio.run(build_ray_engine(absent, num_engines=2, engine_id="ray", on_progress=lambda _, __: None))
    assert "Traceback" not in str(caught.value)
    deadline_s = time.monotonic() + 30
    while ray.available_resources().get("CPU") != before.get("CPU"):
        assert time.monotonic() < deadline_s, "the placement group was not given back"
        time.sleep(0.1)


def test_ranks_that_find_no_room_are_refused_in_time(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, cluster: ClusterUnderTest
) -> None:
    monkeypatch.setattr(group, "PLACEMENT_TIMEOUT_S", 0.5)
    on_gpu = replace(config, device="cuda")
    with pytest.raises(EngineLostError, match=r"no room \(PACK\) with 1 CPU and 1 GPU free for a rank"):
        asyncio.run(build_ray_engine(on_gpu, num_engines=2, engine_id="ray", on_progress=lambda _, __: None))
