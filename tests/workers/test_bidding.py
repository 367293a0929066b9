"""What sequences bid with: curves of the right length that stay concave."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvorum.workers.bidding import curve_up_to

falling = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12).map(lambda gains: sorted(gains, reverse=True))


@st.composite
def curves(draw: st.DrawFn) -> tuple[float, ...]:
    """Return a rising concave curve from 0 to at most 1."""
    gains = draw(falling)
    whole = max(1.0, sum(gains))
    points = [0.0]
    for gain in gains:
        points.append(min(1.0, points[-1] + gain / whole))
    return tuple(points)


@given(curves(), st.integers(1, 30))
def test_a_curve_is_cut_or_drawn_on_without_losing_its_shape(curve: tuple[float, ...], most: int) -> None:
    longer = curve_up_to(curve, most)
    assert len(longer) == most + 1
    assert longer[: len(curve)] == curve[: most + 1]
    gains = [after - before for before, after in pairwise(longer)]
    assert all(gain >= -1e-12 for gain in gains)
    assert all(later <= sooner + 1e-9 for sooner, later in pairwise(gains))
    assert max(longer) <= 1.0


def test_what_was_not_measured_is_a_straight_line() -> None:
    assert curve_up_to((), 4) == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert curve_up_to((), 0) == (0.0,)
