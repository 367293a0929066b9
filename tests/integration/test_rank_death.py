"""A rank that dies, or hangs, which is worse: it is known within seconds, nobody waits, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from kvorum.workers.config import EngineConfig
from kvorum.workers.engine import Engine
from kvorum.workers.engine_server import EngineServer
from kvorum.workers.group import build_ray_engine
from kvorum.workers.request import FinishReason
from kvtest.checkpoints import tiny_checkpoint
from kvtest.engines import collect, request

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

# What clients are promised, and a second for a busy machine.
DETECTION_S = 5.0 + 1.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint("llama", folder, num_heads=6, num_kv_heads=2)
    return EngineConfig(
        model=str(folder), model_name="tiny", tensor_parallel_size=2, kv_cache_memory_bytes=2**22, max_num_seqs=4
    )


@pytest.fixture(autouse=True)
def _resources_come_back() -> Iterator[None]:
    before = ray.available_resources().get("CPU")
    yield
    deadline_s = time.monotonic() + 30
    while ray.available_resources().get("CPU") != before or rank_processes():
        assert time.monotonic() < deadline_s, f"left behind: {rank_processes()}"
        time.sleep(0.1)


def rank_processes() -> list[psutil.Process]:
    """Return our own ranks' processes, oldest first."""
    below = psutil.Process(os.getpid()).children(recursive=True)
    return sorted((p for p in below if "_RankActor" in _title(p)), key=lambda p: p.create_time())


def _title(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text()
    except OSError:
        return ""


async def build(config: EngineConfig) -> Engine:
    return await build_ray_engine(config, num_engines=1, engine_id="ray", on_progress=lambda _, __: None)


ENDLESS = request("endless", range(5, 15), max_tokens=240)
SHORT = request("short", range(5, 15), max_tokens=8)


@pytest.mark.parametrize(
    ("victim", "how", "is_busy"),
    [
        (1, signal.SIGKILL, True),
        (0, signal.SIGSTOP, True),
        (1, signal.SIGSTOP, False),
    ],
)
def test_it_is_known_in_time_and_replaced(
    config: EngineConfig, victim: int, how: signal.Signals, is_busy: bool
) -> None:
    async def scenario() -> tuple[float, list[int]]:
        engine = await build(config)
        await engine.start()
        server = EngineServer(engine)
        await server.start("127.0.0.1")
        try:
            before = (await collect(engine, [SHORT]))["short"].token_ids
            asking = asyncio.create_task(collect(engine, [ENDLESS])) if is_busy else None
            await asyncio.sleep(0.2)
            processes = rank_processes()
            struck_s = time.monotonic()
            processes[victim].send_signal(how)
            async with asyncio.timeout(30):
                await server.failed()
            known_s = time.monotonic() - struck_s
            await server.stop()
            engine = await engine.rebuild()
            if asking:
                # It may have been over before the rank was struck.
                assert (await asking)["endless"].finish_reason in (FinishReason.ERROR, FinishReason.LENGTH)
            await engine.start()
            assert (await collect(engine, [SHORT]))["short"].token_ids == before
            survivor = processes[1 - victim]
            assert survivor.is_running(), "the other rank has kept its weights"
        finally:
            await server.stop()
            await engine.stop()
        return known_s, before

    known_s, answer = asyncio.run(scenario())
    assert known_s < DETECTION_S
    assert len(answer) == 8


def test_a_rank_that_dies_while_it_loads_is_an_error_and_leaves_nothing(config: EngineConfig) -> None:
    async def scenario() -> None:
        building = asyncio.create_task(build(config))
        while len(rank_processes()) < 2:
            await asyncio.sleep(0.02)
        rank_processes()[1].kill()
        # Ray starts the processes in an order of its own: which rank the younger one is, only the message knows.
        with pytest.raises(Exception, match=r"rank [01] died"):
            async with asyncio.timeout(60):
                await building

    asyncio.run(scenario())
