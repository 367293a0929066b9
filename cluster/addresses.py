"""Hosts and ports: which are this machine's alone, which are taken, which are free."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from kvorum.cluster.config import ConfigError

_CONNECT_TIMEOUT_S = 5.0


def is_loopback(host: str) -> bool:
    """Say whether a host is reachable from this machine only."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def choose_ports(host: str, *, wanted: Sequence[int], count: int, names: Sequence[str]) -> list[int]:
    """Return the first port of a free run of `count` for each wanted one; 0 means any.

    Raises:
        ConfigError: a wanted port is taken; names say which setting it is.
    """
    chosen: list[int] = []
    with contextlib.ExitStack() as held:
        for name, port in zip(names, wanted, strict=True):
            first = port or _find_run(host, count)
            for each in range(first, first + count):
                held.enter_context(_hold(host, each, name=name))
            chosen.append(first)
    return chosen


def check_reachable(address: str) -> None:
    """Raise ConfigError unless something listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(f"address: nothing answers at {address!r}, expected host:port or auto: {error}") from None


def url_host(host: str) -> str:
    """Return how a client on this machine writes the host of a URL."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _find_run(host: str, count: int) -> int:
    while True:
        with _bound_socket(host, 0) as probe:
            first: int = probe.getsockname()[1]
        if first + count <= 65536 and all(_is_free(host, port) for port in range(first, first + count)):
            return first


def _is_free(host: str, port: int) -> bool:
    try:
        _bound_socket(host, port).close()
    except OSError:
        return False
    return True


def _hold(host: str, port: int, *, name: str) -> socket.socket:
    try:
        return _bound_socket(host, port)
    except OSError as error:
        raise ConfigError(f"{name}: cannot listen on {host}:{port}: {error.strerror}; choose another or 0") from None


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
