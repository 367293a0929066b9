"""Which slot goes first: a rule's values on the device, and the lowest of a sequence's slots.

The order is (protected, value, position), lowest first, as `plan.EvictionRule` says. Values are float64, so that
dividing by the lifetime makes no two different scores equal; positions decide between equals, never slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvorum.kernels.triton.pool import PoolLayer
from kvorum.kernels.triton.records import (
    BY_AGE,
    DECAY_LOSS,
    LAST_POSITION,
    LOG_DECAY,
    NUM_FIELDS,
    NUM_NUMBERS,
    NUM_SLOTS,
    NUM_TOKENS,
    OBSERVE_FROM,
    PER_LIFETIME,
    RECENT,
    ROW,
    SINKS,
    START,
    TABLE,
)
from kvorum.kernels.triton.step import TritonStep


@triton.jit
def is_protected(record, positions):
    """Say which positions the rule of a sequence's record spares."""
    newest = tl.load(record + START) + tl.load(record + NUM_TOKENS) - 1
    return (positions < tl.load(record + SINKS)) | (positions > newest - tl.load(record + RECENT))


@triton.jit
def slot_values(record, numbers, scores, positions):
    """Return what slots are worth, protection aside, in float64; scores float32 and positions of the same shape."""
    values = scores.to(tl.float64)
    if tl.load(record + BY_AGE) != 0:
        values = tl.zeros_like(values)
    elif tl.load(record + PER_LIFETIME) != 0:
        newest = tl.load(record + START) + tl.load(record + NUM_TOKENS) - 1
        counted = newest + 1 - tl.maximum(positions, tl.load(record + OBSERVE_FROM))
        lifetime = tl.maximum(counted, 1).to(tl.float64)
        log_decay = tl.load(numbers + LOG_DECAY)
        if log_decay != 0.0:
            lifetime = (1.0 - tl.exp(lifetime * log_decay)) / tl.load(numbers + DECAY_LOSS)
        values = values / lifetime
    return values


@triton.jit
def lower(value, position, slot, record, numbers, scores, positions, slots, live):
    """Return (value, position, slot) of the lowest among one candidate and a tile of slots.

    Start with (inf, LAST_POSITION, NO_VICTIM). Where all slots are protected, the oldest is the lowest.
    """
    infinity = float("inf")
    spared = is_protected(record, positions) | (live == 0)
    values = tl.where(spared, infinity, slot_values(record, numbers, scores, positions))
    lowest = tl.min(values)
    places = tl.where(live & (values == lowest), positions, LAST_POSITION)
    oldest = tl.min(places)
    found = tl.min(tl.where(places == oldest, slots, LAST_POSITION))
    better = (lowest < value) | ((lowest == value) & (oldest < position))
    return tl.where(better, lowest, value), tl.where(better, oldest, position), tl.where(better, found, slot)


@triton.jit
def choose_victims_kernel(
    choosers_ptr,
    seqs_ptr,
    rules_ptr,
    tables_ptr,
    scores_ptr,
    positions_ptr,
    victims_ptr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the victim of one sequence in one KV head among all its slots."""
    seq = tl.load(choosers_ptr + tl.program_id(0))
    head = tl.program_id(1)
    if seq < 0:
        return
    record = seqs_ptr + seq * NUM_FIELDS
    numbers = rules_ptr + seq * NUM_NUMBERS
    table = tables_ptr + tl.load(record + TABLE)
    num_slots = tl.load(record + NUM_SLOTS)
    value = tl.full([], float("inf"), tl.float64)
    position = tl.full([], LAST_POSITION, tl.int32)
    slot = tl.full([], -1, tl.int32)
    for first in range(0, num_slots, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        live = slots < num_slots
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        places = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE
        scores = tl.load(scores_ptr + places, mask=live, other=0.0)
        positions = tl.load(positions_ptr + places, mask=live, other=0)
        value, position, slot = lower(value, position, slot, record, numbers, scores, positions, slots, live)
    tl.store(victims_ptr + tl.load(record + ROW) * NUM_KV_HEADS + head, slot)


def choose_victims(layer: PoolLayer, step: TritonStep) -> None:
    """Choose the victims of the sequences in `step.choosers` by the scores that the layer holds."""
    if len(step.choosers) == 0:
        return
    choose_victims_kernel[(len(step.choosers), layer.num_kv_heads)](
        step.choosers,
        step.seqs,
        step.rules,
        step.tables,
        layer.scores,
        layer.positions,
        layer.victims,
        NUM_KV_HEADS=layer.num_kv_heads,
        BLOCK_SIZE=layer.block_size,
        BLOCK=1024,
        num_warps=4,
    )
