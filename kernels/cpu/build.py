"""Compile the C++ in native/ for this machine's processor, once, into a cache.

    python -P -m kvorum.kernels.cpu.build

builds ahead of the first use. The cache key is made of the sources, the flags, the compiler and the processor, so that
a home directory shared by different machines holds one library for each. Imports no torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
SANITIZER_FLAGS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
TIMEOUT_S = 300.0

_NATIVE = Path(__file__).parent / "native"
_COMPILERS = ("g++", "c++")
_log = logging.getLogger(__name__)


class CompilerError(Exception):
    """There is no C++ compiler, or it failed; the message says what to do."""


def library_path() -> Path:
    """Return the compiled library, compiling it first if it is not in the cache; raises CompilerError."""
    compiler = find_compiler()
    path = _cache_folder() / _key(compiler, FLAGS) / "libkvorum_cpu.so"
    if not path.exists():
        _log.warning("compiling the CPU kernels with %s, once for this machine (takes some 10 s)", compiler)
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, FLAGS, path)
    return path


def sources() -> list[Path]:
    """Return the files that are compiled, without the headers."""
    return sorted(_NATIVE.glob("*.cc"))


def find_compiler() -> str:
    """Return the system's C++ compiler; raises CompilerError."""
    for name in _COMPILERS:
        if found := shutil.which(name):
            return found
    raise CompilerError(
        "no C++ compiler found: install g++ (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
    )


def _compile(compiler: str, flags: Sequence[str], path: Path) -> None:
    """Compile beside the target, then move into place: of two processes that compile at once, either may win."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        command = [compiler, *flags, *map(str, sources()), "-o", str(output)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CompilerError(f"{compiler} has not finished in {TIMEOUT_S:g} s") from None
        except subprocess.CalledProcessError as error:
            raise CompilerError(f"{compiler} failed:\n{error.stderr[-2000:]}") from None
        output.replace(path)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvorum" / "kernels"


def _key(compiler: str, flags: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for part in (compiler, version, *flags, _processor()):
        digest.update(part.encode())
    for path in sorted(_NATIVE.iterdir()):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """Return what -march=native may depend on: the processor's model and features."""
    names = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    first = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in first if line.split("\t", 1)[0].strip().startswith(names))


def main() -> None:
    """Build ahead of the first use; a machine without a compiler is told, and goes on."""
    logging.basicConfig(format="%(message)s")
    try:
        library_path()
    except CompilerError as error:
        _log.warning("the CPU kernels were not compiled, the slow reference will compute: %s", error)


if __name__ == "__main__":
    main()
