"""The image: what it is built from is there, and it runs as the chart says."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from pathlib import Path

from kvtest.charts import ROOT, pods, ray_container, render

DOCKER = ROOT / "deploy" / "docker"


def instructions(name: str) -> list[str]:
    """Return the arguments of an instruction, wherever the Dockerfile has it."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    return [" ".join(line.split()[1:]) for line in text.splitlines() if line.startswith(f"{name} ")]


def test_the_linter_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_all_that_is_copied_is_there_and_not_ignored() -> None:
    copied = {
        name for words in instructions("COPY") if "--from" not in words for name in words.removesuffix(" ./").split()
    }
    allowed = {
        line.removeprefix("!")
        for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    links = {link.name for link in (ROOT / "src" / "kvorum").iterdir() if link.is_symlink()}
    assert links <= copied


def test_it_runs_as_the_user_and_with_the_environment_of_the_chart() -> None:
    _, head = next(pods(render({})))
    security = head["spec"]["securityContext"]
    assert instructions("USER") == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    (environment,) = (dict(pair.split("=", 1) for pair in each.split()) for each in instructions("ENV"))
    assert environment["PYTHONSAFEPATH"] == "1"
    mounts = {mount["mountPath"] for _, pod in pods(render({})) for mount in ray_container(pod)["volumeMounts"]}
    assert environment["HF_HOME"] in mounts


def test_it_is_healthy_when_a_router_is() -> None:
    (check,) = instructions("HEALTHCHECK")
    assert "http://127.0.0.1:8000/health" in check
    assert fnmatch.filter(instructions("EXPOSE"), "8000 9000")
