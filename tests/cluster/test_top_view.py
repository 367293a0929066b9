"""What `kvorum top` draws."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from kvorum.cluster.manager.types import ClusterView, EngineView, TenantView
from kvorum.cluster.top_view import TopScreen, ladder_events

ENGINE = EngineView("engine-a", 100, 60, 40, 20, 20, 3, 0.25, {"prefix": 2})
TENANT = TenantView("acme", 60, 40, 20, 10, 80, 3, 1, 7, {"rate": 2}, 0.5)


def test_steps_of_the_ladder_are_told_as_they_happen() -> None:
    before = ClusterView(engines=(ENGINE,))
    after = ClusterView(engines=(replace(ENGINE, reclaimed={"prefix": 2, "shrink": 5}), replace(ENGINE, engine_id="b")))
    assert ladder_events(before, after) == ["engine-a: 5 blocks by shrink"]


def test_the_screen_shows_engines_tenants_price_drift_and_events() -> None:
    screen, console = TopScreen(), Console(width=160, record=True, file=io.StringIO())
    view = ClusterView((ENGINE,), (TENANT,), price=0.25, drift_blocks=0)
    screen.update(view, clock="12:00:00")
    shrunk = replace(view, engines=(replace(ENGINE, reclaimed={"shrink": 5}),), drift_blocks=3)
    console.print(screen.update(shrunk, clock="12:00:01"))
    text = console.export_text()
    for part in (
        "engine-a",
        "acme",
        "60 of 100 blocks",
        "0.25",
        "off by 3",
        "12:00:01 engine-a: 5 blocks by shrink",
        "50%",
    ):
        assert part in text
