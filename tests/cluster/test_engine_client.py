"""The stream between a router and an engine, over a real gRPC connection on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from kvorum.cluster.engine_client import EngineClient, RequestStream
from kvorum.kvstore.errors import CapacityError, ContextLengthError, EngineLostError
from kvorum.workers.looking import Phase
from kvorum.workers.request import EngineRequest, EngineStats, FinishReason, RequestId, RequestOutput, SamplingParams
from kvtest.stack import DEFAULT_INFO, EngineHost
from kvtest.waiting import eventually


@dataclass
class Link:
    host: EngineHost
    client: EngineClient

    @property
    def stats(self) -> EngineStats:
        return self.host.engine.stats()


@contextlib.asynccontextmanager
async def link(*, step_delay_s: float = 0.0, silence_timeout_s: float = 5.0) -> AsyncIterator[Link]:
    host = await EngineHost.start(step_delay_s=step_delay_s)
    client = EngineClient(host.resolve_address, silence_timeout_s=silence_timeout_s, retry_interval_s=0.01)
    running = asyncio.create_task(client.run())
    await eventually(lambda: client.status is not None)
    try:
        yield Link(host, client)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await host.stop()
        await asyncio.sleep(0.01)


def request(request_id: str = "r", *, max_tokens: int = 5, prompt: tuple[int, ...] = (7, 8, 9)) -> EngineRequest:
    return EngineRequest(RequestId(request_id), prompt, SamplingParams(max_tokens=max_tokens))


async def read_all(stream: RequestStream) -> tuple[list[int], RequestOutput]:
    token_ids: list[int] = []
    while True:
        output = await stream.next()
        token_ids += output.token_ids
        if output.finish_reason:
            return token_ids, output


def test_the_router_learns_what_the_engine_is_and_how_full() -> None:
    async def scenario() -> None:
        async with link() as wired:
            assert wired.client.status
            assert wired.client.status.info == DEFAULT_INFO
            assert wired.client.status.stats.blocks_free == DEFAULT_INFO.num_blocks

    asyncio.run(scenario())


def test_requests_share_the_stream_and_each_gets_its_own_tokens() -> None:
    async def scenario() -> None:
        async with link() as wired:
            streams = [wired.client.submit([request(f"r{i}", prompt=(i, 10 + i), max_tokens=3 + i)]) for i in range(4)]
            results = await asyncio.gather(*map(read_all, streams))
            for i, (token_ids, last) in enumerate(results):
                assert token_ids == [(i, 10 + i)[j % 2] for j in range(3 + i)]
                assert last.finish_reason is FinishReason.LENGTH
                assert last.receipt
                assert last.receipt.completion_tokens == 3 + i
            assert all(stream.has_ended for stream in streams)

    asyncio.run(scenario())


def test_an_operator_sees_who_is_there_and_looks_at_one() -> None:
    async def scenario() -> None:
        async with link(step_delay_s=0.01) as wired:
            stream = wired.client.submit([request("seen", max_tokens=200)])
            await eventually(lambda: wired.stats.generation_tokens_total > 2)
            (row,) = await wired.client.sequences()
            assert (row.request_id, row.num_prompt, row.phase) == ("seen", 3, Phase.DECODE)
            look = await wired.client.look(RequestId("seen"), layer=0, kv_head=0)
            assert look
            assert look.token_ids[:5] == (7, 8, 9, 7, 8)
            assert look.slots
            assert len(look.slots.positions) == look.num_written
            assert await wired.client.look(RequestId("nobody"), layer=0, kv_head=0) is None
            stream.close()
            await wired.host.server.stop()
            with pytest.raises(EngineLostError):
                await wired.client.sequences()

    asyncio.run(scenario())


def test_the_sequences_of_one_request_arrive_in_one_stream() -> None:
    async def scenario() -> None:
        async with link() as wired:
            stream = wired.client.submit(
                [request("a", prompt=(1,), max_tokens=2), request("b", prompt=(2,), max_tokens=3)]
            )
            arrived: dict[str, list[int]] = {"a": [], "b": []}
            num_open = 2
            while num_open:
                output = await stream.next()
                arrived[output.request_id] += output.token_ids
                num_open -= output.finish_reason is not None
            assert arrived == {"a": [1, 1], "b": [2, 2, 2]}

    asyncio.run(scenario())


def test_a_refused_request_raises_the_engines_error() -> None:
    async def scenario() -> None:
        async with link(step_delay_s=0.05) as wired:
            stream = wired.client.submit([request(max_tokens=400_000)])
            with pytest.raises(ContextLengthError, match="512"):
                await stream.next()
            streams = [wired.client.submit([request(f"r{i}", max_tokens=100)]) for i in range(20)]
            with pytest.raises(CapacityError) as caught:
                await asyncio.gather(*map(read_all, streams))
            assert caught.value.retry_after_s == 1.0

    asyncio.run(scenario())


def test_closing_a_stream_frees_its_blocks_within_a_step() -> None:
    async def scenario() -> None:
        async with link(step_delay_s=0.01) as wired:
            stream = wired.client.submit([request(max_tokens=400)])
            await stream.next()
            assert wired.stats.blocks_held == 1
            stream.close()
            steps = wired.stats.steps_total
            await eventually(lambda: wired.stats.blocks_held == 0)
            # One step may have been under way when the command left, one when it arrived.
            assert wired.stats.steps_total - steps <= 2
            assert wired.client.status

    asyncio.run(scenario())


def test_finish_ends_a_request_with_a_receipt() -> None:
    async def scenario() -> None:
        async with link() as wired:
            stream = wired.client.submit([request(max_tokens=400)])
            await stream.next()
            stream.finish(RequestId("r"))
            _, last = await read_all(stream)
            assert last.finish_reason is FinishReason.STOP
            assert last.receipt

    asyncio.run(scenario())


def test_an_asked_for_abort_is_reported() -> None:
    async def scenario() -> None:
        async with link() as wired:
            stream = wired.client.submit([request(max_tokens=400)])
            stream.abort()
            _, last = await read_all(stream)
            assert last.finish_reason is FinishReason.ABORT

    asyncio.run(scenario())


def test_a_lost_engine_ends_its_requests_and_the_client_comes_back() -> None:
    async def scenario() -> None:
        async with link(step_delay_s=0.01) as wired:
            stream = wired.client.submit([request(max_tokens=400)])
            await stream.next()
            await wired.host.server.stop()
            with pytest.raises(EngineLostError, match="engine-0"):
                await read_all(stream)
            assert not stream.has_ended, "as far as anybody knows"
            stream.close()
            assert wired.client.status is None
            with pytest.raises(EngineLostError):
                wired.client.submit([request("late")])
            await eventually(lambda: wired.stats.blocks_held == 0)

    asyncio.run(scenario())


def test_a_silent_engine_counts_as_lost() -> None:
    async def scenario() -> None:
        async with link(silence_timeout_s=0.2, step_delay_s=100) as wired:
            wired.host.server._heartbeat_interval_s = 100
            stream = wired.client.submit([request(max_tokens=400)])
            with pytest.raises(EngineLostError):
                await read_all(stream)

    asyncio.run(scenario())


def test_the_router_hears_of_a_dead_rank() -> None:
    async def scenario() -> None:
        async with link() as wired:
            wired.host.ranks_are_alive = False
            await eventually(lambda: wired.client.status is not None and not wired.client.status.healthy)
            async with asyncio.timeout(5):
                await wired.host.server.failed()

    asyncio.run(scenario())


def test_a_draining_engine_asks_for_nothing_more_and_finishes_what_runs() -> None:
    async def scenario() -> None:
        async with link(step_delay_s=0.005) as wired:
            stream = wired.client.submit([request(max_tokens=30)])
            await stream.next()
            draining = asyncio.create_task(wired.host.server.drain(10.0))
            await eventually(lambda: wired.client.status is not None and not wired.client.status.healthy)
            assert not draining.done()
            while (await stream.next()).finish_reason is None:
                pass
            async with asyncio.timeout(5):
                await draining

    asyncio.run(scenario())


def test_draining_an_engine_does_not_wait_for_ever() -> None:
    async def scenario() -> None:
        async with link(step_delay_s=0.01) as wired:
            stream = wired.client.submit([request(max_tokens=400)])
            await stream.next()
            await wired.host.server.drain(0.05)
            assert wired.stats.num_running == 1

    asyncio.run(scenario())


def test_a_router_that_goes_away_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        async with link(step_delay_s=0.01) as wired:
            second = EngineClient(wired.host.resolve_address, retry_interval_s=0.01)
            running = asyncio.create_task(second.run())
            await eventually(lambda: second.status is not None)
            stream = second.submit([request(max_tokens=400)])
            await stream.next()
            running.cancel()
            await eventually(lambda: wired.stats.blocks_held == 0)

    asyncio.run(scenario())


def test_an_engine_whose_step_loop_died_ends_the_session() -> None:
    opened = 0

    class BrokenSession:
        def __init__(self) -> None:
            nonlocal opened
            opened += 1

        async def outputs(self) -> list[RequestOutput]:
            raise RuntimeError("the loop died")

        def close(self) -> None:
            pass

    async def scenario() -> None:
        async with link() as wired:
            wired.host.engine.open_session = BrokenSession  # type: ignore[method-assign, assignment]
            second = EngineClient(wired.host.resolve_address, retry_interval_s=0.01)
            running = asyncio.create_task(second.run())
            await eventually(lambda: opened >= 3)
            running.cancel()

    asyncio.run(scenario())
