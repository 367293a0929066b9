"""Folders import one way, decisions import nothing that acts, and the control plane runs without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
WITHOUT_TORCH = (
    "kvorum.cluster.cli",
    "kvorum.cluster.router",
    "kvorum.kvstore.store",
    "kvorum.workers.scheduler",
)


def test_the_import_contracts_are_kept() -> None:
    result = subprocess.run(
        [LINT_IMPORTS, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


def test_the_client_brings_only_grpc_and_protobuf_along() -> None:
    heavy = "{'ray', 'torch', 'triton', 'pydantic', 'numpy', 'fastapi', 'aiohttp'}"
    code = f"import sys, kvorum.client; print(sorted({heavy} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.stdout.splitlines() == ["[]"], result.stdout + result.stderr


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_it_is_imported_without_torch(module: str) -> None:
    loaded = f"import sys, {module}; print(sorted({{'torch', 'triton'}} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", loaded], capture_output=True, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
