"""One server at a time: started in a session of its own, waited for, stopped by its id, and watched while it works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types
from peers import Command

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0
_LOG_TAIL = 15
_TICK_S = 0.25


class PeerError(Exception):
    """A server did not come up."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is up."""

    base_url: str
    process_id: int
    start_s: float

    def memory_bytes(self) -> int:
        """Return the memory of all its processes, shared pages counted once."""
        return sum(process.memory_full_info().pss for process in _tree(self.process_id))

    def cpu_s(self) -> float:
        """Return the CPU seconds of its processes that still run."""
        return sum(_cpu_s(process) for process in _tree(self.process_id))


@dataclass(slots=True)
class ForeignLoad:
    """How many cores were busy with neither the server nor this process; many make a measurement void."""

    begin_s: float
    busy_s: float
    ours_s: float

    @classmethod
    def begin(cls, server: Server) -> ForeignLoad:
        """Start watching."""
        return cls(time.monotonic(), _busy_s(), server.cpu_s() + time.process_time())

    def cores(self, server: Server) -> float:
        """Return the mean number of cores since then."""
        ours_s = server.cpu_s() + time.process_time() - self.ours_s
        return max(0.0, (_busy_s() - self.busy_s - ours_s) / (time.monotonic() - self.begin_s))


@dataclass(slots=True)
class Pauses:
    """How long this process was held up altogether: stopped, or without a core, for more than a moment at a time."""

    seconds: float = 0.0

    async def watch(self) -> None:
        """Count until cancelled."""
        while True:
            begin_s = time.monotonic()
            await asyncio.sleep(_TICK_S)
            late_s = time.monotonic() - begin_s - _TICK_S
            self.seconds += late_s if late_s > _TICK_S else 0.0


@contextlib.contextmanager
def running(command: Command, *, port: int, log: Path) -> Iterator[Server]:
    """Start a server, wait until it answers, and stop it with everything that it started."""
    begin_s = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(argument) for argument in command.arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONSAFEPATH": ""} | dict(command.environment),
            cwd=log.parent,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_up(process, url, log)
            yield Server(url, process.pid, time.monotonic() - begin_s)
        finally:
            _stop(process)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            tail = log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
            raise PeerError("\n".join(["did not come up; the end of its log:", *tail]))
        time.sleep(0.25)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to stop, wait, then kill whatever is left of its session."""
    started = _tree(process.pid)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    for left in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def _tree(process_id: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(process_id)
        return [process, *process.children(recursive=True)]
    return []


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)
