"""What the store knows of one sequence: its blocks, its slots and what it may lose."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvorum.kernels.plan import EvictionRule
from kvorum.kvstore.ops import Residence
from kvorum.kvstore.policies import Policy
from kvorum.kvstore.types import BlockId, SeqId, blocks_for


@dataclass(slots=True)
class SequenceKV:
    """One sequence's part of the pool.

        tokens written   0 ........................ num_tokens
        slots in use     |<-- alive_slots -->|(victim)|          num_slots = alive_slots + 1 while a victim is pending
        blocks           |<-- block_ids ------------->|..|       blocks_for(num_slots) or more, tail unused

    budget: tokens kept per KV head, None without limit. prompt_tokens: length of the client's prompt.
    num_cached_tokens: tokens taken from the prefix tree. num_shared: leading blocks that the prefix tree may hold too,
    and that must not change. cuts: prompt lengths at which scores are saved for the prefix tree, ascending. swapped:
    its slots are in host memory and it holds no block. tight: the pool is too short for its whole prompt, so it is cut
    to its budget before each further chunk.
    """

    seq_id: SeqId
    row: int
    policy: Policy
    budget: int | None
    prompt_tokens: int
    salt: str
    tenant: str = ""
    block_ids: list[BlockId] = field(default_factory=list)
    num_tokens: int = 0
    num_slots: int = 0
    num_cached_tokens: int = 0
    num_shared: int = 0
    victim_pending: bool = False
    swapped: bool = False
    tight: bool = False
    evicted_in_prefill: bool = False
    cuts: list[int] = field(default_factory=list)

    @property
    def alive_slots(self) -> int:
        """Tokens kept per (layer, KV head)."""
        return self.num_slots - int(self.victim_pending)

    @property
    def num_evicted(self) -> int:
        """Tokens no longer kept, per (layer, KV head)."""
        return self.num_tokens - self.alive_slots

    @property
    def keeps_scores(self) -> bool:
        """Say whether attention mass is recorded."""
        return self.policy.evicts

    @property
    def rule(self) -> EvictionRule | None:
        """What kernels evaluate for this sequence; None keeps no scores."""
        return self.policy.rule(self.budget, prompt_tokens=self.prompt_tokens) if self.keeps_scores else None

    @property
    def over_budget(self) -> bool:
        """Say whether more tokens are kept than the budget allows."""
        return self.budget is not None and self.alive_slots > self.budget

    @property
    def residence(self) -> Residence:
        """Where its slots are."""
        return Residence(self.seq_id, self.row, tuple(self.block_ids), self.num_slots)

    def missing_blocks(self, num_slots: int, block_size: int) -> int:
        """Return how many more blocks num_slots slots need."""
        return max(0, blocks_for(num_slots, block_size) - len(self.block_ids))
