"""Engines are added while pools or batches fill, and never more than the load needs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.autoscaling import LOAD_METRIC, TARGET_LOAD, desired_engines, engine_load, scale_engines
from kvtest.stack import DEFAULT_INFO, IDLE_STATS


@given(st.lists(st.floats(0, 20), min_size=1, max_size=50))
def test_it_is_the_fewest_that_carry_the_load(loads: list[float]) -> None:
    engines = desired_engines(loads)
    assert sum(loads) / engines <= TARGET_LOAD * (1 + 1e-6)
    assert engines == 1 or sum(loads) / (engines - 1) > TARGET_LOAD * (1 - 1e-6)


def test_held_blocks_and_waiting_requests_both_count() -> None:
    info = replace(DEFAULT_INFO, num_blocks=64, max_num_seqs=4)
    assert engine_load(info, IDLE_STATS) == 0
    assert engine_load(info, replace(IDLE_STATS, blocks_held=48, num_running=1)) == 0.75
    assert engine_load(info, replace(IDLE_STATS, blocks_held=16, num_running=4, num_waiting=4)) == 2.0


@pytest.mark.parametrize(("metrics", "expected"), [({}, 3), (None, 3), ({LOAD_METRIC: {"a": 1.5, "b": 0.75}}, 3)])
def test_serve_gets_the_number_and_without_reports_keeps_its_own(
    metrics: dict[str, dict[str, float]] | None, expected: int
) -> None:
    context = SimpleNamespace(target_num_replicas=3, aggregated_metrics=metrics)
    assert scale_engines(context) == (expected, {})  # type: ignore[arg-type]  # what it reads of Serve's context
