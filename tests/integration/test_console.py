"""The console on a real cluster: its pages, its stream, and lessons from an actor that may die."""

from __future__ import annotations

import json

import psutil
import pytest

from kvorum.cluster.console.lesson import NUM_TOKENS
from kvtest.cluster import ClusterUnderTest

pytestmark = [pytest.mark.ray, pytest.mark.model]


def test_pages_and_stream_come_from_the_router(cluster: ClusterUnderTest) -> None:
    assert "kvorum console" in cluster.http.get("/console/").text
    with cluster.http.stream("GET", "/console/stream") as response:
        lines = (json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line)
        assert next(lines)["model"]["num_layers"] > 0
        assert len(next(lines)["cluster"]["engines"]) == cluster.running.config.num_engines


def test_lessons_are_given_by_an_actor_that_is_replaced_when_it_dies(cluster: ClusterUnderTest) -> None:
    lesson = cluster.http.get("/console/learn/caching", timeout=120).json()
    assert [cost["projections_with_cache"] for cost in lesson["costs"]] == [5] + [1] * (NUM_TOKENS - 1)
    assert [cost["projections_without"] for cost in lesson["costs"]] == list(range(5, 5 + NUM_TOKENS))
    refused = cluster.http.get("/console/learn/evictions", params={"budget": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "budget")
    (actor,) = (each for each in psutil.Process().children(recursive=True) if each.cmdline()[:1] == ["ray::Lesson"])
    actor.kill()
    actor.wait(10)
    lost = cluster.http.get("/console/learn/evictions", params={"budget": 40}, timeout=120)
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_lost")
    assert cluster.http.get("/console/learn/evictions", params={"budget": 40}, timeout=120).status_code == 200
