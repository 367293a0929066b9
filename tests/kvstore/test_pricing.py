"""Pages go where they are worth most, within every bound: against all allocations there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kvstore.pricing import (
    DEFAULT_RULE,
    DEFAULT_RULE_TEXT,
    Allocation,
    Bidder,
    Rule,
    RuleKind,
    TenantBounds,
    allocate,
    parse_rule,
    worths,
)

TENANTS = "xy"
SAME_CAP = parse_rule("same_cap")
RULES = tuple(map(parse_rule, ("same_cap", "proportional", "price", "price:alpha=1", "price:alpha=4")))


@st.composite
def bidders(draw: st.DrawFn, name: str) -> Bidder:
    """A concave curve from gains in falling order, scaled to end at 1 or below."""
    gains = sorted(draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)), reverse=True)
    curve = (0.0, *(total / (sum(gains) + draw(st.integers(0, 5))) for total in accumulate(gains)))
    most = draw(st.integers(1, len(gains)))
    weight = draw(st.sampled_from([0.5, 1.0, 2.0]))
    return Bidder(name, draw(st.sampled_from(TENANTS)), curve, draw(st.integers(1, most)), most, weight)


@st.composite
def auctions(draw: st.DrawFn) -> tuple[list[Bidder], int, dict[str, TenantBounds]]:
    """Floors that fit the pages and ceilings that admit the leasts, as a cluster's settings do."""
    all_bidders = [draw(bidders(name)) for name in "abcd"[: draw(st.integers(1, 4))]]
    least = sum(bidder.least for bidder in all_bidders)
    pages = least + draw(st.integers(0, 8))
    bounds, spare = {}, pages - least
    for tenant in TENANTS:
        own = sum(bidder.least for bidder in all_bidders if bidder.tenant == tenant)
        extra = draw(st.integers(0, spare))
        spare -= extra
        ceiling = draw(st.none() | st.integers(own + extra, own + extra + 4))
        bounds[tenant] = TenantBounds(own + extra if extra else 0, ceiling)
    return all_bidders, pages, bounds


def held(all_bidders: Sequence[Bidder], pages: Mapping[str, int], tenant: str) -> int:
    return sum(pages[bidder.name] for bidder in all_bidders if bidder.tenant == tenant)


def is_feasible(
    all_bidders: Sequence[Bidder], kept: Mapping[str, int], pages: int, bounds: Mapping[str, TenantBounds]
) -> bool:
    if sum(kept.values()) > pages:
        return False
    for tenant, bound in bounds.items():
        usable = sum(bidder.most for bidder in all_bidders if bidder.tenant == tenant)
        count = held(all_bidders, kept, tenant)
        if count < min(bound.floor, usable) or (bound.ceiling is not None and count > bound.ceiling):
            return False
    return True


def every_allocation(all_bidders: Sequence[Bidder]) -> Iterator[dict[str, int]]:
    for counts in itertools.product(*(range(bidder.least, bidder.most + 1) for bidder in all_bidders)):
        yield {bidder.name: count for bidder, count in zip(all_bidders, counts, strict=True)}


def utility(mass: float, alpha: float) -> float:
    return math.log(mass) if alpha == 1.0 else mass ** (1.0 - alpha) / (1.0 - alpha)


def value(all_bidders: Sequence[Bidder], kept: Mapping[str, int], rule: Rule) -> float:
    """The objective, for PRICE from its definition and not from worths."""
    if rule.kind == RuleKind.PRICE:
        return sum(b.weight * utility(b.curve[kept[b.name]], rule.alpha) for b in all_bidders)
    scale = {b.name: b.most if rule.kind == RuleKind.PROPORTIONAL else 1 for b in all_bidders}
    return sum(b.weight * scale[b.name] / page for b in all_bidders for page in range(b.least + 1, kept[b.name] + 1))


@given(auctions(), st.sampled_from(RULES))
def test_no_feasible_allocation_is_better(
    auction: tuple[list[Bidder], int, dict[str, TenantBounds]], rule: Rule
) -> None:
    all_bidders, pages, bounds = auction
    found = allocate(all_bidders, pages, bounds, rule).pages
    assert is_feasible(all_bidders, found, pages, bounds)
    best = max(
        value(all_bidders, kept, rule)
        for kept in every_allocation(all_bidders)
        if is_feasible(all_bidders, kept, pages, bounds)
    )
    assert value(all_bidders, found, rule) == pytest.approx(best)


@given(
    st.integers(0, 5),
    st.integers(0, 30),
    st.dictionaries(
        st.sampled_from(TENANTS), st.builds(TenantBounds, st.integers(0, 9), st.none() | st.integers(0, 9))
    ),
    st.data(),
)
def test_whatever_the_bounds_more_pages_take_none_away(
    count: int, pages: int, bounds: dict[str, TenantBounds], data: st.DataObject
) -> None:
    all_bidders = [data.draw(bidders(f"b{index}")) for index in range(count)]
    rule = data.draw(st.sampled_from(RULES))
    before = allocate(all_bidders, pages, bounds, rule)
    after = allocate(all_bidders, pages + 1, bounds, rule)
    least = sum(bidder.least for bidder in all_bidders)
    assert all(b.least <= before.pages[b.name] <= b.most for b in all_bidders)
    assert sum(before.pages.values()) <= max(pages, least)
    assert all(before.pages[name] <= count for name, count in after.pages.items())
    assert after.price <= before.price


class TestAllocation:
    def test_everyone_gets_the_same_unless_it_needs_less(self) -> None:
        sizes = {"a": 2, "b": 10, "c": 10}
        everyone = [Bidder(name, "x", (), 1, most) for name, most in sizes.items()]
        found = allocate(everyone, 12, {}, SAME_CAP)
        assert found == Allocation({"a": 2, "b": 5, "c": 5}, 1 / 6)

    def test_everyone_gets_the_same_share_of_its_size(self) -> None:
        everyone = [Bidder(name, "x", (), 1, most) for name, most in {"a": 4, "b": 8, "c": 12}.items()]
        assert allocate(everyone, 12, {}, parse_rule("proportional")).pages == {"a": 2, "b": 4, "c": 6}

    def test_weight_buys_pages(self) -> None:
        everyone = [Bidder("a", "x", (), 1, 20, 1.0), Bidder("b", "y", (), 1, 20, 2.0)]
        assert allocate(everyone, 12, {}, SAME_CAP).pages == {"a": 4, "b": 8}

    def test_a_floor_is_met_before_the_market_opens_and_a_ceiling_closes_it(self) -> None:
        everyone = [Bidder("a", "x", (), 1, 20, 0.1), Bidder("b", "y", (), 1, 20), Bidder("c", "z", (), 1, 20)]
        bounds = {"x": TenantBounds(floor=6), "y": TenantBounds(ceiling=4)}
        found = allocate(everyone, 20, bounds, SAME_CAP)
        assert found == Allocation({"a": 6, "b": 4, "c": 10}, 1 / 11)

    def test_what_only_a_ceiling_forbids_has_no_price(self) -> None:
        found = allocate([Bidder("a", "x", (), 1, 9)], 20, {"x": TenantBounds(ceiling=4)}, SAME_CAP)
        assert found == Allocation({"a": 4}, 0.0)

    def test_where_pages_do_not_suffice_everyone_has_its_least(self) -> None:
        everyone = [Bidder("a", "x", (), 3, 9), Bidder("b", "x", (), 4, 9)]
        assert allocate(everyone, 5, {"x": TenantBounds(ceiling=1)}, SAME_CAP).pages == {"a": 3, "b": 4}

    def test_floors_that_do_not_fit_are_approached_by_worth(self) -> None:
        everyone = [Bidder("a", "x", (), 0, 9), Bidder("b", "y", (), 0, 9)]
        bounds = {tenant: TenantBounds(floor=9) for tenant in TENANTS}
        found = allocate(everyone, 6, bounds, SAME_CAP)
        assert found == Allocation({"a": 3, "b": 3}, 1 / 4)

    def test_nobody_is_nothing(self) -> None:
        assert allocate([], 5, {}, SAME_CAP) == Allocation({}, 0.0)


class TestWorths:
    @given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12), st.sampled_from(RULES))
    def test_they_never_rise_whatever_was_measured(self, masses: list[float], rule: Rule) -> None:
        found = worths(Bidder("a", "x", (0.0, *masses), 0, len(masses)), rule)
        assert len(found) == len(masses)
        assert all(before >= after >= 0.0 for before, after in pairwise(found))

    def test_neighbours_share_what_a_curve_that_is_not_concave_gains(self) -> None:
        found = worths(Bidder("a", "x", (0.0, 0.5, 0.5, 0.7, 0.7), 0, 4), parse_rule("price"))
        assert found == pytest.approx((0.5, 0.1, 0.1, 0.0))


class TestParsing:
    def test_rules_are_read(self) -> None:
        assert parse_rule("same_cap") == SAME_CAP
        assert parse_rule(DEFAULT_RULE_TEXT) == DEFAULT_RULE
        assert parse_rule("price:alpha=2.5") == Rule(RuleKind.PRICE, 2.5)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("fair", "unknown rule 'fair', expected one of same_cap, proportional, price"),
            ("price:beta=1", "has no option 'beta'"),
            ("same_cap:alpha=1", "has no option 'alpha'"),
            ("price:alpha=much", "alpha must be a number from 0 to 16, got 'much'"),
            ("price:alpha=-1", "alpha must be"),
            ("price:alpha=nan", "alpha must be"),
        ],
    )
    def test_what_is_wrong_is_named(self, text: str, expected: str) -> None:
        with pytest.raises(ValueError, match=expected):
            parse_rule(text)
