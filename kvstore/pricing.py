"""The price of a KV page: how many pages each sequence keeps when there are too few.

The problem. Sequence s keeps b_s pages, whole numbers from its least to its most. Under every rule its b-th page has a
*worth* v_s(b) that is no larger than that of the page before. Find

    maximise    sum over s of  v_s(1) + ... + v_s(b_s)
    subject to  least_s <= b_s <= most_s,  sum of b_s <= pages,
                floor_t <= sum of b_s over the sequences of tenant t <= ceiling_t,

where a floor binds as far as its tenant's sequences can use it. The rules, with weight w_s:

    price       v = w_s * (U(R_s(b)) - U(R_s(b - 1))); R_s(b) is the share of its attention mass that b pages keep
                (kvstore/retention.py), U the alpha-fair utility: alpha 0 is R itself (least mass lost, whoever loses
                it), 1 its logarithm (proportional fairness), a large one cares for the worst off alone.
    same_cap    v = w_s / b: the same pages for everybody, in proportion to weight, as far as one can use them.
    proportional  v = w_s * most_s / b: the same share of what each could use.

Why greedy is right. The constraints are bounds on disjoint sets (tenants) inside one total, a laminar family; the
vectors b that keep them are the integer points of a polymatroid (with floors: of a generalised one), and the objective
is a sum of concave functions of one b_s each. For these the greedy choice, always the page of most worth that breaks no
constraint, is optimal (Edmonds 1971; Federgruen and Groenevelt 1986). By exchange: if a choice leaves out a page worth
more than one that is in, and swapping them keeps the constraints, swapping gains; in a laminar family a choice without
such a swap is optimal. So three cuts do it: a tenant's pages come in falling order of worth, of which those beyond its
ceiling are out; those up to its floor are in; the rest of all tenants meet in one market, in falling order, until the
pages are gone. Where pages do not suffice for the floors, those below a floor go in falling order too.

The *price* is the worth of the best page that is wanted and not given. A sequence that keeps all pages worth more than
the price needs to know nothing else.

Cost: two sorts of the pages on offer, which come as falling runs; 300 sequences of 300 pages take some 30 ms.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from operator import neg

# R is a share of mass; below this a logarithm or a power would ask for the first page at any price.
_LEAST_MASS = 1e-6


class RuleKind(StrEnum):
    """What a page is worth by."""

    SAME_CAP = "same_cap"
    PROPORTIONAL = "proportional"
    PRICE = "price"


@dataclass(frozen=True, slots=True)
class Rule:
    """How pages are shared out; alpha matters to PRICE alone."""

    kind: RuleKind
    alpha: float = 0.0


# What bench/allocation.py measured to cost least, by the mean and by the worst off (docs/performance.md).
DEFAULT_RULE_TEXT = "price:alpha=1"
DEFAULT_RULE = Rule(RuleKind.PRICE, alpha=1.0)


@dataclass(frozen=True, slots=True)
class Bidder:
    """A sequence that may be shrunk.

    curve: R at 0, 1, 2 ... most pages; only PRICE reads it. least <= most.
    """

    name: str
    tenant: str
    curve: tuple[float, ...]
    least: int
    most: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TenantBounds:
    """Pages that a tenant is sure of, and at most has; None is no limit."""

    floor: int = 0
    ceiling: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """Pages of each sequence by name, and the price: 0 when nobody wants a page that it does not get."""

    pages: Mapping[str, int]
    price: float


def parse_rule(text: str) -> Rule:
    """Read `same_cap`, `proportional`, `price` or `price:alpha=1`.

    Raises:
        ValueError: saying what is wrong.
    """
    name, _, option = text.partition(":")
    if name not in tuple(RuleKind):
        raise ValueError(f"unknown rule {name!r}, expected one of {', '.join(RuleKind)}")
    kind = RuleKind(name)
    if not option:
        return Rule(kind)
    key, _, number = option.partition("=")
    if kind != RuleKind.PRICE or key != "alpha":
        raise ValueError(f"rule {name!r} has no option {key!r}; price:alpha=NUMBER is the only one")
    try:
        alpha = float(number)
    except ValueError:
        alpha = math.nan
    if not 0.0 <= alpha <= 16.0:
        raise ValueError(f"alpha must be a number from 0 to 16, got {number!r}")
    return Rule(kind, alpha)


def worths(bidder: Bidder, rule: Rule) -> tuple[float, ...]:
    """Return what its 1st, 2nd ... most-th page is worth, falling or level, none negative.

    Where a measured curve is not concave, neighbouring pages share their worth evenly.
    """
    if rule.kind == RuleKind.SAME_CAP:
        return tuple(bidder.weight / page for page in range(1, bidder.most + 1))
    if rule.kind == RuleKind.PROPORTIONAL:
        return tuple(bidder.weight * bidder.most / page for page in range(1, bidder.most + 1))
    utilities = _utilities(bidder.curve[: bidder.most + 1], rule.alpha)
    gains = [bidder.weight * max(0.0, after - before) for before, after in pairwise(utilities)]
    return tuple(gains if all(a >= b for a, b in pairwise(gains)) else _leveled(gains))


def allocate(bidders: Sequence[Bidder], pages: int, bounds: Mapping[str, TenantBounds], rule: Rule) -> Allocation:
    """Solve the problem above; where the pages do not even suffice for every least, everyone has its least."""
    tenants: dict[str, list[Bidder]] = defaultdict(list)
    for bidder in bidders:
        tenants[bidder.tenant].append(bidder)
    offers = {
        tenant: [worths(bidder, rule)[bidder.least :] for bidder in members] for tenant, members in tenants.items()
    }
    ranked = {tenant: sorted(chain(*lists), reverse=True) for tenant, lists in offers.items()}
    left = max(0, pages - sum(bidder.least for bidder in bidders))
    sure: list[list[float]] = []
    market: list[list[float]] = []
    for tenant, members in tenants.items():
        floor, room = _beyond_least(bounds.get(tenant, TenantBounds()), members)
        sure.append(ranked[tenant][: min(floor, room)])
        market.append(ranked[tenant][min(floor, room) : room])
    counts = _best(sure, left)
    sold = _best(market, left - sum(counts))
    kept: dict[str, int] = {}
    for (tenant, members), count, more in zip(tenants.items(), counts, sold, strict=True):
        for bidder, extra in zip(members, _best(offers[tenant], count + more), strict=True):
            kept[bidder.name] = bidder.least + extra
    return Allocation(kept, max(_next_worth(sure, counts), _next_worth(market, sold)))


def _utilities(curve: Sequence[float], alpha: float) -> list[float]:
    if alpha == 0.0:
        return [*curve]
    if alpha == 1.0:
        return [math.log(max(mass, _LEAST_MASS)) for mass in curve]
    return [max(mass, _LEAST_MASS) ** (1.0 - alpha) / (1.0 - alpha) for mass in curve]


def _leveled(gains: Sequence[float]) -> list[float]:
    """Average runs until none rises: the gains of the least concave curve above the measured one."""
    runs: list[tuple[float, int]] = []
    for gain in gains:
        total, length = gain, 1
        while runs and runs[-1][0] * length < total * runs[-1][1]:
            before, count = runs.pop()
            total, length = total + before, length + count
        runs.append((total, length))
    # Rounded means of level runs may rise by their last bit.
    means: list[float] = []
    for total, length in runs:
        means += [min(total / length, means[-1] if means else math.inf)] * length
    return means


def _beyond_least(bounds: TenantBounds, members: Sequence[Bidder]) -> tuple[int, int]:
    """Return the pages up to a tenant's floor and up to its ceiling that are not its sequences' least ones."""
    least = sum(bidder.least for bidder in members)
    most = sum(bidder.most for bidder in members)
    ceiling = most if bounds.ceiling is None else min(most, bounds.ceiling)
    return max(0, bounds.floor - least), max(0, ceiling - least)


def _best(offers: Sequence[Sequence[float]], count: int) -> list[int]:
    """Return how many of each falling list are among the `count` largest of all; of equals the first lists' are."""
    if count >= sum(map(len, offers)):
        return [len(offer) for offer in offers]
    if count <= 0:
        return [0] * len(offers)
    marginal = sorted(chain(*offers), reverse=True)[count - 1]
    above = [bisect_left(offer, -marginal, key=neg) for offer in offers]
    ties = count - sum(above)
    for index, offer in enumerate(offers):
        while ties and above[index] < len(offer) and offer[above[index]] == marginal:
            above[index] += 1
            ties -= 1
    return above


def _next_worth(offers: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    return max((offer[count] for offer, count in zip(offers, counts, strict=True) if count < len(offer)), default=0.0)
