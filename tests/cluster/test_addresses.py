"""Hosts and ports."""

from __future__ import annotations

import socket

import pytest

from kvorum.cluster.addresses import check_reachable, choose_ports, is_loopback, url_host
from kvorum.cluster.config import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "2001:db8::1", "example.com", "::ffff:192.0.2.1", ""])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_free_ports_are_runs_that_do_not_overlap() -> None:
    first, second = choose_ports("127.0.0.1", wanted=(0, 0), count=3, names=("a", "b"))
    assert not set(range(first, first + 3)) & set(range(second, second + 3))


def test_a_wanted_port_is_taken_as_it_is_and_a_busy_one_is_named() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port: cannot listen on 127\.0\.0\.1:{port}: .*; choose another or 0"):
            choose_ports("127.0.0.1", wanted=(port,), count=1, names=("port",))
    assert choose_ports("127.0.0.1", wanted=(port,), count=1, names=("port",)) == [port]


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        choose_ports("192.0.2.1", wanted=(8000,), count=1, names=("port",))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "127.0.0.1:many"])
def test_an_address_where_nothing_listens_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=f"nothing answers at '{address}'"):
        check_reachable(address)


def test_urls_name_hosts_that_clients_can_reach() -> None:
    assert url_host("0.0.0.0") == "127.0.0.1"
    assert url_host("::1") == "[::1]"
    assert url_host("10.0.0.1") == "10.0.0.1"
