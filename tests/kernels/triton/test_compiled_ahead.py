"""Every kernel compiles for GPUs that are not here, without spills and within what its speed was planned with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("build_ahead.py")
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
NVIDIA = TARGETS[:3]
# ptxas may spend hours on a kernel that it dislikes.
TIMEOUT_S = 300

KERNELS = {
    "append_kernel",
    "choose_victims_kernel",
    "column_sums_kernel",
    "compact_kernel",
    "copy_blocks_kernel",
    "decode_attention_kernel",
    "decode_finish_kernel",
    "gated_activation_kernel",
    "prefill_attention_kernel",
    "residual_norm_kernel",
    "select_kernel",
    "slot_values_kernel",
}
# Registers of a thread: on NVIDIA, on AMD. What is not here stays below SMALL.
REGISTERS = {
    "prefill_attention_kernel": (232, 304),
    "column_sums_kernel": (144, 216),
    "decode_attention_kernel": (168, 256),
}
SMALL = (104, 64)
# Bytes of shared memory.
SHARED = {
    "prefill_attention_kernel": 100 * 1024,
    "column_sums_kernel": 84 * 1024,
    "decode_attention_kernel": 46 * 1024,
}
SMALL_SHARED = 2048
# One pointer that ptxas puts aside, once and outside of the loops.
STACK = {"decode_finish_kernel": 8}

REGISTERS_OF_A_MULTIPROCESSOR = 65536
SHARED_OF_A_MULTIPROCESSOR = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100": 228 * 1024}
SHARED_OF_THE_SYSTEM = 1024  # for each program


@dataclass(frozen=True)
class Built:
    model: str
    kernel: str
    threads: int
    registers: int
    stack: int
    shared: int


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Built]]:
    @cache
    def run(target: str) -> list[Built]:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")
        }
        environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp(target)), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-P", SCRIPT, target],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its compilers too
            raise
        assert process.returncode == 0, output
        return [Built(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]

    return run


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_stays_within_its_limits(build: Callable[[str], list[Built]], target: str) -> None:
    built = build(target)
    assert {it.kernel for it in built} == KERNELS
    amd = target not in NVIDIA
    over = [
        it
        for it in built
        if it.registers > REGISTERS.get(it.kernel, SMALL)[amd]
        or it.shared > SHARED.get(it.kernel, SMALL_SHARED)
        or it.stack > STACK.get(it.kernel, 0)
    ]
    assert not over


@pytest.mark.parametrize("target", NVIDIA)
def test_three_decode_programs_fit_on_a_multiprocessor(build: Callable[[str], list[Built]], target: str) -> None:
    for it in build(target):
        if it.kernel == "decode_attention_kernel":
            allocated = -(-it.registers // 8) * 8 * it.threads
            assert 3 * allocated <= REGISTERS_OF_A_MULTIPROCESSOR, it
            assert 3 * (it.shared + SHARED_OF_THE_SYSTEM) <= SHARED_OF_A_MULTIPROCESSOR[target], it
