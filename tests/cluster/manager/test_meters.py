"""Requests a minute, and blocks a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.manager.meters import Flow, TokenBucket


def test_a_minutes_worth_may_come_at_once_and_then_one_by_one() -> None:
    bucket = TokenBucket.full(6, 0.0)
    assert [bucket.take(0.0) for _ in range(7)] == [0.0] * 6 + [10.0]
    assert bucket.take(4.0) == pytest.approx(6.0)
    assert bucket.take(10.0) == 0.0


@given(st.lists(st.floats(0.0, 5.0), max_size=60), st.integers(1, 20))
def test_never_more_pass_than_the_burst_and_the_rate_allow(waits: list[float], per_minute: int) -> None:
    bucket, now_s, passed = TokenBucket.full(per_minute, 0.0), 0.0, 0
    for wait_s in waits:
        now_s += wait_s
        passed += bucket.take(now_s) == 0.0
        assert passed <= per_minute * (1 + now_s / 60.0) + 1e-6


def test_a_steady_flow_is_measured_and_forgotten() -> None:
    flow = Flow()
    for step in range(3000):
        flow.add(5.0, step / 10)
    assert flow.per_second(299.9) == pytest.approx(50.0, rel=0.01)
    assert flow.per_second(600.0) < 0.01
