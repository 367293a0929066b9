"""Calls between two processes over a socket: results, errors, a server that goes, a client without the key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace

import pytest
import uvloop

from kvorum.kvstore.errors import CheckpointError, EngineLostError
from kvorum.workers.channel import ChannelClient, ChannelServer


class Target:
    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def double(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    def refuse(self) -> None:
        raise CheckpointError("no such model")

    def fail(self) -> None:
        raise LookupError("a mistake", lambda: None)

    def wait(self) -> str:
        self.may_go_on.wait(10)
        return "done"


def serving(target: Target, **options: object) -> ChannelServer:
    server = ChannelServer(target, host="127.0.0.1", **options)  # type: ignore[arg-type]
    threading.Thread(target=server.serve, daemon=True).start()
    return server


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"], autouse=True)
def new_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in both kinds of loop: Ray runs actors in uvloop's."""
    monkeypatch.setattr(asyncio, "run", lambda main: _run_in(request.param, main))


def _run_in(new_loop: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main)


def run(scenario: Callable[[ChannelClient], Awaitable[None]], target: Target, **options: object) -> None:
    async def connect_and_run() -> None:
        client = await ChannelClient.connect(serving(target, **options).address)
        try:
            await scenario(client)
        finally:
            client.close()

    asyncio.run(connect_and_run())


@pytest.mark.parametrize("count", [0, 3, 300_000])
def test_a_call_returns_what_the_method_does(target: Target, count: int) -> None:
    async def scenario(client: ChannelClient) -> None:
        for _ in range(3):
            assert await client.call("double", list(range(count))) == [2 * number for number in range(count)]

    run(scenario, target)


def test_what_was_raised_on_purpose_is_raised_here_and_calls_go_on(target: Target) -> None:
    async def scenario(client: ChannelClient) -> None:
        with pytest.raises(CheckpointError, match="no such model"):
            await client.call("refuse")
        assert await client.call("double", [1]) == [2]

    run(scenario, target)


def test_a_mistake_comes_with_its_traceback_even_if_it_cannot_be_pickled(target: Target) -> None:
    async def scenario(client: ChannelClient) -> None:
        with pytest.raises(RuntimeError, match=r"in a rank:[^$]*LookupError"):
            await client.call("fail")

    run(scenario, target)


def test_the_loop_goes_on_while_a_call_waits_and_closing_ends_it(target: Target) -> None:
    async def scenario(client: ChannelClient) -> None:
        call = asyncio.create_task(client.call("wait"))
        await asyncio.sleep(0.05)
        assert not call.done()
        client.close()
        with pytest.raises(EngineLostError, match="a rank died"):
            await asyncio.wait_for(call, 5)
        target.may_go_on.set()

    run(scenario, target)


def test_a_call_that_was_cancelled_closes_the_channel_since_its_answer_may_still_come(target: Target) -> None:
    async def scenario(client: ChannelClient) -> None:
        call = asyncio.create_task(client.call("wait"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        target.may_go_on.set()
        with pytest.raises(EngineLostError, match="a rank died"):
            await client.call("double", [1])

    run(scenario, target)


def test_two_calls_at_once_are_a_mistake(target: Target) -> None:
    async def scenario(client: ChannelClient) -> None:
        call = asyncio.create_task(client.call("wait"))
        await asyncio.sleep(0)
        with pytest.raises(AssertionError, match="one call at a time"):
            await client.call("double", [1])
        target.may_go_on.set()
        assert await call == "done"

    run(scenario, target)


def test_a_call_on_a_closed_channel_says_that_the_rank_is_lost(target: Target) -> None:
    async def scenario(client: ChannelClient) -> None:
        client.close()
        with pytest.raises(EngineLostError, match="a rank died"):
            await client.call("double", [1])

    run(scenario, target)


def test_nobody_is_let_in_without_the_key(target: Target) -> None:
    address = serving(target).address

    async def scenario() -> None:
        with pytest.raises(EngineLostError, match="key"):
            await ChannelClient.connect(replace(address, key=b"another key"))
        client = await ChannelClient.connect(address)
        assert await client.call("double", [1]) == [2]
        client.close()

    asyncio.run(scenario())


def test_nobody_listens(target: Target) -> None:
    address = serving(target).address
    with pytest.raises(EngineLostError, match="a rank died"):
        asyncio.run(ChannelClient.connect(replace(address, port=1)))


def test_a_server_that_is_not_called_does_something_else_meanwhile(target: Target) -> None:
    idle = threading.Semaphore(0)

    async def scenario(client: ChannelClient) -> None:
        for _ in range(3):
            assert await asyncio.to_thread(idle.acquire, timeout=5)
        assert await client.call("double", [1]) == [2]

    run(scenario, target, on_idle=idle.release, idle_period_s=0.01)


def test_what_the_idle_call_raises_ends_the_channel(target: Target) -> None:
    def fail() -> None:
        raise LookupError("the peers are gone")

    server = ChannelServer(target, host="127.0.0.1", on_idle=fail, idle_period_s=0.05)
    raised: list[Exception] = []

    def serve() -> None:
        try:
            server.serve()
        except LookupError as error:
            raised.append(error)

    async def scenario() -> None:
        client = await ChannelClient.connect(server.address)
        await asyncio.to_thread(serving_thread.join, 5)
        assert raised
        with pytest.raises(EngineLostError):
            await client.call("double", [1])
        client.close()

    serving_thread = threading.Thread(target=serve)
    serving_thread.start()
    asyncio.run(scenario())
