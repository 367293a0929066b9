"""The reference back end's pool: plain tensors, and the bookkeeping moves on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvorum.kernels.backend import HostBlocks, SlotView
from kvorum.kernels.plan import ShrinkRequest
from kvorum.kernels.reference.attention import pool_values, rank_order, values_of

NO_VICTIM = -1


@dataclass(frozen=True, slots=True)
class ReferencePool:
    """The blocks of all layers on one rank.

    kv: [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]; keys at index 0, rotated at their positions.
    scores: [num_layers, num_blocks, num_kv_heads, block_size] float32 (float64 for a float64 model).
    positions: the same shape, int64.
    victims: [num_layers, max_num_seqs, num_kv_heads] int64, the pending victim's slot or NO_VICTIM.
    """

    kv: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    victims: torch.Tensor

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.positions.shape[-1]

    def locate(self, block_table: Sequence[int], num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block ids and offsets [num_slots] of a sequence's first slots."""
        slots = torch.arange(num_slots, device=self.kv.device)
        table = torch.tensor(block_table, dtype=torch.int64, device=self.kv.device)
        assert num_slots <= len(block_table) * self.block_size, "block table is too short"
        return table[slots // self.block_size], slots % self.block_size


def view_slots(pool: ReferencePool, row: int, block_table: Sequence[int], num_slots: int) -> SlotView:
    """Gather positions, scores and life of a sequence's slots, in slot order."""
    blocks, offsets = pool.locate(block_table, num_slots)
    alive = torch.ones(
        pool.positions.shape[0], pool.positions.shape[2], num_slots, dtype=torch.bool, device=pool.kv.device
    )
    victims = pool.victims[:, row]
    layers, heads = (victims != NO_VICTIM).nonzero(as_tuple=True)
    alive[layers, heads, victims[layers, heads]] = False
    return SlotView(
        positions=pool.positions[:, blocks, :, offsets].permute(1, 2, 0),
        scores=pool.scores[:, blocks, :, offsets].permute(1, 2, 0),
        alive=alive,
    )


def shrink(pool: ReferencePool, request: ShrinkRequest) -> None:
    """Keep the best slots of each (layer, KV head), in slot order, in the target blocks."""
    view = view_slots(pool, request.row, request.sources, request.num_slots)
    values = values_of(request.rule, view.scores, view.positions, request.newest)
    values = pool_values(values, view.positions, request.pool_width)
    order = rank_order(request.rule, values, view.positions, view.alive, newest=request.newest)
    kept = order[..., request.num_slots - request.keep :].sort(dim=-1).values
    exported = export_slots(pool, request.sources, request.num_slots)
    wide = kept[..., None].expand(*kept.shape, exported.keys.shape[-1])
    survivors = HostBlocks(
        keys=exported.keys.gather(2, wide),
        values=exported.values.gather(2, wide),
        positions=exported.positions.gather(2, kept),
        scores=exported.scores.gather(2, kept),
    )
    import_slots(pool, request.targets, survivors)
    pool.victims[:, request.row] = NO_VICTIM


def export_slots(pool: ReferencePool, block_table: Sequence[int], num_slots: int) -> HostBlocks:
    """Gather a sequence's slots, in slot order."""
    blocks, offsets = pool.locate(block_table, num_slots)
    return HostBlocks(
        keys=pool.kv[:, blocks, 0, :, offsets].permute(1, 2, 0, 3),
        values=pool.kv[:, blocks, 1, :, offsets].permute(1, 2, 0, 3),
        positions=pool.positions[:, blocks, :, offsets].permute(1, 2, 0),
        scores=pool.scores[:, blocks, :, offsets].permute(1, 2, 0),
    )


def import_slots(pool: ReferencePool, block_table: Sequence[int], slots: HostBlocks) -> None:
    """Write gathered slots into the first slots of the given blocks."""
    blocks, offsets = pool.locate(block_table, slots.num_slots)
    pool.kv[:, blocks, 0, :, offsets] = slots.keys.to(pool.kv.device).permute(2, 0, 1, 3)
    pool.kv[:, blocks, 1, :, offsets] = slots.values.to(pool.kv.device).permute(2, 0, 1, 3)
    pool.positions[:, blocks, :, offsets] = slots.positions.to(pool.kv.device).permute(2, 0, 1)
    pool.scores[:, blocks, :, offsets] = slots.scores.to(pool.kv.device).permute(2, 0, 1)


def read_scores(pool: ReferencePool, block_table: Sequence[int], num_slots: int) -> torch.Tensor:
    """Return a copy of the scores of a sequence's first slots, [num_layers, num_kv_heads, num_slots]."""
    blocks, offsets = pool.locate(block_table, num_slots)
    return pool.scores[:, blocks, :, offsets].permute(1, 2, 0)


def write_scores(pool: ReferencePool, block_table: Sequence[int], scores: torch.Tensor) -> None:
    """Overwrite the scores of a sequence's first slots with [num_layers, num_kv_heads, num_slots]."""
    blocks, offsets = pool.locate(block_table, scores.shape[-1])
    pool.scores[:, blocks, :, offsets] = scores.to(pool.scores).permute(2, 0, 1)


def copy_blocks(pool: ReferencePool, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy whole blocks with scores and positions."""
    for tensor in (pool.kv, pool.scores, pool.positions):
        tensor[:, list(targets)] = tensor[:, list(sources)]
