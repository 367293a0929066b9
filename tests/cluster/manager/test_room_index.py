"""The roomiest engines are found first, and every one that has enough is found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.manager.room_index import RoomIndex


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.none() | st.integers(-5, 5000)), max_size=40), st.integers(0, 5000)
)
def test_it_finds_all_that_have_enough(changes: list[tuple[str, int | None]], least: int) -> None:
    index, model = RoomIndex(), dict[str, int]()
    for name, free in changes:
        if free is None:
            index.drop(name)
            model.pop(name, None)
        else:
            index.put(name, free)
            model[name] = free
    found = [*index.roomiest(least)]
    assert len(found) == len({*found})
    assert {name for name, free in model.items() if free >= least} <= {*found}
    assert all(model[name] >= least * 8 // 9 - 1 for name in found)
    assert all(model[before] * 9 // 8 + 1 >= model[after] for i, before in enumerate(found) for after in found[i:])


def test_equal_ones_take_turns() -> None:
    index = RoomIndex()
    for name in "abc":
        index.put(name, 100)
    index.put("a", 100)
    assert [*index.roomiest(1)] == ["b", "c", "a"]
