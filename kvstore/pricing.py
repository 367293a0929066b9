"""The price of a KV page: how many pages each sequence keeps when there are too few.

The problem. Sequence s keeps b_s pages, whole numbers from its least to its most; R_s(b) is the share of its attention
mass that b pages keep, concave and rising (kvstore/retention.py). Find

    maximise    sum over s of  w_s * U(R_s(b_s))
    subject to  sum of b_s <= pages,
                sum of b_s over each tenant >= its floor, as far as its sequences can use it, and <= its ceiling,

where U is the alpha-fair utility: alpha 0 is R itself (least mass lost, whoever loses it), 1 its logarithm
(proportional fairness), and a large one cares for the worst off alone.

Why greedy is right. U is concave and rising, so U(R_s(b)) is concave in b: the first page is worth most and each next
one less. Say a set of pages is chosen and a page of higher marginal worth is left out while a lower one is in, and
swapping them breaks no floor or ceiling: swapping gains. So in an optimum no such pair is left. Floors and ceilings are
over disjoint sets of sequences inside one total, a laminar family, over which this local optimality is global (it is a
polymatroid; Edmonds 1971, Federgruen and Groenevelt 1986). Two passes reach it: each tenant first takes its own best
pages up to its floor, which every feasible choice must do with no worse pages; then the best pages of all are taken in
order, skipping tenants at their ceilings, until the total is used up. The marginal worth of the last page taken is the
price: every sequence keeps the pages that are worth more, and needs to know nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# R is a share of mass; below this a logarithm or a power would ask for the first page at any price.
_LEAST_MASS = 1e-6


@dataclass(frozen=True, slots=True)
class Bidder:
    """A sequence that may be shrunk.

    curve: R at 0, 1, 2 ... pages. least, most: pages, least <= most < len(curve).
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
    """Pages of each sequence by name, and the price: the worth of the last page given away, 0 when all get most."""

    pages: Mapping[str, int]
    price: float


def allocate(
    bidders: Sequence[Bidder], pages: int, bounds: Mapping[str, TenantBounds], *, alpha: float = 0.0
) -> Allocation:
    """Solve the problem above; where the pages do not even suffice for every least, everyone has its least."""
    auction = _Auction(bidders, bounds, alpha)
    left = pages - sum(bidder.least for bidder in bidders)
    for tenant in auction.tenants:
        left -= auction.sell(auction.bids_of(tenant), min(left, auction.missing_to_floor(tenant)))
    auction.sell(bidders, left)
    return Allocation(auction.pages, auction.price)


def utility(mass: float, alpha: float) -> float:
    """Return the alpha-fair utility of a retained mass."""
    mass = max(mass, _LEAST_MASS)
    if alpha == 1.0:
        return math.log(mass)
    return mass ** (1.0 - alpha) / (1.0 - alpha)


class _Auction:
    """Gives pages away one at a time, the most wanted first."""

    def __init__(self, bidders: Sequence[Bidder], bounds: Mapping[str, TenantBounds], alpha: float) -> None:
        self._bidders: dict[str, list[Bidder]] = defaultdict(list)
        for bidder in bidders:
            self._bidders[bidder.tenant].append(bidder)
        self._bounds = bounds
        self._alpha = alpha
        self.pages = {bidder.name: bidder.least for bidder in bidders}
        self._held = {tenant: sum(bidder.least for bidder in own) for tenant, own in self._bidders.items()}
        self.price = 0.0

    @property
    def tenants(self) -> Iterable[str]:
        return tuple(self._bidders)

    def bids_of(self, tenant: str) -> Sequence[Bidder]:
        return self._bidders[tenant]

    def missing_to_floor(self, tenant: str) -> int:
        return max(0, self._bounds.get(tenant, TenantBounds()).floor - self._held[tenant])

    def sell(self, bidders: Sequence[Bidder], count: int) -> int:
        """Give up to `count` more pages to these; return how many were taken."""
        heap = [(-self._worth(bidder), index) for index, bidder in enumerate(bidders) if self._wants(bidder)]
        heapq.heapify(heap)
        sold = 0
        while heap and sold < count:
            _, index = heapq.heappop(heap)
            bidder = bidders[index]
            if not self._wants(bidder):
                continue
            self.pages[bidder.name] += 1
            self._held[bidder.tenant] += 1
            sold += 1
            if self._wants(bidder):
                heapq.heappush(heap, (-self._worth(bidder), index))
        self.price = -heap[0][0] if heap else 0.0
        return sold

    def _wants(self, bidder: Bidder) -> bool:
        ceiling = self._bounds.get(bidder.tenant, TenantBounds()).ceiling
        return self.pages[bidder.name] < bidder.most and (ceiling is None or self._held[bidder.tenant] < ceiling)

    def _worth(self, bidder: Bidder) -> float:
        """Return what one more page is worth to a sequence."""
        held = self.pages[bidder.name]
        gain = utility(bidder.curve[held + 1], self._alpha) - utility(bidder.curve[held], self._alpha)
        return bidder.weight * gain
