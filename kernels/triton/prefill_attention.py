"""Attention of chunks of new tokens over paged slots, and the column sums that are their scores.

First pass (FlashAttention-2: Dao 2023; a tile holds the query heads of a KV head side by side):

    output[t, g] = sum_s p[t, g, s] v[s]      p[t, g, s] = exp(q[t, g] . k[s] - lse[t, g])

Slots before the chunk are seen by every query, whatever tokens live there (an evicted sequence has none newer than its
chunk); new token j, in slot first_slot + j, by the queries t >= j. Second pass, with the log-sum-exp of the first, one
program for a tile of slots, so that nothing is added atomically and sums do not depend on timing:

    score[s] = score[s] * decay ** num_tokens + sum_t weight[t] * sum_g p[t, g, s]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvorum.kernels.triton.pool import PoolLayer
from kvorum.kernels.triton.records import (
    FIRST_SLOT,
    FIRST_TOKEN,
    LOG2E,
    NUM_FIELDS,
    NUM_NUMBERS,
    NUM_SLOTS,
    NUM_TOKENS,
    OBSERVE_FROM,
    START,
    STEP_DECAY,
    TABLE,
)
from kvorum.kernels.triton.step import TritonStep
from kvorum.kernels.triton.tiles import Tiles


@triton.jit
def attend_tile(
    query,
    highest,
    total,
    acc,
    kv_ptr,
    positions_ptr,
    table,
    head,
    first,
    end,
    last_slots,
    query_positions,
    CUT: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Take one tile of slots into the online softmax; CUT: some rows may not see some of its slots."""
    slots = first + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    dtype = query.dtype
    if CUT:
        live = slots < end
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    else:
        live = slots >= 0
        blocks = tl.load(table + slots // BLOCK_SIZE).to(tl.int64)
    offsets = slots % BLOCK_SIZE
    kv_offsets = ((2 * blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + offsets)[:, None] * HEAD_DIM + dims[None, :]
    if CUT or HEAD_DIM != BLOCK_D:
        kv_inside = live[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(kv_ptr + kv_offsets, mask=kv_inside, other=0.0)  # [BLOCK_N, BLOCK_D]
        value = tl.load(kv_ptr + kv_offsets + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=kv_inside, other=0.0)
    else:
        key = tl.load(kv_ptr + kv_offsets)
        value = tl.load(kv_ptr + kv_offsets + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM)
    logits = tl.dot(query, tl.trans(key.to(dtype)), input_precision="ieee") * LOG2E  # [BLOCK_M, BLOCK_N]
    if CUT:
        logits = tl.where(live[None, :] & (slots[None, :] <= last_slots[:, None]), logits, float("-inf"))
    if WINDOW > 0:
        places = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + offsets
        positions = tl.load(positions_ptr + places, mask=live, other=0)
        logits = tl.where(positions[None, :] > query_positions[:, None] - WINDOW, logits, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(logits, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # no slot seen yet: all weights are 0
    weights = tl.exp2(logits - base[:, None])
    correction = tl.exp2(highest - base)
    total = total * correction + tl.sum(weights, 1)
    acc = tl.dot(weights.to(dtype), value.to(dtype), acc * correction[:, None], input_precision="ieee")
    return new_highest, total, acc


@triton.jit
def prefill_attention_kernel(
    q_ptr,
    kv_ptr,
    positions_ptr,
    seqs_ptr,
    tables_ptr,
    tiles_ptr,
    out_ptr,
    lse_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend for BLOCK_M / BLOCK_G new tokens of one sequence in one KV head.

    Row m is token m // BLOCK_G with query head m % BLOCK_G of the group.
    """
    head = tl.program_id(0)
    seq = tl.load(tiles_ptr + 2 * tl.program_id(1))
    first_query = tl.load(tiles_ptr + 2 * tl.program_id(1) + 1)
    record = seqs_ptr + seq * NUM_FIELDS
    table = tables_ptr + tl.load(record + TABLE)
    first_slot = tl.load(record + FIRST_SLOT)
    num_slots = tl.load(record + NUM_SLOTS)

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = first_query + rows // BLOCK_G
    members = rows % BLOCK_G
    row_inside = (queries < tl.load(record + NUM_TOKENS)) & (members < GROUP)
    row_ids = ((tl.load(record + FIRST_TOKEN) + queries).to(tl.int64) * NUM_KV_HEADS + head) * GROUP + members
    inside = row_inside[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q_ptr + row_ids[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    last_slots = first_slot + queries
    query_positions = tl.load(record + START) + queries

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full_end = (first_slot + first_query + 1) // BLOCK_N * BLOCK_N  # every row sees the slots before
    end = tl.minimum(first_slot + first_query + BLOCK_M // BLOCK_G, num_slots)
    if WINDOW > 0:
        lowest_position = tl.load(record + START) + first_query - WINDOW
        for first in range(0, end, BLOCK_N):
            slots = first + tl.arange(0, BLOCK_N)
            live = slots < end
            blocks = tl.load(table + slots // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            places = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + slots % BLOCK_SIZE
            newest = tl.max(tl.load(positions_ptr + places, mask=live, other=-1))
            if newest > lowest_position:
                highest, total, acc = attend_tile(
                    query, highest, total, acc, kv_ptr, positions_ptr, table, head, first, end, last_slots,
                    query_positions, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, BLOCK_N, BLOCK_D,
                )  # fmt: skip
    else:
        for first in range(0, full_end, BLOCK_N):
            highest, total, acc = attend_tile(
                query, highest, total, acc, kv_ptr, positions_ptr, table, head, first, end, last_slots,
                query_positions, False, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, 0, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        for first in range(full_end, end, BLOCK_N):
            highest, total, acc = attend_tile(
                query, highest, total, acc, kv_ptr, positions_ptr, table, head, first, end, last_slots,
                query_positions, True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, 0, BLOCK_N, BLOCK_D,
            )  # fmt: skip

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows that pad the tile may see nothing
    tl.store(out_ptr + row_ids[:, None] * HEAD_DIM + dims[None, :], acc.to(query.dtype), mask=inside)
    tl.store(lse_ptr + row_ids, highest + tl.log2(total), mask=row_inside)


@triton.jit
def column_sums_kernel(
    q_ptr,
    kv_ptr,
    scores_ptr,
    positions_ptr,
    lse_ptr,
    weights_ptr,
    seqs_ptr,
    rules_ptr,
    tables_ptr,
    tiles_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sum what BLOCK_N slots of one sequence receive in one KV head. Keys stay, queries pass by."""
    head = tl.program_id(0)
    seq = tl.load(tiles_ptr + 2 * tl.program_id(1))
    slots = tl.load(tiles_ptr + 2 * tl.program_id(1) + 1) + tl.arange(0, BLOCK_N)
    record = seqs_ptr + seq * NUM_FIELDS
    table = tables_ptr + tl.load(record + TABLE)
    first_slot = tl.load(record + FIRST_SLOT)
    num_tokens = tl.load(record + NUM_TOKENS)
    first_token = tl.load(record + FIRST_TOKEN)
    start = tl.load(record + START)

    dims = tl.arange(0, BLOCK_D)
    live = slots < tl.load(record + NUM_SLOTS)
    blocks = tl.load(table + slots // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    offsets = slots % BLOCK_SIZE
    kv_offsets = ((2 * blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + offsets)[:, None] * HEAD_DIM + dims[None, :]
    kv_inside = live[:, None] & (dims < HEAD_DIM)[None, :]
    key = tl.load(kv_ptr + kv_offsets, mask=kv_inside, other=0.0).to(q_ptr.dtype.element_ty)  # [BLOCK_N, BLOCK_D]
    places = (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + offsets
    positions = tl.load(positions_ptr + places, mask=live, other=0)

    rows = tl.arange(0, BLOCK_M)
    members = rows % BLOCK_G
    received = tl.zeros([BLOCK_N], tl.float32)
    # Queries before the first that sees a slot of the tile, or that counts, add nothing.
    first_query = tl.maximum(tl.min(slots) - first_slot, tl.load(record + OBSERVE_FROM) - start)
    for query in range(tl.maximum(first_query, 0), num_tokens, BLOCK_M // BLOCK_G):
        queries = query + rows // BLOCK_G
        row_inside = (queries < num_tokens) & (members < GROUP)
        tokens = (first_token + queries).to(tl.int64)
        row_ids = (tokens * NUM_KV_HEADS + head) * GROUP + members
        inside = row_inside[:, None] & (dims < HEAD_DIM)[None, :]
        tile = tl.load(q_ptr + row_ids[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        lse = tl.load(lse_ptr + row_ids, mask=row_inside, other=0.0)
        weight = tl.load(weights_ptr + tokens, mask=row_inside, other=0.0)
        logits = tl.dot(key, tl.trans(tile), input_precision="ieee") * LOG2E  # [BLOCK_N, BLOCK_M]
        seen = row_inside[None, :] & (slots[:, None] <= (first_slot + queries)[None, :])
        if WINDOW > 0:
            seen = seen & (positions[:, None] > (start + queries - WINDOW)[None, :])
        received += tl.sum(tl.where(seen, tl.exp2(logits - lse[None, :]), 0.0) * weight[None, :], 1)

    decay = tl.load(rules_ptr + seq * NUM_NUMBERS + STEP_DECAY).to(tl.float32)
    scores = tl.load(scores_ptr + places, mask=live, other=0.0)
    tl.store(scores_ptr + places, scores * decay + received, mask=live)


def prefill_attention(
    queries: torch.Tensor,
    layer: PoolLayer,
    step: TritonStep,
    out: torch.Tensor,
    *,
    sliding_window: int | None,
    tiles: Tiles,
) -> None:
    """Attend for every sequence with several new tokens, whose K and V are in the pool already, and add the scores.

    Args:
        queries: [num_tokens, num_heads, head_dim], rotated and scaled.
        layer: keys and values that are read, scores that are updated.
        step: `query_tiles`, `key_tiles` and the sequences.
        out: [num_tokens, num_heads, head_dim], written in the rows of these sequences.
        sliding_window: a query at p sees positions > p - sliding_window; None is no limit.
        tiles: the sizes that the step was cut by.
    """
    if len(step.query_tiles) == 0:
        return
    assert queries.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == queries.shape == (len(queries), layer.num_kv_heads * layer.group_size, layer.head_dim)
    lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
    shape = {
        "NUM_KV_HEADS": layer.num_kv_heads,
        "GROUP": layer.group_size,
        "HEAD_DIM": layer.head_dim,
        "BLOCK_SIZE": layer.block_size,
        "WINDOW": sliding_window or 0,
        "BLOCK_G": tiles.group,
        "BLOCK_D": max(16, triton.next_power_of_2(layer.head_dim)),
    }
    prefill_attention_kernel[(layer.num_kv_heads, len(step.query_tiles))](
        queries,
        layer.kv,
        layer.positions,
        step.seqs,
        step.tables,
        step.query_tiles,
        out,
        lse,
        **shape,
        BLOCK_M=tiles.prefill.rows,
        BLOCK_N=tiles.prefill.slots,
        num_warps=tiles.prefill.num_warps,
        num_stages=tiles.prefill.num_stages,
    )
    if len(step.key_tiles) == 0:
        return
    column_sums_kernel[(layer.num_kv_heads, len(step.key_tiles))](
        queries,
        layer.kv,
        layer.scores,
        layer.positions,
        lse,
        step.query_weights,
        step.seqs,
        step.rules,
        step.tables,
        step.key_tiles,
        **shape,
        BLOCK_M=tiles.column_sums.rows,
        BLOCK_N=tiles.column_sums.slots,
        num_warps=tiles.column_sums.num_warps,
        num_stages=tiles.column_sums.num_stages,
    )
