"""Shrink: select the best slots of each (layer, KV head) and move them together, all layers in three launches.

1. `slot_values_kernel` gathers what each slot is worth; SnapKV's pooling, if asked for, is a max-pool of that.
2. `select_kernel` finds the keep-th largest rank exactly, by bisection on bits: a float64 that is not negative orders
   like its bits, so (alive, protected, value) is one signed 64-bit key; slots that tie at the threshold are decided by
   a second bisection on their positions, which are all different. Then it lists the survivors in slot order.
3. `compact_kernel` moves survivors to the front. In place this is safe tile by tile: survivor j comes from a slot >= j,
   so a tile's targets lie before the sources of every later tile, and a barrier parts its own loads from its stores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvorum.kernels.plan import ShrinkRequest
from kvorum.kernels.reference.attention import pool_values
from kvorum.kernels.triton.pool import TritonPool, clear_victims
from kvorum.kernels.triton.ranking import is_protected, slot_values
from kvorum.kernels.triton.records import ROW
from kvorum.kernels.triton.step import rule_tensors

SLOT_TILE = 1024
MOVE_TILE = 64
# Scratch for ranks: layers are taken in groups that stay below it.
SCRATCH_BYTES = 64 << 20

DEAD = tl.constexpr(-(2**63))
# Bits of a float64 lie below this; a key of an unprotected slot has it subtracted.
SIGN = tl.constexpr(-(2**63))


@triton.jit(do_not_specialize=["num_slots"])
def slot_values_kernel(
    scores_ptr,
    positions_ptr,
    table_ptr,
    record_ptr,
    numbers_ptr,
    values_ptr,
    positions_out_ptr,
    num_blocks,
    num_slots,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather worth and position of BLOCK slots in one layer and KV head."""
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    slots = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = slots < num_slots
    blocks = tl.load(table_ptr + slots // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    places = ((layer * num_blocks + blocks) * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE
    scores = tl.load(scores_ptr + places, mask=live, other=0.0)
    positions = tl.load(positions_ptr + places, mask=live, other=0)
    row = (layer * NUM_KV_HEADS + head) * num_slots
    tl.store(values_ptr + row + slots, slot_values(record_ptr, numbers_ptr, scores, positions), mask=live)
    tl.store(positions_out_ptr + row + slots, positions, mask=live)


@triton.jit
def count_from(keys_ptr, num_slots, threshold, BLOCK: tl.constexpr):
    """Count keys >= threshold."""
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_slots, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        live = slots < num_slots
        keys = tl.load(keys_ptr + slots, mask=live, other=0)
        counts += (live & (keys >= threshold)).to(tl.int32)
    return tl.sum(counts)


@triton.jit
def count_equals_from(keys_ptr, positions_ptr, num_slots, key, position, BLOCK: tl.constexpr):
    """Count slots of this key at positions >= position."""
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_slots, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        live = slots < num_slots
        keys = tl.load(keys_ptr + slots, mask=live, other=0)
        positions = tl.load(positions_ptr + slots, mask=live, other=0)
        counts += (live & (keys == key) & (positions >= position)).to(tl.int32)
    return tl.sum(counts)


@triton.jit(do_not_specialize=["num_slots", "keep"])
def select_kernel(
    keys_ptr,
    positions_ptr,
    victims_ptr,
    record_ptr,
    kept_ptr,
    victims_stride,
    num_slots,
    keep,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the slots that stay in one layer and KV head; values in keys_ptr become keys."""
    head = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    row = layer * NUM_KV_HEADS + head
    keys_ptr += row * num_slots
    positions_ptr += row * num_slots
    kept_ptr += row * keep
    victim = tl.load(victims_ptr + layer * victims_stride + tl.load(record_ptr + ROW) * NUM_KV_HEADS + head)

    for first in range(0, num_slots, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        live = slots < num_slots
        bits = tl.load(keys_ptr + slots, mask=live, other=0)
        positions = tl.load(positions_ptr + slots, mask=live, other=0)
        keys = tl.where(is_protected(record_ptr, positions), bits, bits ^ SIGN)
        # One more than the lowest key of a slot that lives, which is that of worth 0 and unprotected.
        keys = tl.where(slots == victim, DEAD, keys + 1)
        tl.store(keys_ptr + slots, keys, mask=live)
    tl.debug_barrier()  # the keys are read by other threads from here on

    # The largest threshold that at least `keep` keys reach, a bit at a time; in unsigned order bit 63 comes first.
    threshold = tl.full([], SIGN, tl.int64)
    for step in range(64):
        candidate = threshold ^ (tl.full([], 1, tl.int64) << (63 - step))
        if count_from(keys_ptr, num_slots, candidate, BLOCK) >= keep:
            threshold = candidate
    oldest = tl.full([], 0, tl.int32)
    spare = count_from(keys_ptr, num_slots, threshold, BLOCK) - keep
    if spare > 0:  # of the slots at the threshold, the newest stay
        wanted = count_equals_from(keys_ptr, positions_ptr, num_slots, threshold, oldest, BLOCK) - spare
        for step in range(31):
            later = oldest + (tl.full([], 1, tl.int32) << (30 - step))
            if count_equals_from(keys_ptr, positions_ptr, num_slots, threshold, later, BLOCK) >= wanted:
                oldest = later

    listed = tl.full([], 0, tl.int32)
    for first in range(0, num_slots, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        live = slots < num_slots
        keys = tl.load(keys_ptr + slots, mask=live, other=0)
        positions = tl.load(positions_ptr + slots, mask=live, other=0)
        stays = live & ((keys > threshold) | ((keys == threshold) & (positions >= oldest)))
        places = listed + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(kept_ptr + places, slots, mask=stays)
        listed += tl.sum(stays.to(tl.int32))


@triton.jit(do_not_specialize=["keep"])
def compact_kernel(
    kv_ptr,
    scores_ptr,
    positions_ptr,
    kept_ptr,
    sources_ptr,
    targets_ptr,
    num_blocks,
    keep,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move one layer's and KV head's survivors: program 0 of axis 0 keys and positions, program 1 values and scores."""
    part = tl.program_id(0)
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    kept_ptr += (layer * NUM_KV_HEADS + head) * keep
    dims = tl.arange(0, BLOCK_D)
    for first in range(0, keep, BLOCK):
        targets = first + tl.arange(0, BLOCK)
        live = targets < keep
        sources = tl.load(kept_ptr + targets, mask=live, other=0)
        source_blocks = layer * num_blocks + tl.load(sources_ptr + sources // BLOCK_SIZE, mask=live, other=0)
        target_blocks = layer * num_blocks + tl.load(targets_ptr + targets // BLOCK_SIZE, mask=live, other=0)
        source_offsets, target_offsets = sources % BLOCK_SIZE, targets % BLOCK_SIZE
        moved = live & ((source_blocks != target_blocks) | (source_offsets != target_offsets))
        source_rows = ((2 * source_blocks + part) * NUM_KV_HEADS + head) * BLOCK_SIZE + source_offsets
        target_rows = ((2 * target_blocks + part) * NUM_KV_HEADS + head) * BLOCK_SIZE + target_offsets
        source_places = (source_blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + source_offsets
        target_places = (target_blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + target_offsets
        inside = moved[:, None] & (dims < HEAD_DIM)[None, :]
        numbers = tl.load(kv_ptr + source_rows[:, None] * HEAD_DIM + dims[None, :], mask=inside)  # [BLOCK, BLOCK_D]
        positions = tl.load(positions_ptr + source_places, mask=moved)
        scores = tl.load(scores_ptr + source_places, mask=moved)
        tl.debug_barrier()
        tl.store(kv_ptr + target_rows[:, None] * HEAD_DIM + dims[None, :], numbers, mask=inside)
        tl.store(positions_ptr + target_places, positions, mask=moved & (part == 0))
        tl.store(scores_ptr + target_places, scores, mask=moved & (part == 1))


def shrink(pool: TritonPool, request: ShrinkRequest) -> None:
    """Keep the best `request.keep` slots of each (layer, KV head), in slot order, in the target blocks."""
    num_layers, _, num_kv_heads, _ = pool.scores.shape
    assert 0 < request.keep <= request.num_slots <= len(request.sources) * pool.block_size
    assert request.keep <= len(request.targets) * pool.block_size
    device = pool.kv.device
    record, numbers = rule_tensors(request.rule, row=request.row, newest=request.newest, device=device)
    sources = torch.tensor(request.sources, dtype=torch.int32, device=device)
    targets = torch.tensor(request.targets, dtype=torch.int32, device=device)
    layers = max(1, SCRATCH_BYTES // (16 * num_kv_heads * request.num_slots))
    for first in range(0, num_layers, layers):
        part = slice(first, min(first + layers, num_layers))
        kept = _select(pool, part, request, sources, record, numbers)
        _compact(pool, part, kept, sources, targets)
    clear_victims(pool, request.row)


def _select(
    pool: TritonPool,
    part: slice,
    request: ShrinkRequest,
    sources: torch.Tensor,
    record: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    """Return the slots that stay in some layers, ascending: [num_layers, num_kv_heads, keep] int32."""
    scores = pool.scores[part]
    num_layers, num_blocks, num_kv_heads, block_size = scores.shape
    shape = (num_layers, num_kv_heads, request.num_slots)
    values = torch.empty(shape, dtype=torch.float64, device=scores.device)
    positions = torch.empty(shape, dtype=torch.int32, device=scores.device)
    kept = torch.empty(num_layers, num_kv_heads, request.keep, dtype=torch.int32, device=scores.device)
    slot_values_kernel[(triton.cdiv(request.num_slots, SLOT_TILE), num_kv_heads, num_layers)](
        scores,
        pool.positions[part],
        sources,
        record,
        numbers,
        values,
        positions,
        num_blocks,
        request.num_slots,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        BLOCK=SLOT_TILE,
        num_warps=4,
    )
    values = pool_values(values, positions, request.pool_width)
    select_kernel[(num_kv_heads, num_layers)](
        values.view(torch.int64),
        positions,
        pool.victims[part],
        record,
        kept,
        pool.victims.stride(0),
        request.num_slots,
        request.keep,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK=SLOT_TILE,
        num_warps=8,
    )
    return kept


def _compact(pool: TritonPool, part: slice, kept: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    num_layers, num_kv_heads, keep = kept.shape
    compact_kernel[(2, num_kv_heads, num_layers)](
        pool.kv[part],
        pool.scores[part],
        pool.positions[part],
        kept,
        sources,
        targets,
        pool.num_blocks,
        keep,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=pool.kv.shape[-1],
        BLOCK_SIZE=pool.block_size,
        BLOCK_D=triton.next_power_of_2(pool.kv.shape[-1]),
        BLOCK=MOVE_TILE,
        num_warps=4,
        num_stages=1,
    )
