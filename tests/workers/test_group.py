"""How cores are shared between engines; the actors themselves are tested in tests/integration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.workers.group import share_of_cores


def ranks_that_fit(cores: list[int], share: float) -> int:
    return sum(int(count / share + 1e-9) for count in cores)


@given(cores=st.lists(st.integers(1, 64), min_size=1, max_size=5), num_ranks=st.integers(1, 80))
def test_it_is_the_most_with_which_all_ranks_find_room(cores: list[int], num_ranks: int) -> None:
    share = share_of_cores(cores, num_ranks=num_ranks)
    assert ranks_that_fit(cores, share) >= num_ranks
    if share >= 1:
        assert ranks_that_fit(cores, share + 1) < num_ranks


def test_ranks_that_outnumber_cores_share_them() -> None:
    assert share_of_cores([], num_ranks=1) == 1
    assert share_of_cores([2], num_ranks=4) == 0.5
    assert share_of_cores([2], num_ranks=5) == pytest.approx(1 / 3)
    assert share_of_cores([8, 4], num_ranks=3) == 4
