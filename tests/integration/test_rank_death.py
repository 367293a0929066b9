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
from kvtest.engines import Answer, collect, request

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


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_it_is_known_in_time(config: EngineConfig, victim: int, how: signal.Signals, is_busy: bool) -> None:
    async def scenario() -> tuple[float, dict[str, Answer]]:
        engine = await build(config)
        await engine.start()
        server = EngineServer(engine)
        await server.start("127.0.0.1")
        answers: dict[str, Answer] = {}
        try:
            asking = asyncio.create_task(collect(engine, [ENDLESS])) if is_busy else None
            await asyncio.sleep(0.3)
            struck_s = time.monotonic()
            rank_processes()[victim].send_signal(how)
            async with asyncio.timeout(30):
                await server.failed()
            known_s = time.monotonic() - struck_s
            await server.stop()
            await engine.stop()
            if asking:
                answers = await asking
        finally:
            await server.stop()
            await engine.stop()
        return known_s, answers

    known_s, answers = asyncio.run(scenario())
    assert known_s < DETECTION_S
    for answer in answers.values():
        # It may have been over before the rank was struck.
        assert answer.finish_reason in (FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH)


def test_a_rank_that_dies_while_it_loads_is_an_error_and_leaves_nothing(config: EngineConfig) -> None:
    async def scenario() -> None:
        building = asyncio.create_task(build(config))
        while len(rank_processes()) < 2:
            await asyncio.sleep(0.02)
        rank_processes()[1].kill()
        with pytest.raises(Exception, match="a rank died"):
            async with asyncio.timeout(60):
                await building

    asyncio.run(scenario())
