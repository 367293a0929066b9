"""A tenant's room goes to the engines where its blocks are worth most above the engine's own price."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.manager.shares import Demand, Split, split
from kvorum.workers.governance import NUM_WORTH_BINS, least_worth


def histogram(counts: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(counts.get(index, 0) for index in range(NUM_WORTH_BINS))


DEMANDS = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(
        lambda counts, price: Demand(histogram(counts), price),
        st.dictionaries(st.integers(0, 4), st.integers(1, 3), max_size=2),
        st.sampled_from([0.0, 0.05, 0.2, 0.6]),
    ),
    min_size=1,
)


def surplus(demand: Demand, allowance: int) -> float:
    """What the best so many blocks are worth above the engine's price; more than is wanted is worth nothing."""
    worths = [least_worth(index) for index, count in enumerate(demand.worths) for _ in range(count)]
    return sum(worth - demand.price for worth in worths[:allowance])


@given(DEMANDS, st.integers(0, 20))
def test_no_split_gains_more_than_the_worthwhile_part_of_it(demands: dict[str, Demand], room: int) -> None:
    found = split(demands, room)
    assert sum(found.allowances.values()) <= room
    best = max(
        sum(surplus(demand, count) for demand, count in zip(demands.values(), counts, strict=True))
        for counts in itertools.product(*(range(sum(demand.worths) + 1) for demand in demands.values()))
        if sum(counts) <= room
    )
    worthwhile = {
        name: sum(count for index, count in enumerate(demand.worths) if least_worth(index) > demand.price)
        for name, demand in demands.items()
    }
    kept = {name: min(allowance, worthwhile[name]) for name, allowance in found.allowances.items()}
    assert abs(sum(surplus(demands[name], count) for name, count in kept.items()) - best) < 1e-9


@given(DEMANDS, st.integers(0, 20))
def test_the_price_is_the_best_surplus_that_got_nothing(demands: dict[str, Demand], room: int) -> None:
    found = split(demands, room)
    left_out = [
        worth - demand.price
        for name, demand in demands.items()
        for worth in [least_worth(i) for i, count in enumerate(demand.worths) for _ in range(count)][
            found.allowances[name] :
        ]
    ]
    assert found.price == max([0.0, *left_out])


def test_half_of_what_nobody_wants_is_given_in_even_parts() -> None:
    demands = {"a": Demand(histogram({0: 4}), 0.0), "b": Demand(histogram({}), 0.0)}
    assert split(demands, 14) == Split({"a": 7, "b": 2}, 0.0)
    assert split({}, 14) == Split({}, 0.0)
