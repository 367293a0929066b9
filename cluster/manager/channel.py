"""How routers, engines and operators reach the cache manager's port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import grpc.aio

from kvorum.cluster.manager.tls import SERVER_NAME, ControlTls, channel_credentials
from kvorum.kvstore.errors import KvorumError

# Seen from here, a manager that is started anew is back as soon as it listens.
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


class ManagerLostError(KvorumError):
    """The cache manager cannot be reached now."""


@dataclass(frozen=True, slots=True)
class ManagerAddress:
    """Where the manager listens, and the token that callers must bring."""

    target: str
    token: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call brings along."""
        return (("authorization", f"Bearer {self.token}"),)


# Finds the manager; raises ManagerLostError while there is none.
FindManager = Callable[[], Awaitable[ManagerAddress]]


def open_channel(address: ManagerAddress, tls: ControlTls | None) -> grpc.aio.Channel:
    """Return a channel to the manager; close it when done."""
    if tls is None:
        return grpc.aio.insecure_channel(address.target, options=_OPTIONS)
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME))
    return grpc.aio.secure_channel(address.target, channel_credentials(tls), options=options)
