"""Commands as people run them, with all that they start."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

KVORUM = str(Path(sys.executable).with_name("kvorum"))
TAG = "KVORUM_TEST_TAG"


@dataclass(frozen=True)
class Command:
    """A running command, and a mark in the environment of all that it starts."""

    process: subprocess.Popen[str]
    tag: str

    def wait_for(self, text: str, *, timeout_s: float = 120.0) -> str:
        """Read standard output and error until a line has text; return it."""
        deadline_s = time.monotonic() + timeout_s
        assert self.process.stdout
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return line
            assert time.monotonic() < deadline_s, seen
        raise AssertionError(f"ended without {text!r}: {seen}")

    def processes(self) -> list[tuple[int, str]]:
        """Return the ids and command lines of all that it started and that still runs, itself included."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f"{TAG}={self.tag}".encode() in (entry / "environ").read_bytes():
                    found.append((int(entry.name), (entry / "cmdline").read_text()))
        return found

    def survivors(self) -> list[str]:
        """Return the command lines of what still runs."""
        return [title for _, title in self.processes()]


@contextlib.contextmanager
def command(
    *arguments: str, program: str = KVORUM, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Command]:
    tag = uuid.uuid4().hex
    process = subprocess.Popen(
        [program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment | {TAG: tag},
        start_new_session=True,
    )
    try:
        yield Command(process, tag)
    finally:
        process.kill()
        process.communicate()


def wait_until_gone(running: Command) -> None:
    deadline_s = time.monotonic() + 10
    while survivors := running.survivors():
        assert time.monotonic() < deadline_s, survivors
        time.sleep(0.1)
