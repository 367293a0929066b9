"""Every kernel against its twin, in processes of their own: triton looks for its interpreter as it is imported.

By hand: TRITON_INTERPRET=1 pytest tests/kernels/triton/twins
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TWINS = Path(__file__).parent / "twins"
ROOT = Path(__file__).parents[3]


def run_twins(*, interpret: bool) -> None:
    pytest_command = (Path(sys.executable).with_name("pytest"), TWINS, "-q", "--tb=short", "-p", "no:cacheprovider")
    result = subprocess.run(
        [*pytest_command, f"--confcutdir={TWINS}"],  # the suite's own conftest imports ray, for seconds
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_in_the_interpreter() -> None:
    run_twins(interpret=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_compiled() -> None:
    run_twins(interpret=False)
