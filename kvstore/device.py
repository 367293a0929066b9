"""The KV store's memory on one rank: a back end's pool, score snapshots, and sequences moved to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

import torch

from kvorum.kernels.backend import Backend, HostBlocks, PoolT, SlotView, StepT
from kvorum.kernels.plan import EvictionRule, ShrinkRequest
from kvorum.kernels.reference.attention import choose_victims
from kvorum.kvstore import ops
from kvorum.kvstore.types import BlockId, SeqId, SnapshotId


class DeviceStore(Generic[PoolT, StepT]):
    """Carries out the bookkeeping's memory operations; decides nothing."""

    def __init__(
        self,
        backend: Backend[PoolT, StepT],
        pool: PoolT,
        *,
        share_scores: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
    ) -> None:
        """share_scores: returns the mean of the scores of all ranks that hold the same KV heads as this one."""
        self._backend = backend
        self._is_replicated = len(backend.shard.replicas) > 1
        self._share_scores = share_scores
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
            case ShrinkRequest(sources=sources, num_slots=num_slots):
                self._agree(sources, num_slots)
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

    def agree_on_scores(self, residence: ops.Residence) -> None:
        """Give a sequence the same scores on all replicas of its heads, so that they decide alike."""
        self._agree(residence.block_ids, residence.num_slots)

    def choose_victims(self, residence: ops.Residence, rule: EvictionRule, *, newest: int) -> None:
        """Choose a sequence's victims by scores that all replicas agree on."""
        self.agree_on_scores(residence)
        view = self.view(residence)
        victims = choose_victims(rule, view.scores, view.positions, newest=newest)
        self._backend.set_victims(self.pool, residence.row, victims)

    def _agree(self, block_ids: Sequence[int], num_slots: int) -> None:
        if self._is_replicated:
            scores = self._share_scores(self._backend.read_scores(self.pool, block_ids, num_slots).contiguous())
            self._backend.write_scores(self.pool, block_ids, scores)

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
