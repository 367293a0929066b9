"""An engine whose process is killed: its streams say so, and another one takes its place. Runs after all others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import grpc
import pytest

from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc
from kvtest.cluster import METADATA, ClusterUnderTest
from kvtest.servers import Unchecked, details_of

pytestmark = pytest.mark.ray


def engine_process() -> int:
    """Find our own engine's process: Ray names it for its deployment."""
    mine = os.getpid()
    for entry in Path("/proc").iterdir():
        if (
            entry.name.isdigit()
            and b"ServeReplica:kvorum:Engine" in _read(entry / "cmdline")
            and _is_below(entry, mine)
        ):
            return int(entry.name)
    raise AssertionError("no engine process")


def _is_below(entry: Path, ancestor: int) -> bool:
    pid = int(entry.name)
    while pid > 1:
        if pid == ancestor:
            return True
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
        pid = int(fields[1]) if fields else 0
    return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_killed_engine_ends_its_streams_and_is_replaced(cluster: ClusterUnderTest) -> None:
    stub = pb_grpc.InferenceServiceStub(cluster.channel)  # type: ignore[no-untyped-call]  # generated code
    request = pb.GenerateRequest(text="Hello world", sampling=pb.SamplingParams(max_tokens=800))
    call: Unchecked = stub.Generate(request, metadata=METADATA)
    next(call)
    body = {"prompt": "Hello world", "max_tokens": 800, "stream": True}
    with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(engine_process(), signal.SIGKILL)
        rest = "".join(lines)
    assert '"code":"engine_lost"' in rest
    assert "[DONE]" not in rest
    with pytest.raises(grpc.RpcError) as lost:
        list(call)
    assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details_of(lost.value)["ErrorInfo"].reason == "ENGINE_LOST"
    refused = cluster.completion()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_lost")
    assert cluster.http.get("/health").status_code == 503
    deadline_s = time.monotonic() + 60
    while cluster.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline_s, "the engine was not replaced"
        time.sleep(0.2)
    assert cluster.completion().json()["choices"][0]["text"] == "Hello worldHello world"
