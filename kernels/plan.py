"""What back ends are asked to do, as plain data. Imports no torch, so that pure code can build it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """A policy in the numbers that kernels evaluate for each slot.

    A slot's rank is (protected, value, position), lowest goes first:
      protected: position < sink_tokens, or position > newest - recent_tokens;
      value: 0 when by_age, else the score, divided by the token's lifetime when per_lifetime.
    The score is the attention mass received, summed over the query heads of the group and over the queries at
    positions >= observe_from; each later query multiplies what was there by decay. The lifetime is the same sum with
    every probability 1: newest - position + 1 queries without decay.
    """

    recent_tokens: int
    sink_tokens: int = 0
    by_age: bool = False
    per_lifetime: bool = False
    decay: float = 1.0
    observe_from: int = 0


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """What one sequence does in a step.

    row: where the sequence's victims are kept, 0 <= row < max_num_seqs. block_table: enough blocks for all slots.
    start: position of the first new token; num_tokens: new tokens. num_slots: slots in use before the step.
    replace: the single new token goes into each pair's victim slot; else new tokens take the next slots.
    rule: keep scores by this rule; None keeps none. choose_victims: choose them after this step.
    """

    row: int
    block_table: tuple[int, ...]
    start: int
    num_tokens: int
    num_slots: int
    rule: EvictionRule | None = None
    replace: bool = False
    choose_victims: bool = False

    @property
    def num_slots_after(self) -> int:
        """Slots in use after the step."""
        return self.num_slots + (0 if self.replace else self.num_tokens)


@dataclass(frozen=True, slots=True)
class ShrinkRequest:
    """Cut a sequence to fewer slots.

    sources: the blocks that hold its num_slots slots; targets: blocks for `keep` slots, either the first of the
    sources or disjoint from them. newest: position of the newest token. pool_width: before ranking, each value becomes
    the largest of itself and its neighbours within a window of this odd width, over slots in position order
    (SnapKV, section 4.2); 1 is off. Pending victims go first.
    """

    row: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_slots: int
    keep: int
    newest: int
    rule: EvictionRule
    pool_width: int = 1
