"""What holds for every test: fixed seeds, no Ray unless a test is marked for it, nothing but the loopback."""

from __future__ import annotations

import os
import random

import hypothesis
import pytest

from kvorum.workers.config import COMPUTE_ENVIRONMENT

# Before anything imports ray: no usage reports, no tokens between local processes.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Before anything imports torch.
os.environ.update(COMPUTE_ENVIRONMENT)

hypothesis.settings.register_profile("kvorum", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("kvorum")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)


@pytest.fixture(autouse=True)
def _no_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unit tests that start Ray would take seconds and leave processes behind."""
    if request.node.get_closest_marker("ray"):
        return

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("only tests marked `ray` may start Ray")

    import ray

    monkeypatch.setattr(ray, "init", refuse)
