"""A watcher that applies every change sees what the manager sees."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.manager.types import ClusterView, EngineView, TenantView
from kvorum.cluster.manager.watching import ViewChange, apply, difference
from kvorum.cluster.manager.wire import change_from_pb, change_to_pb

_COUNTS = st.integers(0, 3)


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    def engine(name: str) -> EngineView:
        total, held, reserved, cached, free, leases = draw(st.tuples(*[_COUNTS] * 6))
        price, reclaimed = draw(st.floats(0, 2)), {"shrink": draw(_COUNTS)}
        return EngineView(name, total, held, reserved, cached, free, leases, price, reclaimed)

    def tenant(name: str) -> TenantView:
        held, reserved, cached, floor, running, waiting, admitted = draw(st.tuples(*[_COUNTS] * 7))
        ceiling = draw(st.none() | _COUNTS)
        return TenantView(name, held, reserved, cached, floor, ceiling, running, waiting, admitted, {"rate": held}, 0.5)

    names = st.lists(st.sampled_from("abcd"), unique=True).map(sorted)
    return ClusterView(
        tuple(engine(name) for name in draw(names)),
        tuple(tenant(name) for name in draw(names)),
        price=draw(st.floats(0, 2)),
        drift_blocks=draw(st.integers(-2, 2)),
    )


@given(st.lists(views(), min_size=1, max_size=5))
def test_changes_add_up_to_the_view_also_over_the_wire(looks: list[ClusterView]) -> None:
    seen = ClusterView()
    for number, look in enumerate(looks):
        change = difference(seen, look)
        assert change_from_pb(change_to_pb(number, change)) == change
        seen = apply(seen, change)
        assert seen == look


def test_what_stays_the_same_is_not_sent_again() -> None:
    look = ClusterView(engines=(EngineView("a", 10, 1, 1, 0, 9, 1, 0.0),))
    assert difference(look, look) == ViewChange()
