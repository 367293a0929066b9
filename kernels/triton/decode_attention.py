"""Paged decode attention that keeps scores and finds victims in the same pass.

One query per sequence, the query heads of a KV head packed into one tile, the slots of long rows cut into pieces
(split-KV: Dao et al., "Flash-Decoding", 2023; online softmax: Milakov and Gimelshein 2018). For a slot s of KV head h:

    logit[g, s] = q[g] . k[s]        output[g] = sum_s p[g, s] v[s]        p[g, s] = exp(logit[g, s] - lse[g])
    score[s] = score[s] * decay + sum_g p[g, s]       if the query counts for the rule, else score[s] * decay

The log-sum-exp of a row is known only after its last slot, so a program leaves its logits (4 bytes for 4 * head_dim
bytes of K and V read, times the group) in the pool's `logits` and comes back for them. A sequence that is one item is
finished by its own program, victim included. Else `decode_finish_kernel` joins the items and adds the scores, and
`choose_victims_kernel` looks at all slots.

The grid is (capacity of the item list, num_kv_heads), and the list is read from memory: nothing that the host sees
depends on lengths, so a captured graph replays for every step of its batch size, and per-head slot counts would be
one more number in an item.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvorum.kernels.triton.pool import PoolLayer
from kvorum.kernels.triton.ranking import lower
from kvorum.kernels.triton.records import (
    CHOOSE,
    FIRST_ITEM,
    FIRST_TOKEN,
    HAS_RULE,
    ITEM_FIELDS,
    LAST_POSITION,
    LOG2E,
    NUM_FIELDS,
    NUM_ITEMS,
    NUM_NUMBERS,
    OBSERVE_FROM,
    ROW,
    START,
    STEP_DECAY,
    TABLE,
)
from kvorum.kernels.triton.step import TritonStep
from kvorum.kernels.triton.tiles import Tiles

FINISH_TILE = 256


@triton.jit
def add_scores(
    logits_ptr,
    scores_ptr,
    positions_ptr,
    record,
    numbers,
    table,
    head,
    lse,
    first_slot,
    end_slot,
    chooses,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add to the slots of a span what the step's query gave them; lse: [BLOCK_G], base 2.

    Returns the lowest slot of the span where `chooses`, else -1.
    """
    decay = tl.load(numbers + STEP_DECAY).to(tl.float32)
    counts = (tl.load(record + START) >= tl.load(record + OBSERVE_FROM)).to(tl.float32)
    members = tl.arange(0, BLOCK_G)
    value = tl.full([], float("inf"), tl.float64)
    position = tl.full([], LAST_POSITION, tl.int32)
    slot = tl.full([], -1, tl.int32)
    for first in range(first_slot, end_slot, BLOCK):
        slots = first + tl.arange(0, BLOCK)
        live = slots < end_slot
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        heads = blocks * NUM_KV_HEADS + head
        offsets = (heads * GROUP)[None, :] * BLOCK_SIZE + members[:, None] * BLOCK_SIZE + (slots % BLOCK_SIZE)[None, :]
        inside = (members < GROUP)[:, None] & live[None, :]
        logits = tl.load(logits_ptr + offsets, mask=inside, other=float("-inf"))  # [BLOCK_G, BLOCK]
        received = tl.sum(tl.exp2(logits - lse[:, None]), 0) * counts
        places = heads * BLOCK_SIZE + slots % BLOCK_SIZE
        scores = tl.load(scores_ptr + places, mask=live, other=0.0) * decay + received
        tl.store(scores_ptr + places, scores, mask=live)
        if chooses:
            positions = tl.load(positions_ptr + places, mask=live, other=0)
            value, position, slot = lower(value, position, slot, record, numbers, scores, positions, slots, live)
    return slot


@triton.jit
def decode_attention_kernel(
    q_ptr,
    kv_ptr,
    scores_ptr,
    positions_ptr,
    victims_ptr,
    logits_ptr,
    seqs_ptr,
    rules_ptr,
    tables_ptr,
    items_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FINISH_N: tl.constexpr,
):
    """Attend over one item's slots in one KV head. BLOCK_M >= BLOCK_G rows, since a matrix product wants 16."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(items_ptr + item * ITEM_FIELDS)
    if seq < 0:
        return
    first_slot = tl.load(items_ptr + item * ITEM_FIELDS + 1)
    end_slot = tl.load(items_ptr + item * ITEM_FIELDS + 2)
    record = seqs_ptr + seq * NUM_FIELDS
    table = tables_ptr + tl.load(record + TABLE)
    has_rule = tl.load(record + HAS_RULE) != 0
    query_position = tl.load(record + START)
    token = tl.load(record + FIRST_TOKEN).to(tl.int64)

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row_inside = members < GROUP
    row_offsets = ((token * NUM_KV_HEADS + head) * GROUP + members)[:, None] * HEAD_DIM + dims[None, :]
    rows_inside = row_inside[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(q_ptr + row_offsets, mask=rows_inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    dtype = query.dtype

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(first_slot, end_slot, BLOCK_N):
        slots = first + tl.arange(0, BLOCK_N)
        live = slots < end_slot
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        offsets = slots % BLOCK_SIZE
        seen = live
        if WINDOW > 0:
            positions = tl.load(
                positions_ptr + (blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + offsets, mask=live, other=0
            )
            seen = live & (positions > query_position - WINDOW)
        kv_offsets = ((2 * blocks * NUM_KV_HEADS + head) * BLOCK_SIZE + offsets)[:, None] * HEAD_DIM + dims[None, :]
        kv_inside = seen[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(kv_ptr + kv_offsets, mask=kv_inside, other=0.0).to(dtype)  # [BLOCK_N, BLOCK_D]
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * LOG2E  # [BLOCK_M, BLOCK_N]
        logits = tl.where(seen[None, :], logits, float("-inf"))
        logit_offsets = ((blocks * NUM_KV_HEADS + head) * GROUP)[None, :] + members[:, None]
        logit_offsets = logit_offsets * BLOCK_SIZE + offsets[None, :]
        tl.store(logits_ptr + logit_offsets, logits, mask=row_inside[:, None] & live[None, :] & has_rule)

        new_highest = tl.maximum(highest, tl.max(logits, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # no slot seen yet: all weights are 0
        weights = tl.exp2(logits - base[:, None])
        correction = tl.exp2(highest - base)
        total = total * correction + tl.sum(weights, 1)
        value = tl.load(kv_ptr + kv_offsets + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=kv_inside, other=0.0)
        acc = tl.dot(weights.to(dtype), value.to(dtype), acc * correction[:, None], input_precision="ieee")
        highest = new_highest

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    item_row = item.to(tl.int64) * NUM_KV_HEADS + head
    tl.store(lse_ptr + item_row * GROUP + members, highest + tl.log2(total), mask=row_inside)
    if tl.load(record + NUM_ITEMS) > 1:
        partial_offsets = (item_row * GROUP + members)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial_ptr + partial_offsets, acc, mask=rows_inside)
    else:
        tl.store(out_ptr + row_offsets, acc.to(dtype), mask=rows_inside)
        if has_rule:
            # Other threads of this program wrote the logits and the log-sum-exps that are read now.
            tl.debug_barrier()
            group = tl.arange(0, BLOCK_G)
            lse = tl.load(lse_ptr + item_row * GROUP + group, mask=group < GROUP, other=0.0)
            chooses = tl.load(record + CHOOSE) != 0
            victim = add_scores(
                logits_ptr,
                scores_ptr,
                positions_ptr,
                record,
                rules_ptr + seq * NUM_NUMBERS,
                table,
                head,
                lse,
                first_slot,
                end_slot,
                chooses,
                NUM_KV_HEADS,
                GROUP,
                BLOCK_SIZE,
                BLOCK_G,
                FINISH_N,
            )
            tl.store(victims_ptr + tl.load(record + ROW) * NUM_KV_HEADS + head, victim, mask=chooses)


@triton.jit
def decode_finish_kernel(
    scores_ptr,
    positions_ptr,
    logits_ptr,
    seqs_ptr,
    rules_ptr,
    tables_ptr,
    items_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAX_ITEMS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    FINISH_N: tl.constexpr,
):
    """Join the items of a row in one KV head: its programs share the query heads, and each adds its slots' scores."""
    item = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(items_ptr + item * ITEM_FIELDS)
    if seq < 0:
        return
    record = seqs_ptr + seq * NUM_FIELDS
    num_items = tl.load(record + NUM_ITEMS)
    if num_items == 1:
        return
    index = tl.load(items_ptr + item * ITEM_FIELDS + 3)
    first_row = tl.load(record + FIRST_ITEM).to(tl.int64) * NUM_KV_HEADS + head
    token = tl.load(record + FIRST_TOKEN).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    every = tl.arange(0, MAX_ITEMS)

    for member in range(index, GROUP, num_items):
        rows = (first_row + every * NUM_KV_HEADS) * GROUP + member
        lses = tl.load(lse_ptr + rows, mask=every < num_items, other=float("-inf"))  # [MAX_ITEMS]
        highest = tl.max(lses)
        row_lse = highest + tl.log2(tl.sum(tl.exp2(lses - highest)))
        acc = tl.zeros([BLOCK_D], tl.float32)
        for first in range(0, num_items, BLOCK_I):
            some = first + tl.arange(0, BLOCK_I)
            some_rows = (first_row + some * NUM_KV_HEADS) * GROUP + member
            weights = tl.exp2(tl.load(lse_ptr + some_rows, mask=some < num_items, other=float("-inf")) - row_lse)
            inside = (some < num_items)[:, None] & (dims < HEAD_DIM)[None, :]
            partial = tl.load(partial_ptr + some_rows[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
            acc += tl.sum(partial * weights[:, None], 0)
        out = out_ptr + ((token * NUM_KV_HEADS + head) * GROUP + member) * HEAD_DIM + dims
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)

    if tl.load(record + HAS_RULE) != 0:
        group = tl.arange(0, BLOCK_G)
        rows = (first_row + every * NUM_KV_HEADS)[:, None] * GROUP + group[None, :]
        inside = (every < num_items)[:, None] & (group < GROUP)[None, :]
        lses = tl.load(lse_ptr + rows, mask=inside, other=float("-inf"))  # [MAX_ITEMS, BLOCK_G]
        highest = tl.max(lses, 0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)  # rows that pad the group
        lse = highest + tl.log2(tl.sum(tl.exp2(lses - highest[None, :]), 0))
        lse = tl.where(group < GROUP, lse, 0.0)
        add_scores(
            logits_ptr,
            scores_ptr,
            positions_ptr,
            record,
            rules_ptr + seq * NUM_NUMBERS,
            tables_ptr + tl.load(record + TABLE),
            head,
            lse,
            tl.load(items_ptr + item * ITEM_FIELDS + 1),
            tl.load(items_ptr + item * ITEM_FIELDS + 2),
            False,
            NUM_KV_HEADS,
            GROUP,
            BLOCK_SIZE,
            BLOCK_G,
            FINISH_N,
        )


def decode_attention(
    queries: torch.Tensor,
    layer: PoolLayer,
    step: TritonStep,
    out: torch.Tensor,
    *,
    sliding_window: int | None,
    tiles: Tiles,
) -> None:
    """Attend for every sequence with one new token, whose K and V are in the pool already.

    Args:
        queries: [num_tokens, num_heads, head_dim], rotated and scaled.
        layer: keys and values that are read, scores and victims that are updated.
        step: `decode_items` and the sequences; victims of rows with several items are left to `choose_victims`.
        out: [num_tokens, num_heads, head_dim], written in the rows of these sequences.
        sliding_window: a query at p sees positions > p - sliding_window; None is no limit.
        tiles: the sizes that the step was cut by.
    """
    num_items = len(step.decode_items)
    if num_items == 0:
        return
    assert queries.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == queries.shape == (len(queries), layer.num_kv_heads * layer.group_size, layer.head_dim)
    head_dim, group = layer.head_dim, layer.group_size
    block_d = max(16, triton.next_power_of_2(head_dim))
    lse = torch.empty(num_items, layer.num_kv_heads, group, dtype=torch.float32, device=queries.device)
    partial = torch.empty((*lse.shape, head_dim) if step.splits else 0, dtype=torch.float32, device=queries.device)
    decode_attention_kernel[(num_items, layer.num_kv_heads)](
        queries,
        layer.kv,
        layer.scores,
        layer.positions,
        layer.victims,
        layer.logits,
        step.seqs,
        step.rules,
        step.tables,
        step.decode_items,
        partial,
        lse,
        out,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=layer.block_size,
        WINDOW=sliding_window or 0,
        BLOCK_M=tiles.decode.rows,
        BLOCK_G=tiles.group,
        BLOCK_D=block_d,
        BLOCK_N=tiles.decode.slots,
        FINISH_N=FINISH_TILE,
        num_warps=tiles.decode.num_warps,
        num_stages=tiles.decode.num_stages,
    )
    if not step.splits:
        return
    decode_finish_kernel[(num_items, layer.num_kv_heads)](
        layer.scores,
        layer.positions,
        layer.logits,
        step.seqs,
        step.rules,
        step.tables,
        step.decode_items,
        partial,
        lse,
        out,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=layer.block_size,
        MAX_ITEMS=triton.next_power_of_2(tiles.extra_items + 1),
        BLOCK_G=tiles.group,
        BLOCK_D=block_d,
        BLOCK_I=16,
        FINISH_N=FINISH_TILE,
        num_warps=4,
    )
