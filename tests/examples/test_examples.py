"""Every example runs against a server and says what it should: none may rot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.http import create_app
from kvtest.servers import grpc_server, http_server
from kvtest.stack import running_stack

FOLDER = Path(__file__).parents[2] / "examples"
# The fake engine repeats its prompt, of which eviction takes the oldest bytes.
SAID: dict[str, tuple[str, ...]] = {
    "openai_chat.py": (
        "user: What is a KV cache?\nassist\n",
        ": Why does it grow?\n",
        "kept 33 tokens, evicted 32, retained mass 0.508\n",
    ),
    "langchain_chat.py": ("Say something about caches.", "Say something about quotas."),
    "kvorum_client.py": (": What is a KV cache?", "finish_reason='length'"),
    "curl.sh": (
        '"object":"list"',
        '"text":"Once upo"',
        '"retained_mass":1.0',
        "data: [DONE]",
        '"param":"temperature"',
    ),
    "grpcurl.sh": (
        "kvorum.inference.v1.InferenceService",
        '"status": "SERVING"',
        '"text": "O"',
        '"FINISH_REASON_LENGTH"',
    ),
}
# Too large to be installed for tests: `make bench-clients` runs them.
BENCHMARKS = {"aiperf.sh", "guidellm.sh"}


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[dict[str, str]]:
    """Serve both protocols, and yield the environment that leads there."""
    async with (
        running_stack(ClusterConfig(api_key="s3cret")) as stack,
        http_server(create_app(stack.frontend)) as url,
        grpc_server(stack) as target,
    ):
        yield {"KVORUM_URL": url, "KVORUM_GRPC": target, "KVORUM_API_KEY": "s3cret", "KVORUM_MODEL": "tiny"}


def with_grpcurl(folder: Path) -> str:
    """Return a PATH with grpcurl, or its stand-in."""
    if not shutil.which("grpcurl"):
        stand_in = folder / "grpcurl"
        support = Path(__file__).parents[1] / "support"
        stand_in.write_text(f'#!/bin/sh\nPYTHONPATH={support} exec {sys.executable} -P -m kvtest.grpcurl "$@"\n')
        stand_in.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("name", sorted(SAID))
def test_an_example_says_what_it_should(name: str, tmp_path: Path) -> None:
    program = [sys.executable, "-P"] if name.endswith(".py") else ["sh"]

    async def main() -> tuple[int | None, str]:
        async with serving() as environment:
            process = await asyncio.create_subprocess_exec(
                *program,
                str(FOLDER / name),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | environment | {"PATH": with_grpcurl(tmp_path)},
            )
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            return process.returncode, out.decode()

    status, out = asyncio.run(main())
    assert status == 0, out
    for part in SAID[name]:
        assert part in out


def test_every_example_is_run_somewhere() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(SAID) | BENCHMARKS
