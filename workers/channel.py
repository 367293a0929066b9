"""The way of a step between an engine and a rank: one socket, one call at a time.

A call through Ray takes 1.6 ms, and nearly as much of each process's CPU, at every step; this takes a fraction. Ray
starts the rank, watches it and kills it. The rank hands out a fresh key through Ray, and takes nothing from who does
not have it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from kvorum.kvstore.errors import EngineLostError, KvorumError


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
        with self._listener, self._accept() as connection:
            _send_at_once(connection).close()
            while True:
                try:
                    while not connection.poll(self._idle_period_s):
                        if self._on_idle is not None:
                            self._on_idle()
                    method, args = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    return
                connection.send_bytes(pickle.dumps(self._call(method, args)))

    def _accept(self) -> Connection[Any, Any]:
        """Wait for the client that has the key."""
        while True:
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                return self._listener.accept()

    def _call(self, method: str, args: tuple[object, ...]) -> tuple[bool, object]:
        try:
            return True, getattr(self._target, method)(*args)
        except KvorumError as error:
            return False, error
        except Exception:
            # It need not be one that can be pickled.
            return False, RuntimeError(f"in a rank:\n{traceback.format_exc()}")


class ChannelClient:
    """An engine's end. Calls block; one at a time, all from one thread."""

    def __init__(self, address: ChannelAddress) -> None:
        """Connect; raises EngineLostError."""
        try:
            self._connection: Connection[Any, Any] = Client((address.host, address.port), authkey=address.key)
        except AuthenticationError as error:
            raise EngineLostError("a rank refuses the engine's key") from error
        except (OSError, EOFError) as error:
            raise EngineLostError("a rank died") from error
        self._socket = _send_at_once(self._connection)

    def call(self, method: str, *args: object) -> object:
        """Call a method of the target; raises what it raised, EngineLostError when the rank is gone."""
        try:
            # Not `send`: torch has that pass tensors on by handles that only a child process can take.
            self._connection.send_bytes(pickle.dumps((method, args)))
            succeeded, result = pickle.loads(self._connection.recv_bytes())
        except (OSError, EOFError) as error:
            raise EngineLostError("a rank died") from error
        if not succeeded:
            raise result
        return result

    def close(self) -> None:
        """End the connection, even while a call is waiting in another thread."""
        with contextlib.suppress(OSError):  # the other end may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _send_at_once(connection: Connection[Any, Any]) -> socket.socket:
    """Have small messages leave at once; returns a second handle of the connection's socket."""
    handle = socket.socket(fileno=os.dup(connection.fileno()))
    handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return handle
