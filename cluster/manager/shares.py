"""How a tenant's room is split among engines: what its elastic sequences may hold on each beyond their reserved blocks.

The problem. On engine e the tenant's elastic sequences want blocks of worth v, known as a histogram (TenantUse.worths).
The engine's own price p_e is what a block is worth there to whoever else would get it. With `room` blocks in all, find
allowances a_e that

    maximise    sum over e of  (sum of the a_e largest v on e) - p_e * a_e     subject to  sum of a_e <= room.

Its Lagrangian dual has one multiplier mu >= 0, the tenant's own price: given mu every engine decides alone, keeping the
blocks with v > p_e + mu, and mu is the least number for which these fit the room. So a block is ranked by its surplus
v - p_e over all engines, and the room goes to the largest. A histogram knows v only to its bin's lower bound, within a
factor of two: blocks of a bin are alike. What is left when all surpluses are served goes to blocks worth less than
their engine's price, since they may rise before the next report; half of what then remains in even parts to all
engines, for what is to come there, and the other half stays free for the tenant's next requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from kvorum.workers.governance import NUM_WORTH_BINS, least_worth

_LEAST_WORTHS = tuple(least_worth(index) for index in range(NUM_WORTH_BINS))


@dataclass(frozen=True, slots=True)
class Demand:
    """What a tenant's elastic sequences want on one engine, and the engine's price."""

    worths: tuple[int, ...]
    price: float


@dataclass(frozen=True, slots=True)
class Split:
    """Allowances by engine, and the tenant's price mu: the surplus of the best block that got none, 0 at least."""

    allowances: Mapping[str, int]
    price: float


def split(demands: Mapping[str, Demand], room: int) -> Split:
    """Solve the problem above; equal surpluses are served in the order of their engines."""
    left = max(0, room)
    wanted = {engine_id: sum(demand.worths) for engine_id, demand in demands.items()}
    if (total := sum(wanted.values())) <= left:
        return Split(_spread(wanted, (left - total) // 2), 0.0)
    allowances = dict.fromkeys(demands, 0)
    lots = defaultdict[float, list[tuple[str, int]]](list)
    for engine_id, demand in demands.items():
        for index, count in enumerate(demand.worths):
            if count:
                lots[demand.price - _LEAST_WORTHS[index]].append((engine_id, count))
    for loss in sorted(lots):
        for engine_id, count in lots[loss]:
            taken = min(count, left)
            allowances[engine_id] += taken
            left -= taken
            if taken < count:
                return Split(allowances, max(0.0, -loss))
    raise AssertionError("more is wanted than there is room for")


def _spread(allowances: Mapping[str, int], left: int) -> dict[str, int]:
    if not allowances:
        return {}
    each, rest = divmod(left, len(allowances))
    return {
        engine_id: allowance + each + (index < rest) for index, (engine_id, allowance) in enumerate(allowances.items())
    }
