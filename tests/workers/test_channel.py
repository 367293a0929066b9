"""Calls between two processes over a socket: results, errors, a server that goes, a client without the key."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

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


@pytest.fixture
def client(target: Target) -> ChannelClient:
    return ChannelClient(serving(target).address)


@pytest.mark.parametrize("count", [0, 3, 300_000])
def test_a_call_returns_what_the_method_does(client: ChannelClient, count: int) -> None:
    for _ in range(3):
        assert client.call("double", list(range(count))) == [2 * number for number in range(count)]
    client.close()


def test_what_was_raised_on_purpose_is_raised_here_and_calls_go_on(client: ChannelClient) -> None:
    with pytest.raises(CheckpointError, match="no such model"):
        client.call("refuse")
    assert client.call("double", [1]) == [2]
    client.close()


def test_a_mistake_comes_with_its_traceback_even_if_it_cannot_be_pickled(client: ChannelClient) -> None:
    with pytest.raises(RuntimeError, match=r"in a rank:[^$]*LookupError"):
        client.call("fail")
    client.close()


def test_closing_ends_a_call_that_waits(client: ChannelClient, target: Target) -> None:
    caught: list[Exception] = []

    def call() -> None:
        try:
            client.call("wait")
        except EngineLostError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.05)
    client.close()
    thread.join(5)
    target.may_go_on.set()
    assert len(caught) == 1


def test_a_call_on_a_closed_channel_says_that_the_rank_is_lost(client: ChannelClient) -> None:
    client.close()
    with pytest.raises(EngineLostError, match="a rank died"):
        client.call("double", [1])


def test_nobody_is_let_in_without_the_key(target: Target) -> None:
    address = serving(target).address
    with pytest.raises(EngineLostError, match="key"):
        ChannelClient(replace(address, key=b"another key"))
    client = ChannelClient(address)
    assert client.call("double", [1]) == [2]
    client.close()


def test_nobody_listens(target: Target) -> None:
    address = serving(target).address
    with pytest.raises(EngineLostError, match="a rank died"):
        ChannelClient(replace(address, port=1))


def test_a_server_that_is_not_called_does_something_else_meanwhile(target: Target) -> None:
    idle = threading.Semaphore(0)
    client = ChannelClient(serving(target, on_idle=idle.release, idle_period_s=0.01).address)
    for _ in range(3):
        assert idle.acquire(timeout=5)
    assert client.call("double", [1]) == [2]
    client.close()


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

    serving_thread = threading.Thread(target=serve)
    serving_thread.start()
    client = ChannelClient(server.address)
    serving_thread.join(5)
    assert raised
    with pytest.raises(EngineLostError):
        client.call("double", [1])
    client.close()
