"""The way of a step between an engine and a rank: one socket, one call at a time.

A call through Ray takes 1.6 ms, and nearly as much of each process's CPU, at every step; this takes a fraction. Ray
starts the rank, watches it and kills it. The rank hands out a fresh key through Ray, and takes nothing from who does
not have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import secrets
import socket
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from kvorum.kvstore.errors import EngineLostError, KvorumError

# Each message is pickled and comes after its length.
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Where a rank listens, and the key that it asks for."""

    host: str
    port: int
    key: bytes


class ChannelServer:
    """A rank's end: makes calls on `target` for one client, in the thread that calls `serve`.

    on_idle is called in that thread whenever no call has come for idle_period_s; what it raises ends the channel.
    """

    def __init__(
        self,
        target: object,
        *,
        host: str,
        on_idle: Callable[[], None] | None = None,
        idle_period_s: float | None = None,
    ) -> None:
        key = secrets.token_bytes(32)
        self._target = target
        self._on_idle = on_idle
        self._idle_period_s = idle_period_s
        self._listener = Listener((host, 0), authkey=key)
        self.address = ChannelAddress(host, self._listener.address[1], key)

    def serve(self) -> None:
        """Wait for the client and do what it asks until it is gone."""
        with self._listener, self._accept() as engine:
            while True:
                try:
                    while not wait([engine], self._idle_period_s):
                        if self._on_idle is not None:
                            self._on_idle()
                    method, args = pickle.loads(_receive(engine))
                except (EOFError, OSError):
                    return
                engine.sendall(_framed(self._call(method, args)))

    def _accept(self) -> socket.socket:
        """Wait for the client that has the key."""
        while True:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                return _socket_of(self._listener.accept())

    def _call(self, method: str, args: tuple[object, ...]) -> tuple[bool, object]:
        try:
            return True, getattr(self._target, method)(*args)
        except KvorumError as error:
            return False, error
        except Exception:
            # It need not be one that can be pickled.
            return False, RuntimeError(f"in a rank:\n{traceback.format_exc()}")


class ChannelClient:
    """An engine's end. Calls come one at a time, from one event loop, which goes on while the rank works.

    A call leaves at once, before anything else that is due in the loop: what the last step brought for clients is sent
    while the rank is at the next. One that is not waited for to its end closes the channel, since its answer would be
    taken for the next one's.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._is_calling = self._is_closed = False

    @classmethod
    async def connect(cls, address: ChannelAddress) -> ChannelClient:
        """Connect; raises EngineLostError."""
        try:
            return cls(_socket_of(await asyncio.to_thread(Client, (address.host, address.port), authkey=address.key)))
        except AuthenticationError as error:
            raise EngineLostError("a rank refuses the engine's key") from error
        except (OSError, EOFError) as error:
            raise EngineLostError("a rank died") from error

    async def call(self, method: str, *args: object) -> object:
        """Call a method of the target; raises what it raised, EngineLostError when the rank is gone."""
        assert not self._is_calling, "one call at a time"
        self._is_calling = True
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, _framed((method, args)))
            succeeded, result = pickle.loads(await self._receive())
        except (OSError, EOFError) as error:
            self.close()
            raise EngineLostError("a rank died") from error
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self._is_calling = False
            if self._is_closed:
                self._socket.close()
        if not succeeded:
            raise result
        return result

    async def _receive(self) -> bytearray:
        return await self._receive_exactly(*_LENGTH.unpack(await self._receive_exactly(_LENGTH.size)))

    async def _receive_exactly(self, count: int) -> bytearray:
        received = bytearray(count)
        missing = memoryview(received)
        while missing:
            filled = await asyncio.get_running_loop().sock_recv_into(self._socket, missing)
            if not filled:
                raise EOFError
            missing = missing[filled:]
        return received

    def close(self) -> None:
        """End the connection, even while a call waits."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # the other end may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_calling:
            self._socket.close()


def _socket_of(connection: Connection[Any, Any]) -> socket.socket:
    """Take over a connection whose ends know each other; small messages leave at once."""
    with connection:
        own = socket.socket(fileno=os.dup(connection.fileno()))
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return own


def _framed(message: object) -> bytes:
    pickled = pickle.dumps(message)
    return _LENGTH.pack(len(pickled)) + pickled


def _receive(connected: socket.socket) -> bytearray:
    return _receive_exactly(connected, *_LENGTH.unpack(_receive_exactly(connected, _LENGTH.size)))


def _receive_exactly(connected: socket.socket, count: int) -> bytearray:
    received = bytearray(count)
    missing = memoryview(received)
    while missing:
        filled = connected.recv_into(missing)
        if not filled:
            raise EOFError
        missing = missing[filled:]
    return received
