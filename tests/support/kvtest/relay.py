"""A TCP relay in front of a server, whose connections can be broken as by a network or a killed process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Coroutine


class Relay:
    """Passes bytes on in both directions."""

    def __init__(self, target: str) -> None:
        """Lead to `target`, host:port."""
        host, _, port = target.rpartition(":")
        self._far_address = (host, int(port))
        self._near_address = ("127.0.0.1", 0)
        self._tasks: set[asyncio.Task[None]] = set()
        # Closed by whoever ends the tasks: one that is cancelled before it began closes nothing.
        self._sockets = contextlib.ExitStack()

    @property
    def target(self) -> str:
        """Where it takes connections, host:port."""
        host, port = self._near_address
        return f"{host}:{port}"

    async def open(self) -> None:
        """Take connections, under the same target as before."""
        listener = self._sockets.enter_context(socket.create_server(self._near_address))
        listener.setblocking(False)
        self._near_address = listener.getsockname()
        self._start(self._accept(listener))

    async def cut(self) -> None:
        """Break all connections."""
        await self.close()
        await self.open()

    async def close(self) -> None:
        """Break all connections and take no more."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # until the loop has let go of the sockets
        self._sockets.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            near, _ = await asyncio.get_running_loop().sock_accept(listener)
            self._start(self._relay(self._sockets.enter_context(near)))

    async def _relay(self, near: socket.socket) -> None:
        with near, socket.socket() as far:
            far.setblocking(False)
            await asyncio.get_running_loop().sock_connect(far, self._far_address)
            with contextlib.suppress(ExceptionGroup):  # one side hung up
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pump(near, far))
                    both.create_task(_pump(far, near))
            await asyncio.sleep(0)


async def _pump(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, 2**16):
        await loop.sock_sendall(target, data)
    raise ConnectionError("the connection ended")


@contextlib.asynccontextmanager
async def relay(target: str) -> AsyncIterator[Relay]:
    """Put a relay in front of a target."""
    it = Relay(target)
    await it.open()
    try:
        yield it
    finally:
        await it.close()
