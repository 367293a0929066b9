"""The committed code is what protoc makes of the committed .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("inference/v1/inference", "engine/v1/engine", "cache/v1/cache")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("protos")
    sources = [f"src/kvorum/protos/{package}.proto" for package in PACKAGES]
    outs = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    command = [sys.executable, "-P", "-m", "grpc_tools.protoc", "-Isrc", *outs, *sources]
    subprocess.run(command, cwd=ROOT, check=True)
    return out / "kvorum" / "protos"


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_generated_code_is_fresh(fresh: Path, package: str, suffix: str) -> None:
    assert (ROOT / "protos" / f"{package}{suffix}").read_text() == (fresh / f"{package}{suffix}").read_text()
