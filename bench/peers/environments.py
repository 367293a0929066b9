"""An environment of its own for each peer, below build/, made once."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "build" / "peers"
UV = ROOT / ".venv" / "bin" / "uv"


def python_of(name: str | None) -> Path:
    """Return the interpreter of a peer's environment; None is kvorum's own."""
    return (PEERS / name if name else ROOT / ".venv") / "bin" / "python"


def ensure(name: str, packages: Sequence[str], *, without: Sequence[str] = ()) -> None:
    """Create a peer's environment unless it has just these packages; `without` names what they need but we do not."""
    folder = PEERS / name
    stamp = folder / "packages.txt"
    wanted = "\n".join([*packages, *(f"without {package}" for package in without)])
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing {' '.join(packages)} into {folder.relative_to(ROOT)} …", flush=True)
    subprocess.run([UV, "venv", "--quiet", "--clear", folder], check=True)
    overrides = folder / "overrides.txt"
    overrides.write_text("".join(f"{package} ; sys_platform == 'never'\n" for package in without))
    command = [str(UV), "pip", "install", "--quiet", "--python", str(python_of(name)), "--overrides", str(overrides)]
    command += [*_find_links(), *packages]
    subprocess.run(command, check=True)
    stamp.write_text(wanted)


def alias(name: str, *, distribution: str, version: str) -> None:
    """Let a distribution be found under another name, for a package that looks itself up by that name."""
    (site_packages,) = (PEERS / name / "lib").glob("python*/site-packages")
    metadata = site_packages / f"{distribution}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")


def version_of(name: str | None, distribution: str) -> str:
    """Return the version of what is installed in a peer's environment."""
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run([python_of(name), "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _find_links() -> list[str]:
    """Hand on a folder of wheels that pip is told to look at; uv reads no pip configuration."""
    pip = [str(python_of(None)), "-m", "pip", "config", "get", "global.find-links"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    links = os.environ.get("PIP_FIND_LINKS", done.stdout).split()
    return [argument for link in links for argument in ("--find-links", link)]
