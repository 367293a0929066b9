"""Attention, scores and ranking of the reference against loops over Python floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kernels.plan import EvictionRule
from kvorum.kernels.reference.attention import (
    KEY_TILE,
    attend,
    choose_victims,
    column_sums,
    lifetime,
    pool_values,
    rank_order,
    values_of,
    visible,
)

HEAD_DIM = 4
# num_kv_heads, group_size.
SHAPES = {"mha": (3, 1), "gqa": (2, 3), "mqa": (1, 4)}
SIZES = (1, 15, 16, 17, KEY_TILE + 1)
WINDOWS = (None, 1, 7, 40)
# Of softmax and sums over at most 300 numbers.
FLOAT32_TOLERANCE = 2e-5
FLOAT64_TOLERANCE = 1e-12

Matrix = list[list[float]]


@dataclass(frozen=True)
class Case:
    """The newest queries of a sequence, and its slots in an order of their own in each head."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    key_positions: torch.Tensor
    query_positions: torch.Tensor
    window: int | None

    @property
    def seen(self) -> torch.Tensor:
        return visible(self.key_positions, self.query_positions, self.window)

    def to(self, dtype: torch.dtype) -> Case:
        queries, keys, values = (tensor.to(dtype) for tensor in (self.queries, self.keys, self.values))
        return Case(queries, keys, values, self.key_positions, self.query_positions, self.window)


def make_case(shape: str, num_slots: int, window: int | None, *, in_order: bool = False) -> Case:
    """Each head holds the queries' own tokens and older ones with gaps, as after evictions."""
    num_kv_heads, group_size = SHAPES[shape]
    generator = torch.Generator().manual_seed(num_slots)
    num_queries = min(num_slots, 9)
    first_query = 2 * num_slots
    older = num_slots - num_queries
    rows = []
    for _ in range(num_kv_heads):
        kept = torch.randperm(first_query, generator=generator)[:older]
        row = torch.cat((kept.sort().values, torch.arange(first_query, first_query + num_queries)))
        rows.append(row if in_order else row[torch.randperm(num_slots, generator=generator)])

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return Case(
        queries=draw(num_kv_heads, group_size, num_queries, HEAD_DIM),
        keys=draw(num_kv_heads, num_slots, HEAD_DIM),
        values=draw(num_kv_heads, num_slots, HEAD_DIM),
        key_positions=torch.stack(rows),
        query_positions=torch.arange(first_query, first_query + num_queries),
        window=window,
    )


def sees(key: int, query: int, window: int | None) -> bool:
    return key <= query and (window is None or query - key < window)


def slow_probabilities(case: Case, head: int, member: int, query: int) -> tuple[list[float], float]:
    """Return one query's probability of each slot, and its log-sum-exp."""
    q = case.queries[head, member, query].tolist()
    positions = case.key_positions[head].tolist()
    exponentials = [
        math.exp(sum(a * b for a, b in zip(q, key, strict=True)))
        if sees(position, int(case.query_positions[query]), case.window)
        else 0.0
        for key, position in zip(case.keys[head].tolist(), positions, strict=True)
    ]
    total = math.fsum(exponentials)
    return [value / total for value in exponentials], math.log(total)


def slow_attention(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, log-sum-exp and probabilities, in the shapes of `attend`."""
    outputs, lses, probabilities = [], [], []
    for head, values in enumerate(case.values.tolist()):
        for member in range(case.queries.shape[1]):
            for query in range(case.queries.shape[2]):
                row, lse = slow_probabilities(case, head, member, query)
                columns = zip(*values, strict=True)
                outputs.append(
                    [math.fsum(p * value for p, value in zip(row, column, strict=True)) for column in columns]
                )
                lses.append(lse)
                probabilities.append(row)
    grid = case.queries.shape[:3]
    return (
        torch.tensor(outputs, dtype=torch.float64).view(*grid, HEAD_DIM),
        torch.tensor(lses, dtype=torch.float64).view(grid),
        torch.tensor(probabilities, dtype=torch.float64).view(*grid, -1),
    )


def assert_close(found: torch.Tensor, expected: torch.Tensor, *, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


class TestVisible:
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("num_slots", SIZES)
    def test_a_query_sees_what_is_not_newer_and_inside_its_window(self, num_slots: int, window: int | None) -> None:
        case = make_case("gqa", num_slots, window)
        expected = [
            [[sees(key, query, window) for key in row] for query in case.query_positions.tolist()]
            for row in case.key_positions.tolist()
        ]
        assert case.seen.tolist() == expected

    def test_a_window_of_one_shows_the_query_itself_alone(self) -> None:
        seen = visible(torch.arange(5)[None], torch.arange(5), 1)
        assert torch.equal(seen[0], torch.eye(5, dtype=torch.bool))


class TestAttend:
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("num_slots", SIZES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_everything_equals_the_loops(self, shape: str, num_slots: int, window: int | None) -> None:
        case = make_case(shape, num_slots, window)
        found = attend(case.queries, case.keys, case.values, case.seen)
        for tensor, expected in zip(found, slow_attention(case), strict=True):
            assert tensor.shape == expected.shape
            assert_close(tensor, expected, tolerance=FLOAT64_TOLERANCE)

    @pytest.mark.parametrize("num_slots", SIZES)
    def test_float32_is_close(self, num_slots: int) -> None:
        case = make_case("gqa", num_slots, None)
        narrow = case.to(torch.float32)
        found = attend(narrow.queries, narrow.keys, narrow.values, narrow.seen)
        for tensor, expected in zip(found, slow_attention(case), strict=True):
            assert_close(tensor, expected, tolerance=FLOAT32_TOLERANCE)

    def test_the_softmax_of_bfloat16_is_in_float32(self) -> None:
        case = make_case("gqa", 257, None).to(torch.bfloat16)
        _, lse, probabilities = attend(case.queries, case.keys, case.values, case.seen)
        assert lse.dtype == probabilities.dtype == torch.float32
        assert_close(probabilities.sum(dim=-1), torch.ones(lse.shape, dtype=torch.float64), tolerance=FLOAT32_TOLERANCE)

    def test_logits_beyond_the_range_of_exp_do_not_overflow(self) -> None:
        queries = torch.full((1, 1, 1, 1), 1000.0, dtype=torch.float64)
        keys = torch.tensor([[[2.0], [2.0], [-3.0]]], dtype=torch.float64)
        output, lse, probabilities = attend(queries, keys, keys, torch.ones(1, 1, 3, dtype=torch.bool))
        assert probabilities[0, 0, 0].tolist() == [0.5, 0.5, 0.0]
        assert output.item() == 2.0
        assert lse.item() == pytest.approx(2000.0 + math.log(2.0))


class TestColumnSums:
    def assert_equals_the_loops(self, case: Case, weights: torch.Tensor) -> None:
        _, lse, expected = slow_attention(case)
        found = column_sums(case.queries, case.keys, lse, case.seen, weights)
        by_hand = (expected.sum(dim=1) * weights[:, None]).sum(dim=1)
        assert_close(found, by_hand, tolerance=FLOAT64_TOLERANCE)

    @pytest.mark.parametrize("in_order", [True, False])
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("num_slots", SIZES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_they_are_what_each_slot_received(
        self, shape: str, num_slots: int, window: int | None, in_order: bool
    ) -> None:
        case = make_case(shape, num_slots, window, in_order=in_order)
        self.assert_equals_the_loops(case, torch.ones(len(case.query_positions), dtype=torch.float64))

    def test_each_query_counts_by_its_weight(self) -> None:
        case = make_case("gqa", 257, None)
        weights = torch.tensor([0.0, 0.0, 0.5, 1.0, 2.0, 0.25, 0.0, 3.0, 1.0], dtype=torch.float64)
        self.assert_equals_the_loops(case, weights)

    def test_a_tile_of_keys_that_no_query_sees_receives_nothing(self) -> None:
        case = make_case("gqa", 2 * KEY_TILE + 9, 5, in_order=True)
        self.assert_equals_the_loops(case, torch.ones(9, dtype=torch.float64))

    def test_the_mass_of_all_slots_is_one_for_each_query_head(self) -> None:
        case = make_case("gqa", 300, 40)
        _, lse, _ = attend(case.queries, case.keys, case.values, case.seen)
        weights = torch.rand(len(case.query_positions), generator=torch.Generator().manual_seed(3)).double()
        found = column_sums(case.queries, case.keys, lse, case.seen, weights).sum(dim=-1)
        assert found.tolist() == pytest.approx([3 * float(weights.sum())] * 2)

    def test_float32_is_close(self) -> None:
        case = make_case("gqa", 257, None)
        narrow = case.to(torch.float32)
        _, lse, _ = attend(narrow.queries, narrow.keys, narrow.values, narrow.seen)
        weights = torch.ones(9)
        found = column_sums(narrow.queries, narrow.keys, lse, narrow.seen, weights)
        _, _, expected = slow_attention(case)
        assert_close(found, expected.sum(dim=(1, 2)), tolerance=FLOAT32_TOLERANCE)


# Ranking.


@dataclass(frozen=True)
class Slots:
    """One head's slots; scores from a few values, so that many are equal."""

    rule: EvictionRule
    positions: list[int]
    scores: list[float]
    alive: list[bool]
    newest: int

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.tensor(self.scores, dtype=torch.float64), torch.tensor(self.positions), torch.tensor(self.alive)


@st.composite
def rules(draw: st.DrawFn) -> EvictionRule:
    return EvictionRule(
        recent_tokens=draw(st.integers(0, 12)),
        sink_tokens=draw(st.integers(0, 5)),
        by_age=draw(st.booleans()),
        per_lifetime=draw(st.booleans()),
        decay=draw(st.sampled_from([1.0, 0.95, 0.9])),
        observe_from=draw(st.sampled_from([0, 0, 7, 40])),
    )


@st.composite
def slots(draw: st.DrawFn) -> Slots:
    newest = draw(st.integers(0, 60))
    older = st.lists(st.integers(0, newest), unique=True, max_size=30)
    positions = draw(st.permutations(sorted({*draw(older), newest})))
    return Slots(
        rule=draw(rules()),
        positions=list(positions),
        scores=[draw(st.sampled_from([0.0, 0.25, 0.5, 3.0])) for _ in positions],
        alive=[draw(st.booleans()) for _ in positions],
        newest=newest,
    )


def slow_lifetime(rule: EvictionRule, position: int, newest: int) -> float:
    """Add up the weights of the queries that could give the token anything; a token that none could is not punished."""
    queries = range(max(position, rule.observe_from), newest + 1)
    return math.fsum(rule.decay ** (newest - query) for query in queries) if queries else 1.0


def slow_value(rule: EvictionRule, score: float, position: int, newest: int) -> float:
    if rule.by_age:
        return 0.0
    return score / slow_lifetime(rule, position, newest) if rule.per_lifetime else score


def is_protected(rule: EvictionRule, position: int, newest: int) -> bool:
    return position < rule.sink_tokens or position > newest - rule.recent_tokens


def slow_order(it: Slots, values: Sequence[float], *, alive: Sequence[bool]) -> list[int]:
    return sorted(
        range(len(it.positions)),
        key=lambda i: (alive[i], is_protected(it.rule, it.positions[i], it.newest), values[i], it.positions[i]),
    )


@given(rules(), st.integers(0, 80), st.integers(0, 80))
def test_a_lifetime_is_the_sum_of_the_weights_of_the_queries_that_count(
    rule: EvictionRule, position: int, age: int
) -> None:
    newest = position + age
    found = lifetime(rule, torch.tensor([position]), newest)
    assert found.item() == pytest.approx(slow_lifetime(rule, position, newest), rel=1e-12)


@given(slots())
def test_a_slot_is_worth_what_its_rule_says(it: Slots) -> None:
    scores, positions, _ = it.tensors()
    found = values_of(it.rule, scores, positions, it.newest)
    expected = [slow_value(it.rule, s, p, it.newest) for s, p in zip(it.scores, it.positions, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_different_float32_scores_stay_different_when_divided_by_a_lifetime() -> None:
    rule = EvictionRule(recent_tokens=0, per_lifetime=True)
    scores = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    above = torch.nextafter(scores, torch.tensor(torch.inf))
    positions = torch.arange(2000) % 50
    assert bool((values_of(rule, scores, positions, 60) < values_of(rule, above, positions, 60)).all())


@given(slots())
def test_slots_are_sorted_by_life_protection_value_and_position(it: Slots) -> None:
    scores, positions, alive = it.tensors()
    values = values_of(it.rule, scores, positions, it.newest)
    found = rank_order(it.rule, values, positions, alive, newest=it.newest)
    assert found.tolist() == slow_order(it, values.tolist(), alive=it.alive)


@given(slots(), st.randoms(use_true_random=False))
def test_the_order_of_tokens_does_not_depend_on_their_slots(it: Slots, random: Random) -> None:
    scores, positions, alive = it.tensors()
    shuffled = list(range(len(it.positions)))
    random.shuffle(shuffled)
    orders = []
    for index in (list(range(len(shuffled))), shuffled):
        values = values_of(it.rule, scores[index], positions[index], it.newest)
        order = rank_order(it.rule, values, positions[index], alive[index], newest=it.newest)
        orders.append(positions[index][order].tolist())
    assert orders[0] == orders[1]


def test_each_head_is_sorted_alone() -> None:
    rule = EvictionRule(recent_tokens=1)
    values = torch.tensor([[[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]]], dtype=torch.float64)
    positions = torch.tensor([[[0, 1, 2], [9, 1, 2]]])
    order = rank_order(rule, values, positions, torch.ones_like(positions, dtype=torch.bool), newest=9)
    assert order.tolist() == [[[1, 2, 0], [1, 2, 0]]]


@given(slots(), st.randoms(use_true_random=False))
def test_the_victim_is_the_first_of_the_order(it: Slots, random: Random) -> None:
    """A rule never protects everything: budgets are larger than recent tokens and sinks."""
    if all(is_protected(it.rule, position, it.newest) for position in it.positions):
        return
    scores, positions, _ = it.tensors()
    values = values_of(it.rule, scores, positions, it.newest).tolist()
    expected = it.positions[slow_order(it, values, alive=[True] * len(values))[0]]
    shuffled = list(range(len(it.positions)))
    random.shuffle(shuffled)
    rows_scores, rows_positions = torch.stack((scores, scores[shuffled])), torch.stack((positions, positions[shuffled]))
    victims = choose_victims(it.rule, rows_scores, rows_positions, newest=it.newest)
    assert rows_positions.gather(1, victims[:, None])[:, 0].tolist() == [expected, expected]


@pytest.mark.parametrize("width", [1, 3, 5, 7])
@pytest.mark.parametrize("num_slots", [1, 2, 15, 16, 17])
def test_pooling_takes_the_best_of_the_neighbours_in_position_order(num_slots: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    values = torch.rand(2, 3, num_slots, generator=generator, dtype=torch.float64)
    positions = torch.stack([torch.randperm(3 * num_slots, generator=generator)[:num_slots] for _ in range(6)])
    positions = positions.view(2, 3, num_slots)
    found = pool_values(values, positions, width)
    for layer in range(2):
        for head in range(3):
            worth = values[layer, head].tolist()
            in_order = sorted(range(num_slots), key=positions[layer, head].tolist().__getitem__)
            for rank, slot in enumerate(in_order):
                around = in_order[max(0, rank - width // 2) : rank + width // 2 + 1]
                assert found[layer, head, slot].item() == max(worth[i] for i in around)
