"""The control plane runs on machines without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "cli",
    "router",
    "engine_deployment",
    "app",
    "launcher",
    "serve_command",
    "generate_command",
    "demo",
    "plan",
    "bench_command",
)


@pytest.mark.parametrize("module", MODULES)
def test_the_control_plane_imports_no_torch(module: str) -> None:
    code = f"import sys, kvorum.cluster.{module}; print([m for m in ('torch', 'triton') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
