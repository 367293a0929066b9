"""What routers may do alone adds up to what all may have together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.manager.safe_shares import Bounds, safe_shares
from kvorum.cluster.manager.types import TenantLimits

LIMITS = {
    "floored": TenantLimits("floored"),
    "capped": TenantLimits("capped", max_running=3, max_requests_per_minute=4),
}


@given(st.integers(1, 200), st.integers(0, 100), st.none() | st.integers(0, 300), st.integers(1, 5))
def test_no_ceiling_is_exceeded_and_no_floor_touched(
    blocks: int, floor: int, ceiling: int | None, routers: int
) -> None:
    floor = min(floor, blocks)
    bounds = {"floored": Bounds(floor, None), "capped": Bounds(0, ceiling)}
    shares = safe_shares(blocks, bounds, LIMITS, num_routers=routers)
    assert routers * shares["capped"].blocks <= min(blocks - floor, blocks if ceiling is None else ceiling)
    assert routers * shares["floored"].blocks <= blocks
    assert shares["capped"].max_running == max(1, 3 // routers)
    assert shares["capped"].max_requests_per_minute == max(1, 4 // routers)
    assert (shares["floored"].max_running, shares["floored"].max_requests_per_minute) == (None, None)


def test_without_an_engine_there_is_nothing_to_share() -> None:
    assert safe_shares(0, {"capped": Bounds(0, None)}, LIMITS, num_routers=1) == {}
