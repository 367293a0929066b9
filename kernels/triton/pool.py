"""The Triton back end's pool, and the moves between it and the host that no step waits for: plain torch indexing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvorum.kernels.backend import HostBlocks, SlotView
from kvorum.kernels.triton.records import NO_VICTIM


@dataclass(frozen=True, slots=True)
class PoolLayer:
    """One layer of a TritonPool: its tensors without their first dimension."""

    kv: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    victims: torch.Tensor
    logits: torch.Tensor

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return self.kv.shape[2]

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.logits.shape[2]

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        """Numbers in a key."""
        return self.kv.shape[4]


@dataclass(frozen=True, slots=True, eq=False)
class TritonPool:
    """The blocks of all layers on one rank.

    kv: [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]; keys at index 0, rotated at their positions.
    scores: [num_layers, num_blocks, num_kv_heads, block_size] float32.
    positions: the same shape, int32.
    victims: [num_layers, max_num_seqs, num_kv_heads] int32, the pending victim's slot or NO_VICTIM.
    logits: [num_blocks, num_kv_heads, group_size, block_size] float32: what a decode step's queries gave each slot in
        the layer at hand, until the log-sum-exp is known. Sequences that keep scores share no block, so a slot's
        place is its own.
    """

    kv: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    victims: torch.Tensor
    logits: torch.Tensor

    def layer(self, index: int) -> PoolLayer:
        """Return one layer's part."""
        return PoolLayer(
            self.kv[index], self.scores[index], self.positions[index], self.victims[index], logits=self.logits
        )

    @property
    def block_size(self) -> int:
        """Slots in a block."""
        return self.positions.shape[-1]

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.positions.shape[1]

    def locate(self, block_table: Sequence[int], num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return block ids and offsets [num_slots] of a sequence's first slots."""
        assert num_slots <= len(block_table) * self.block_size, "block table is too short"
        slots = torch.arange(num_slots, device=self.kv.device)
        table = torch.tensor(block_table, dtype=torch.int64, device=self.kv.device)
        return table[slots // self.block_size], slots % self.block_size


def view_slots(pool: TritonPool, row: int, block_table: Sequence[int], num_slots: int) -> SlotView:
    """Gather positions, scores and life of a sequence's slots, in slot order."""
    blocks, offsets = pool.locate(block_table, num_slots)
    slots = torch.arange(num_slots, device=pool.kv.device)
    return SlotView(
        positions=pool.positions[:, blocks, :, offsets].permute(1, 2, 0).long(),
        scores=pool.scores[:, blocks, :, offsets].permute(1, 2, 0),
        alive=slots != pool.victims[:, row, :, None],
    )


def read_scores(pool: TritonPool, block_table: Sequence[int], num_slots: int) -> torch.Tensor:
    """Return a copy of the scores of a sequence's first slots, [num_layers, num_kv_heads, num_slots]."""
    blocks, offsets = pool.locate(block_table, num_slots)
    return pool.scores[:, blocks, :, offsets].permute(1, 2, 0)


def write_scores(pool: TritonPool, block_table: Sequence[int], scores: torch.Tensor) -> None:
    """Overwrite the scores of a sequence's first slots with [num_layers, num_kv_heads, num_slots]."""
    blocks, offsets = pool.locate(block_table, scores.shape[-1])
    pool.scores[:, blocks, :, offsets] = scores.to(pool.scores).permute(2, 0, 1)


def export_slots(pool: TritonPool, block_table: Sequence[int], num_slots: int, *, dtype: torch.dtype) -> HostBlocks:
    """Copy a sequence's slots to host memory, K and V in dtype, which must hold every number of the pool's."""
    blocks, offsets = pool.locate(block_table, num_slots)
    keys, values = (
        _bits(pool.kv)[:, blocks, part, :, offsets].view(pool.kv.dtype).permute(1, 2, 0, 3).to("cpu", dtype)
        for part in (0, 1)
    )
    return HostBlocks(
        keys=keys,
        values=values,
        positions=pool.positions[:, blocks, :, offsets].permute(1, 2, 0).to("cpu", torch.int64),
        scores=pool.scores[:, blocks, :, offsets].permute(1, 2, 0).cpu(),
    )


def import_slots(pool: TritonPool, block_table: Sequence[int], slots: HostBlocks) -> None:
    """Write exported slots into the first slots of the given blocks."""
    blocks, offsets = pool.locate(block_table, slots.num_slots)
    for part, numbers in enumerate((slots.keys, slots.values)):
        _bits(pool.kv)[:, blocks, part, :, offsets] = _bits(numbers.to(pool.kv)).permute(2, 0, 1, 3)
    pool.positions[:, blocks, :, offsets] = slots.positions.to(pool.positions).permute(2, 0, 1)
    pool.scores[:, blocks, :, offsets] = slots.scores.to(pool.scores).permute(2, 0, 1)


def clear_victims(pool: TritonPool, row: int) -> None:
    """Forget a row's pending victims."""
    pool.victims[:, row] = NO_VICTIM.value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return float8 as bytes: not every device indexes float8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
