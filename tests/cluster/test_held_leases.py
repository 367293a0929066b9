"""Which leases a router tells the cache manager of, and when."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvorum.cluster.held_leases import HeldLeases
from kvorum.cluster.manager.types import LeaseRecord

NAMES = st.sampled_from("abcdef")


def record(name: str) -> LeaseRecord:
    return LeaseRecord(name, "t", "e", (1,))


class HeldLeasesMachine(RuleBasedStateMachine):
    """Against a plain dict of the times at which the manager was told."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldLeases()
        self.told = dict[str, float]()
        self.now_s = 0.0

    @rule(name=NAMES, is_told=st.booleans())
    def add(self, name: str, is_told: bool) -> None:
        self.told[name] = self.now_s if is_told else -math.inf
        self.held.add(record(name), told_s=self.told[name])

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.told.pop(name, None)
        self.held.remove(name)

    @rule()
    def start_anew(self) -> None:
        self.told = dict.fromkeys(self.told, -math.inf)
        self.held.start_anew()

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(at_most=st.integers(1, 4), gone=NAMES)
    def tell(self, at_most: int, gone: str) -> None:
        """A lease may end while the manager is told of it."""
        until_s = self.now_s - 3
        records = self.held.due(until_s, at_most=at_most)
        due = {name for name, told_s in self.told.items() if told_s <= until_s}
        assert len(records) == min(at_most, len(due))
        assert {each.lease_id for each in records} <= due
        longest = sorted(self.told[name] for name in due)
        assert [self.told[each.lease_id] for each in records] == longest[: len(records)]
        self.remove(gone)
        self.held.note_told(records, self.now_s)
        self.told |= {each.lease_id: self.now_s for each in records if each.lease_id in self.told}

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.held) == len(self.told)
        assert all(name in self.held for name in self.told)


TestHeldLeases = HeldLeasesMachine.TestCase
