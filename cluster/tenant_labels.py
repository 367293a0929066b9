"""Which tenants have a name of their own in metrics: a bounded number, and none loses it again. Pure.

A counter that moved from one label to another would fall, which Prometheus takes for a restart. So what was counted
under "other" stays there, also for a tenant that gets a name later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

MAX_NAMES = 50
OTHER = "other"
# Of requests that bring no valid key; Prometheus takes an empty label for none.
NOBODY = ""


class TenantLabels:
    """Names tenants: all while there are few, else those with most requests when names are given out."""

    def __init__(self, tenants: Collection[str], *, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._named: frozenset[str] = frozenset()
        self._requests: Counter[str] = Counter()
        self.add(tenants)

    def add(self, tenants: Collection[str]) -> None:
        """Take tenants in that may send requests from now on."""
        if len(self._named.union(tenants)) <= self._max_names:
            self._named = self._named.union(tenants)

    def count(self, tenant: str) -> None:
        """Note a request."""
        self._requests[tenant] += 1

    def give_names(self) -> None:
        """Give the names that are left to the tenants with most requests so far."""
        self._named = with_names(self._named, self._requests, max_names=self._max_names)

    def of(self, tenant: str) -> str:
        """Return a tenant's label."""
        return tenant if tenant in self._named or tenant == NOBODY else OTHER


def with_names(named: Collection[str], requests: Mapping[str, int], *, max_names: int) -> frozenset[str]:
    """Return the tenants with names after those that are left have been given out; ties go by the alphabet."""
    others = sorted((tenant for tenant in requests if tenant not in named), key=lambda name: (-requests[name], name))
    return frozenset(named).union(others[: max(0, max_names - len(named))])
