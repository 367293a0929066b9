"""Building the native library: once, into a cache, on every SIMD path, and under the sanitizers."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvorum.kernels.cpu import build
from kvorum.kernels.cpu.build import SANITIZER_FLAGS, CompilerError, library_path

CHECK = Path(__file__).parent / "native_check.py"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def fake_compiler(folder: Path, script: str) -> None:
    path = folder / "bin" / "g++"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_it_compiles_once_and_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counter = cache / "runs"
    write_output = (
        f'case "$*" in *--version*) echo 1;; *) echo run >> {counter}; for out; do :; done; : > "$out";; esac'
    )
    fake_compiler(cache, write_output)
    monkeypatch.setenv("PATH", f"{cache / 'bin'}:/usr/bin:/bin")
    with caplog.at_level(logging.WARNING):
        first = library_path()
        assert library_path() == first
    assert counter.read_text() == "run\n"
    assert [record.message.startswith("compiling the CPU kernels") for record in caplog.records] == [True]
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert library_path() != first, "other flags are another library"


def test_without_a_compiler_the_error_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(CompilerError, match=r"install g\+\+"):
        library_path()


def test_what_the_compiler_says_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(cache, 'case "$*" in *--version*) echo 1;; *) echo "line 7: no such thing" >&2; exit 1;; esac')
    monkeypatch.setenv("PATH", f"{cache / 'bin'}:/usr/bin:/bin")
    with pytest.raises(CompilerError, match="no such thing"):
        library_path()
    assert not list(cache.rglob("*.so"))


def test_a_compiler_that_hangs_is_given_up(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(cache, 'case "$*" in *--version*) echo 1;; *) exec sleep 30;; esac')
    monkeypatch.setenv("PATH", f"{cache / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(build, "TIMEOUT_S", 0.2)
    with pytest.raises(CompilerError, match="has not finished"):
        library_path()


def run_check(library: Path, *, preload: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
    }
    return subprocess.run(
        [sys.executable, str(CHECK), str(library)], env=environment, capture_output=True, text=True, timeout=300
    )


# Not each path on each machine: what the processor has, and below. -O1 compiles several times faster.
@pytest.mark.parametrize(
    ("simd", "flags"),
    [
        ("avx2", ("-march=x86-64-v3", "-O1")),
        ("portable", ("-march=x86-64", "-O1")),
    ],
)
def test_every_simd_path_equals_the_reference(tmp_path: Path, simd: str, flags: tuple[str, ...]) -> None:
    machine = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    if simd == "avx2" and " avx2 " not in machine:
        pytest.skip("this processor has no AVX2")
    library = tmp_path / "lib.so"
    build._compile("g++", (*build.FLAGS, *flags), library)
    result = run_check(library)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split()[-1] == simd


def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    build._compile("g++", (*build.FLAGS, *SANITIZER_FLAGS, "-O1"), library)
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    result = run_check(library, preload=asan.stdout.strip())
    assert result.returncode == 0, result.stderr[-3000:]
