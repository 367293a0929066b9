"""What routers may do alone adds up to what all may have together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.manager.safe_shares import safe_shares
from kvorum.cluster.manager.types import ClusterView, EngineView, TenantLimits, TenantView


def view(*, engine_blocks: int, floor: int = 0, ceiling: int | None = None) -> ClusterView:
    engines = (EngineView("a", engine_blocks, 0, 0, 0, engine_blocks, 0, 0.0),) if engine_blocks else ()
    tenants = (
        TenantView("floored", 0, 0, 0, floor, None, 0, 0, 0),
        TenantView("capped", 0, 0, 0, 0, ceiling, 0, 0, 0),
    )
    return ClusterView(engines, tenants)


LIMITS = {
    "floored": TenantLimits("floored"),
    "capped": TenantLimits("capped", max_running=3, max_requests_per_minute=4),
}


@given(st.integers(1, 200), st.integers(0, 100), st.none() | st.integers(0, 300), st.integers(1, 5))
def test_no_ceiling_is_exceeded_and_no_floor_touched(
    blocks: int, floor: int, ceiling: int | None, routers: int
) -> None:
    floor = min(floor, blocks)
    shares = safe_shares(view(engine_blocks=blocks, floor=floor, ceiling=ceiling), LIMITS, num_routers=routers)
    assert routers * shares["capped"].blocks <= min(blocks - floor, blocks if ceiling is None else ceiling)
    assert routers * shares["floored"].blocks <= blocks
    assert shares["capped"].max_running == max(1, 3 // routers)
    assert shares["capped"].max_requests_per_minute == max(1, 4 // routers)
    assert (shares["floored"].max_running, shares["floored"].max_requests_per_minute) == (None, None)


def test_without_an_engine_there_is_nothing_to_share() -> None:
    assert safe_shares(view(engine_blocks=0), LIMITS, num_routers=1) == {}
