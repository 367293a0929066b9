"""What the engine's end of a router's stream does when the call under it fails, with a call that fails on purpose."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvorum.protos.engine.v1 import engine_pb2 as pb
from kvorum.workers.engine_server import EngineServer, _Servicer
from kvtest.stack import EngineHost


class BrokenCall:
    """A call whose two directions break one after the other."""

    def __init__(self) -> None:
        self.is_cut = asyncio.Event()

    async def messages(self) -> AsyncIterator[pb.SessionRequest]:
        try:
            await self.is_cut.wait()
        finally:
            raise grpc.RpcError("the server was stopped")
        yield pb.SessionRequest()  # type: ignore[unreachable]  # what makes it a generator

    async def write(self, message: pb.SessionResponse) -> None:
        self.is_cut.set()
        raise grpc.RpcError("the call was cut off")


def test_a_call_that_is_cut_off_leaves_no_error_and_no_session_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        host = await EngineHost.start()
        call: Any = BrokenCall()
        with pytest.raises(grpc.RpcError, match="cut off"):
            await _Servicer(EngineServer(host.engine)).Session(call.messages(), call)
        assert host.is_idle
        await host.stop()
        gc.collect()  # a task whose error nobody took says so when it goes

    asyncio.run(scenario())
    assert not caplog.records
