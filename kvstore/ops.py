"""Memory operations that a step carries out, in order, before its forward pass.

Bookkeeping decides them at once and memory follows: a block freed by one operation may be the target of a later one.
The other kinds are kernels' `ShrinkRequest` and the writes of the forward pass itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvorum.kernels.plan import ShrinkRequest
from kvorum.kvstore.types import BlockId, SeqId, SnapshotId


@dataclass(frozen=True, slots=True)
class Residence:
    """Where a sequence's slots are: what it takes to look at them. A swapped sequence has no blocks."""

    seq_id: SeqId
    row: int
    block_ids: tuple[BlockId, ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy whole blocks with scores and positions."""

    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class ClearVictims:
    """Forget a row's pending victims."""

    row: int


@dataclass(frozen=True, slots=True)
class SaveScores:
    """Keep a copy of the scores of a sequence's first slots."""

    snapshot_id: SnapshotId
    block_ids: tuple[BlockId, ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class LoadScores:
    """Set the scores of a sequence's first slots from a snapshot; None sets zeros."""

    snapshot_id: SnapshotId | None
    block_ids: tuple[BlockId, ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class DropScores:
    """Forget a snapshot."""

    snapshot_id: SnapshotId


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Move a sequence's living slots to host memory; pending victims are left behind."""

    seq_id: SeqId
    row: int
    block_ids: tuple[BlockId, ...]
    num_slots: int


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Move a sequence's slots back into the first slots of these blocks."""

    seq_id: SeqId
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class DropSwap:
    """Forget a sequence in host memory."""

    seq_id: SeqId


MemoryOp = (
    CopyBlocks | ClearVictims | SaveScores | LoadScores | DropScores | SwapOut | SwapIn | DropSwap | ShrinkRequest
)
