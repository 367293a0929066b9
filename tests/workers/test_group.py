"""How cores are shared between engines; the actors themselves are tested in tests/integration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvorum.workers.group import share_of_cores


def engines_that_fit(cores: list[int], share: int) -> int:
    return sum(count // share for count in cores)


@given(cores=st.lists(st.integers(0, 64), max_size=5), num_engines=st.integers(1, 8))
def test_it_is_the_most_with_which_all_engines_find_room(cores: list[int], num_engines: int) -> None:
    share = share_of_cores(cores, num_engines=num_engines)
    assert share == 1 or engines_that_fit(cores, share) >= num_engines
    assert engines_that_fit(cores, share + 1) < num_engines


def test_a_share_is_at_least_one_core() -> None:
    assert share_of_cores([], num_engines=1) == 1
    assert share_of_cores([2], num_engines=5) == 1
    assert share_of_cores([8, 4], num_engines=3) == 4
