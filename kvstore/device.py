"""The KV store's memory on one rank: a back end's pool, score snapshots, and sequences moved to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch

from kvorum.kernels.backend import Backend, HostBlocks, PoolT, SlotView, StepT
from kvorum.kernels.plan import ShrinkRequest
from kvorum.kvstore import ops
from kvorum.kvstore.types import BlockId, SeqId, SnapshotId


class DeviceStore(Generic[PoolT, StepT]):
    """Carries out the bookkeeping's memory operations; decides nothing."""

    def __init__(self, backend: Backend[PoolT, StepT], pool: PoolT) -> None:
        self._backend = backend
        self.pool = pool
        self._snapshots: dict[SnapshotId, torch.Tensor] = {}
        self._swapped: dict[SeqId, HostBlocks] = {}

    @property
    def num_snapshots(self) -> int:
        """Score snapshots kept for the prefix tree."""
        return len(self._snapshots)

    @property
    def num_swapped(self) -> int:
        """Sequences in host memory."""
        return len(self._swapped)

    def carry_out(self, op: ops.MemoryOp) -> None:
        """Do one memory operation."""
        match op:
            case ops.CopyBlocks(sources, targets):
                self._backend.copy_blocks(self.pool, sources, targets)
            case ops.ClearVictims(row):
                self._backend.clear_victims(self.pool, row)
            case ShrinkRequest():
                self._backend.shrink(self.pool, op)
            case ops.SaveScores(snapshot_id, block_ids, num_slots):
                self._snapshots[snapshot_id] = self._backend.read_scores(self.pool, block_ids, num_slots)
            case ops.LoadScores(snapshot_id, block_ids, num_slots):
                self._load_scores(snapshot_id, block_ids, num_slots)
            case ops.DropScores(snapshot_id):
                del self._snapshots[snapshot_id]
            case ops.SwapOut(seq_id, row, block_ids, num_slots):
                self._swapped[seq_id] = self._export_alive(ops.Residence(seq_id, row, block_ids, num_slots))
            case ops.SwapIn(seq_id, block_ids):
                self._backend.import_slots(self.pool, block_ids, self._swapped.pop(seq_id))
            case ops.DropSwap(seq_id):
                del self._swapped[seq_id]

    def view(self, residence: ops.Residence) -> SlotView:
        """Gather positions, scores and life of a sequence's slots."""
        if swapped := self._swapped.get(residence.seq_id):
            return SlotView(swapped.positions, swapped.scores, torch.ones_like(swapped.positions, dtype=torch.bool))
        return self._backend.view_slots(self.pool, residence.row, residence.block_ids, residence.num_slots)

    def _load_scores(self, snapshot_id: SnapshotId | None, block_ids: Sequence[BlockId], num_slots: int) -> None:
        if snapshot_id is None:
            scores = torch.zeros_like(self._backend.read_scores(self.pool, block_ids, num_slots))
        else:
            scores = self._snapshots[snapshot_id]
        self._backend.write_scores(self.pool, block_ids, scores)

    def _export_alive(self, residence: ops.Residence) -> HostBlocks:
        """Export a sequence without its pending victims: one slot less in every (layer, KV head), in slot order."""
        slots = self._backend.export_slots(self.pool, residence.block_ids, residence.num_slots)
        alive = self.view(residence).alive.cpu()
        if bool(alive.all()):
            return slots
        layers, heads, _ = alive.shape
        kept = alive.nonzero()[:, 2].view(layers, heads, -1)
        wide = kept[..., None].expand(*kept.shape, slots.keys.shape[-1])
        return HostBlocks(
            keys=slots.keys.gather(2, wide),
            values=slots.values.gather(2, wide),
            positions=slots.positions.gather(2, kept),
            scores=slots.scores.gather(2, kept),
        )
