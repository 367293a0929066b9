"""The CPU back end's pool and the bookkeeping moves on it; native/pool.h describes the layout.

Blocks are cut into panels of 16 slots; for each (layer, KV head) the panels of all blocks lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from kvorum.kernels.backend import HostBlocks, SlotView
from kvorum.kernels.cpu.library import CPool
from kvorum.kernels.cpu.memory import huge_zeros
from kvorum.kernels.plan import ShrinkRequest
from kvorum.kernels.reference.attention import pool_values, rank_order, values_of
from kvorum.kernels.reference.pool import NO_VICTIM
from kvorum.kernels.spec import DecoderSpec, Shard

LANES = 16


class KVFormat(IntEnum):
    """native/pool.h, KVFormat."""

    F32 = 0
    BF16 = 1
    INT8 = 2


_KV_FORMATS = {torch.float32: KVFormat.F32, torch.bfloat16: KVFormat.BF16, torch.int8: KVFormat.INT8}
KV_DTYPES = tuple(_KV_FORMATS)


@dataclass(frozen=True, slots=True)
class CpuPool:
    """The blocks of all layers on one rank.

    kv: [num_layers, num_kv_heads, num_panels, 2 * 16 * head_dim] of kv's dtype, K transposed and then V.
    scores float32, positions int32: [num_layers, num_kv_heads, num_panels, 16].
    scales: [num_layers, num_kv_heads, num_panels, 2, 16] float32 of int8 K and V, else empty.
    victims: [num_layers, max_num_seqs, num_kv_heads] int32, the pending victim's slot or NO_VICTIM.
    """

    kv: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    scales: torch.Tensor
    victims: torch.Tensor
    block_size: int
    struct: CPool

    @property
    def head_dim(self) -> int:
        """Length of a head."""
        return self.kv.shape[-1] // (2 * LANES)

    def panels(self, block_table: Sequence[int], num_slots: int) -> torch.Tensor:
        """Return the panels that hold a sequence's first slots: [ceil(num_slots / 16)] int32."""
        assert num_slots <= len(block_table) * self.block_size, "block table is too short"
        panels = panels_of(np.array(block_table, np.int32), self.block_size // LANES)
        return torch.from_numpy(panels[: -(-num_slots // LANES)])


def panels_of(block_ids: NDArray[np.int32], panels_per_block: int) -> NDArray[np.int32]:
    """Return the panels of blocks, in order."""
    panels = np.add.outer(block_ids * panels_per_block, np.arange(panels_per_block, dtype=np.int32))
    return np.asarray(panels.ravel(), np.int32)


def block_bytes(spec: DecoderSpec, shard: Shard, *, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers: K and V, scores and positions, and int8's scales."""
    scale_bytes = 2 * 4 if dtype == torch.int8 else 0
    return (
        spec.num_layers * shard.num_kv_heads * block_size * (2 * spec.head_dim * dtype.itemsize + 4 + 4 + scale_bytes)
    )


def allocate(
    spec: DecoderSpec, shard: Shard, *, num_blocks: int, block_size: int, max_num_seqs: int, dtype: torch.dtype
) -> CpuPool:
    """Allocate a pool of zeros; its memory is taken from the system as blocks are first used."""
    assert block_size % LANES == 0, f"block_size must be a multiple of {LANES}"
    num_panels = num_blocks * block_size // LANES
    pairs = (spec.num_layers, shard.num_kv_heads)
    kv = huge_zeros((*pairs, num_panels, 2 * LANES * spec.head_dim), dtype)
    scores = huge_zeros((*pairs, num_panels, LANES), torch.float32)
    positions = huge_zeros((*pairs, num_panels, LANES), torch.int32)
    scales = huge_zeros((*pairs, num_panels if dtype == torch.int8 else 0, 2, LANES), torch.float32)
    victims = torch.full((spec.num_layers, max_num_seqs, shard.num_kv_heads), NO_VICTIM, dtype=torch.int32)
    struct = CPool(
        kv=kv.data_ptr(),
        scores=scores.data_ptr(),
        positions=positions.data_ptr(),
        scales=scales.data_ptr() if dtype == torch.int8 else None,
        victims=victims.data_ptr(),
        num_panels=num_panels,
        num_layers=spec.num_layers,
        num_kv_heads=shard.num_kv_heads,
        head_dim=spec.head_dim,
        max_num_seqs=max_num_seqs,
        format=_KV_FORMATS[dtype],
    )
    return CpuPool(kv, scores, positions, scales, victims, block_size, struct)


def copy_blocks(pool: CpuPool, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy whole blocks with scores and positions."""
    from_panels = pool.panels(sources, len(sources) * pool.block_size).long()
    to_panels = pool.panels(targets, len(targets) * pool.block_size).long()
    for tensor in (pool.kv, pool.scores, pool.positions, pool.scales):
        if tensor.numel():
            tensor[:, :, to_panels] = tensor[:, :, from_panels]


def gather(tensor: torch.Tensor, panels: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return a copy [num_layers, num_kv_heads, num_slots] of scores or positions."""
    return tensor.index_select(2, panels).flatten(2)[..., :num_slots]


def scatter(tensor: torch.Tensor, panels: torch.Tensor, slots: torch.Tensor) -> None:
    """Write [num_layers, num_kv_heads, num_slots] into the first slots of scores or positions."""
    old = gather(tensor, panels, len(panels) * LANES)
    old[..., : slots.shape[-1]] = slots
    tensor[:, :, panels.long()] = old.unflatten(2, (-1, LANES))


def view_slots(pool: CpuPool, row: int, block_table: Sequence[int], num_slots: int) -> SlotView:
    """Gather positions, scores and life of a sequence's slots, in slot order."""
    panels = pool.panels(block_table, num_slots)
    positions = gather(pool.positions, panels, num_slots).long()
    victims = pool.victims[:, row, :, None]
    alive = torch.arange(num_slots, dtype=victims.dtype) != victims
    return SlotView(positions=positions, scores=gather(pool.scores, panels, num_slots), alive=alive)


def export_slots(library: CDLL, pool: CpuPool, block_table: Sequence[int], num_slots: int) -> HostBlocks:
    """Copy a sequence's slots out, in slot order; int8 comes as float32."""
    slots = torch.arange(num_slots).expand(*pool.victims.shape[::2], num_slots)
    return _read(library, pool, pool.panels(block_table, num_slots), slots)


def import_slots(library: CDLL, pool: CpuPool, block_table: Sequence[int], blocks: HostBlocks) -> None:
    """Write exported slots into the first slots of the given blocks."""
    panels = pool.panels(block_table, blocks.num_slots)
    keys, values = blocks.keys.float().contiguous(), blocks.values.float().contiguous()
    library.kvorum_write_slots(
        byref(pool.struct), panels.data_ptr(), blocks.num_slots, keys.data_ptr(), values.data_ptr()
    )
    scatter(pool.positions, panels, blocks.positions.to(torch.int32))
    scatter(pool.scores, panels, blocks.scores.float())


def shrink(library: CDLL, pool: CpuPool, request: ShrinkRequest) -> None:
    """Keep the best slots of each (layer, KV head), in slot order, in the target blocks."""
    view = view_slots(pool, request.row, request.sources, request.num_slots)
    values = values_of(request.rule, view.scores, view.positions, request.newest)
    values = pool_values(values, view.positions, request.pool_width)
    order = rank_order(request.rule, values, view.positions, view.alive, newest=request.newest)
    kept = order[..., request.num_slots - request.keep :].sort(dim=-1).values
    survivors = _read(library, pool, pool.panels(request.sources, request.num_slots), kept)
    import_slots(library, pool, request.targets, survivors)
    pool.victims[:, request.row] = NO_VICTIM


def _read(library: CDLL, pool: CpuPool, panels: torch.Tensor, slots: torch.Tensor) -> HostBlocks:
    """Copy some slots [num_layers, num_kv_heads, count] of a sequence out."""
    slots = slots.contiguous()
    keys = torch.empty(*slots.shape, pool.head_dim)
    values = torch.empty_like(keys)
    library.kvorum_read_slots(
        byref(pool.struct),
        panels.data_ptr(),
        slots.data_ptr(),
        slots.shape[-1],
        keys.data_ptr(),
        values.data_ptr(),
    )
    num_slots = len(panels) * LANES
    dtype = torch.float32 if pool.kv.dtype == torch.int8 else pool.kv.dtype
    return HostBlocks(
        keys=keys.to(dtype),
        values=values.to(dtype),
        positions=gather(pool.positions, panels, num_slots).gather(2, slots).long(),
        scores=gather(pool.scores, panels, num_slots).gather(2, slots),
    )
