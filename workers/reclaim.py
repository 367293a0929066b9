"""Blocks for whoever needs them: how elastic sequences share the pool, and what the manager allows them.

These are steps 1 to 3 of the ladder (governance.py): unreferenced prefix blocks are there for the taking, then elastic
sequences of tenants that hold more than they may are shrunk, then all. Steps 4 and 5 are the scheduler's.

Elastic sequences grow as they like while the pool has room. When it is short, it is shared out among them by the rule
in force (kvstore/pricing.py), and a little more is got back than is missing, so that not every step shrinks somebody.
Who gets less than it wants is held to that as to a budget, until a good part of the pool is available again.

A sequence with a floor of retained mass is cut in two steps: the cut that is wanted is written down, the engine has the
smallest budget measured that keeps the floor, and what that allows is carried out when the next step begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvorum.kvstore.pricing import Bidder, Rule, TenantBounds, allocate
from kvorum.kvstore.store import KVStore
from kvorum.kvstore.types import blocks_for
from kvorum.workers.bidding import (
    bid,
    bid_of_newcomer,
    blocks_to_go_on,
    can_be_shrunk,
    growth_blocks,
    held_blocks,
    surplus_blocks,
)
from kvorum.workers.governance import Directive, LadderStep
from kvorum.workers.request import EventKind
from kvorum.workers.sequence import Sequence as Stream

# Got back at least, once the pool is short, as a share of it.
RECLAIMED_SHARE = 0.02
# Budgets are lifted when more than this share of the pool is available.
ROOMY_SHARE = 1 / 8


class Reclaimer:
    """Shrinks elastic sequences, and lets them grow again. `running` is whoever has blocks, in any order."""

    def __init__(self, store: KVStore, rule: Rule) -> None:
        self.rule = rule
        self._store = store
        self._directive: Directive | None = None
        self._ordered_blocks = 0
        self._now_s = 0.0
        self.directive_done = 0
        self.price = 0.0
        self._reclaimed: Counter[LadderStep] = Counter()

    @property
    def reclaimed(self) -> Mapping[LadderStep, int]:
        """Blocks got back since the start, by ladder step."""
        return self._reclaimed | Counter({LadderStep.PREFIX: self._store.prefix_evicted_blocks})

    def count(self, step: LadderStep, blocks: int) -> None:
        """Note blocks that were got back."""
        self._reclaimed[step] += max(0, blocks)

    # What the manager says.

    def obey(self, directive: Directive) -> None:
        """Take a directive, which the next step carries out."""
        self._directive = directive
        self._ordered_blocks = directive.reclaim_blocks

    @property
    def has_orders(self) -> bool:
        """Say whether the last directive is yet to be carried out."""
        return self._directive is not None and self._directive.number != self.directive_done

    def begin_step(self, running: Sequence[Stream], *, now_s: float) -> None:
        """Carry out what is due before anything is computed."""
        self._now_s = now_s
        self._cut_to_granted(running)
        self._lift_budgets(running)
        self._keep_allowances(running)
        if self._ordered_blocks:
            self.get_back(self._ordered_blocks, running)
            self._ordered_blocks = 0
        if self._directive is not None and not is_measuring(running):
            self.directive_done = self._directive.number

    def _cut_to_granted(self, running: Iterable[Stream]) -> None:
        for sequence in running:
            if sequence.granted_budget is None:
                continue
            wanted, granted = sequence.wanted_budget, sequence.granted_budget
            sequence.wanted_budget = sequence.granted_budget = None
            before = held_blocks(sequence)
            if blocks_for(granted + 1, self._store.block_size) <= before:
                self._cut(sequence, granted, LadderStep.SHRINK)
            if granted != wanted or held_blocks(sequence) == before:
                sequence.floor_blocks = held_blocks(sequence)

    def _lift_budgets(self, running: Iterable[Stream]) -> None:
        if self._store.num_available <= ROOMY_SHARE * self._store.num_blocks:
            return
        surplus = _surplus_by_tenant(running)
        self.price = 0.0
        for sequence in running:
            kv = sequence.kv
            if kv is None or kv.budget is None or not can_be_shrunk(sequence):
                continue
            allowance = self._allowances.get(sequence.tenant)
            if allowance is None or surplus[sequence.tenant] < allowance:
                surplus[sequence.tenant] += 1
                self._store.lift_budget(kv)

    @property
    def _allowances(self) -> Mapping[str, int]:
        return {} if self._directive is None else self._directive.allowances

    def _keep_allowances(self, running: Iterable[Stream]) -> None:
        """Shrink the elastic sequences of tenants that hold more than they may, or would with their next blocks."""
        pressing = set()
        for tenant, allowance in self._allowances.items():
            elastic = [sequence for sequence in running if sequence.is_elastic and sequence.tenant == tenant]
            excess = sum(map(self._surplus_with_next, elastic)) - allowance
            if elastic and excess >= 0:
                pressing.add(tenant)
            members = list(filter(can_be_shrunk, elastic))
            if excess > 0:
                pages = sum(held_blocks(each) + self._growth(each) for each in members) - excess
                self._share_out(members, pages, {}, LadderStep.SHRINK_OVER_QUOTA)
        self._store.prefix_evicted_first = pressing

    def _surplus_with_next(self, sequence: Stream) -> int:
        held = held_blocks(sequence) + self._growth(sequence)
        return max(0, held - sequence.request.terms.reserved_blocks)

    # Who needs blocks.

    def make_room(self, running: Sequence[Stream], blocks: int = 0) -> bool:
        """Get back what running sequences want for this step, and blocks for a newcomer.

        Returns False, and shrinks nobody, when the newcomer's cannot be had.
        """
        elastic = list(filter(can_be_shrunk, running))
        available = self._store.num_available
        if self._needed(running) + blocks <= available:
            return True
        missing = self._needed(running) - sum(map(self._growth, elastic)) + blocks - available
        if blocks and missing > sum(map(self._could_give, elastic)):
            return False
        self._shrink(missing, elastic)
        return True

    def share_with(self, running: Sequence[Stream], newcomer: Stream) -> int | None:
        """Shrink the others and return the blocks that are an elastic newcomer's; None when it must wait."""
        elastic = list(filter(can_be_shrunk, running))
        bids = [*map(self._bid, elastic), bid_of_newcomer(newcomer, self._store.block_size)]
        others = self._needed(running) - sum(map(self._growth, elastic))
        pages = sum(map(held_blocks, elastic)) + self._store.num_available - others
        if sum(each.most for each in bids) <= pages:
            return bids[-1].most
        if sum(each.least for each in bids) > pages:
            return None
        allocation = allocate(bids, pages, {}, self.rule)
        self.price = allocation.price
        self._hold_all(elastic, bids, allocation.pages, LadderStep.SHRINK)
        return allocation.pages[bids[-1].name]

    def get_back(self, blocks: int, candidates: Iterable[Stream]) -> None:
        """Have so many blocks available, as far as shrinking the candidates gives them."""
        before = -1
        while before < (available := self._store.num_available) < blocks:
            self._shrink(blocks - available, list(filter(can_be_shrunk, candidates)))
            before = available

    def _shrink(self, missing: int, elastic: Sequence[Stream]) -> None:
        """Get back what is missing and a little more: from tenants that hold more than they may, then from all."""
        missing = max(missing, int(RECLAIMED_SHARE * self._store.num_blocks))
        surplus = _surplus_by_tenant(elastic)
        excess = {t: surplus[t] - allowance for t, allowance in self._allowances.items() if surplus[t] > allowance}
        if excess and missing > 0:
            members = [sequence for sequence in elastic if sequence.tenant in excess]
            held = _held_by_tenant(members)
            floors = {tenant: TenantBounds(floor=held[tenant] - excess[tenant]) for tenant in excess}
            pages = held.total() - min(missing, sum(excess.values()))
            missing -= self._share_out(members, pages, floors, LadderStep.SHRINK_OVER_QUOTA)
            if missing <= 0:
                return
        elastic = list(filter(can_be_shrunk, elastic))
        self._share_out(elastic, sum(map(held_blocks, elastic)) - missing, {}, LadderStep.SHRINK)

    def _share_out(
        self, members: Sequence[Stream], pages: int, bounds: Mapping[str, TenantBounds], step: LadderStep
    ) -> int:
        """Hold sequences to what is theirs when they have so many blocks together; returns how many came free."""
        if not members:
            return 0
        before = self._store.num_available
        bids = list(map(self._bid, members))
        allocation = allocate(bids, pages, bounds, self.rule)
        self.price = allocation.price
        self._hold_all(members, bids, allocation.pages, step)
        return self._store.num_available - before

    def _hold_all(
        self, members: Sequence[Stream], bids: Sequence[Bidder], pages: Mapping[str, int], step: LadderStep
    ) -> None:
        for sequence, its_bid in zip(members, bids, strict=False):
            if pages[its_bid.name] < its_bid.most:
                self._hold(sequence, pages[its_bid.name] * self._store.block_size - 1, step)

    def _hold(self, sequence: Stream, budget: int, step: LadderStep) -> None:
        """Hold a sequence to a budget, cut to it if need be; where a floor is to be kept, that is measured first."""
        kv = sequence.kv
        assert kv is not None
        if budget >= kv.alive_slots:
            if kv.budget is None or kv.budget > budget:
                kv.budget = budget
                self._count_shrink(sequence, 0)
        elif sequence.keeps_floor:
            sequence.wanted_budget = budget
        else:
            self._cut(sequence, budget, step)

    def _cut(self, sequence: Stream, budget: int, step: LadderStep) -> None:
        """Cut a sequence, unless the copies of what it shares would cost more than comes free."""
        kv = sequence.kv
        assert kv is not None
        blocks, gain = blocks_for(budget + 1, self._store.block_size), self._store.gain_of_cut(kv, budget)
        if gain < 0 or (gain == 0 and blocks < held_blocks(sequence)):
            return
        before, alive = self._store.num_available, kv.alive_slots
        if self._store.shrink(kv, budget):
            kv.budget = max(budget, blocks * self._store.block_size - 1)
            self._count_shrink(sequence, alive - kv.alive_slots)
            self.count(step, self._store.num_available - before)

    def _count_shrink(self, sequence: Stream, dropped_tokens: int) -> None:
        sequence.shrinks += 1
        sequence.note(EventKind.SHRUNK, self._now_s, dropped_tokens)

    def _could_give(self, sequence: Stream) -> int:
        """Return how many blocks would come free if a sequence were cut to its least."""
        least = self._bid(sequence).least
        if sequence.kv is None or least >= held_blocks(sequence):
            return 0
        return max(0, self._store.gain_of_cut(sequence.kv, least * self._store.block_size - 1))

    def _bid(self, sequence: Stream) -> Bidder:
        return bid(sequence, self._store.block_size)

    def _growth(self, sequence: Stream) -> int:
        return growth_blocks(sequence, self._store.block_size)

    def _needed(self, running: Iterable[Stream]) -> int:
        return sum(blocks_to_go_on(sequence, self._store) for sequence in running)


def is_measuring(running: Iterable[Stream]) -> bool:
    """Say whether blocks may come free once a floor was measured."""
    return any(sequence.wanted_budget is not None for sequence in running)


def _surplus_by_tenant(sequences: Iterable[Stream]) -> Counter[str]:
    surplus: Counter[str] = Counter()
    for sequence in sequences:
        if sequence.is_elastic:
            surplus[sequence.tenant] += surplus_blocks(sequence)
    return surplus


def _held_by_tenant(sequences: Iterable[Stream]) -> Counter[str]:
    held: Counter[str] = Counter()
    for sequence in sequences:
        held[sequence.tenant] += held_blocks(sequence)
    return held
