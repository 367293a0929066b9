"""Write new tokens into the pool: query and key norms, RoPE, and the choice of the slot, in one pass.

    q' = rotate(norm(q)) * attention_scale      k' = rotate(norm(k))      rotate-half layout (Su et al. 2021)
    slot = the victim's where the sequence replaces, else the next one

A token's new slot gets its position and the score 0. float8 pools hold K and V as they are (scale 1), cut off at the
largest number of the format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvorum.kernels.triton.fused import rms_scaled
from kvorum.kernels.triton.pool import PoolLayer
from kvorum.kernels.triton.records import (
    FIRST_SLOT,
    FIRST_TOKEN,
    NO_VICTIM,
    NUM_FIELDS,
    NUM_TOKENS,
    REPLACE,
    ROW,
    START,
    TABLE,
)
from kvorum.kernels.triton.step import TritonStep

FLOAT8_MAX = tl.constexpr(448.0)


@triton.jit
def as_stored(values, dtype: tl.constexpr):
    """Round to the pool's dtype."""
    if dtype == tl.float8e4nv:
        values = tl.minimum(tl.maximum(values, -FLOAT8_MAX), FLOAT8_MAX)
    return values.to(dtype)


@triton.jit
def append_kernel(
    qkv_ptr,
    rotary_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_out_ptr,
    kv_ptr,
    scores_ptr,
    positions_ptr,
    victims_ptr,
    seqs_ptr,
    token_seqs_ptr,
    tables_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    QK_NORM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Work on one token's K, V and queries of one KV head."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.load(token_seqs_ptr + token)
    record = seqs_ptr + seq * NUM_FIELDS
    if tl.load(record + NUM_TOKENS) == 0:  # a row that only fills a graph's batch
        return
    index = token - tl.load(record + FIRST_TOKEN)
    position = tl.load(record + START) + index

    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_H)
    inside = dims < HALF
    cos = tl.load(rotary_ptr + position.to(tl.int64) * HEAD_DIM + dims, mask=inside, other=0.0)  # [BLOCK_H]
    sin = tl.load(rotary_ptr + position.to(tl.int64) * HEAD_DIM + HALF + dims, mask=inside, other=0.0)
    dtype = qkv_ptr.dtype.element_ty
    qkv_row = qkv_ptr + token.to(tl.int64) * ((GROUP + 2) * NUM_KV_HEADS * HEAD_DIM)

    members = tl.arange(0, BLOCK_G)
    q_inside = (members < GROUP)[:, None] & inside[None, :]
    q_offsets = (head * GROUP + members)[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(qkv_row + q_offsets, mask=q_inside, other=0.0).to(tl.float32)  # [BLOCK_G, BLOCK_H]
    second = tl.load(qkv_row + q_offsets + HALF, mask=q_inside, other=0.0).to(tl.float32)
    if QK_NORM:
        weight = tl.load(q_norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        weight2 = tl.load(q_norm_ptr + HALF + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        inverse_rms = tl.rsqrt(squares / HEAD_DIM + EPS)[:, None]
        first = rms_scaled(first, inverse_rms, weight, OFFSET, dtype)
        second = rms_scaled(second, inverse_rms, weight2, OFFSET, dtype)
    q_row = q_out_ptr + token.to(tl.int64) * (GROUP * NUM_KV_HEADS * HEAD_DIM)
    rotated = (first * cos[None, :] - second * sin[None, :]) * SCALE
    rotated2 = (second * cos[None, :] + first * sin[None, :]) * SCALE
    tl.store(q_row + q_offsets, rotated.to(dtype), mask=q_inside)
    tl.store(q_row + q_offsets + HALF, rotated2.to(dtype), mask=q_inside)

    k_row = qkv_row + (GROUP * NUM_KV_HEADS + head) * HEAD_DIM
    key = tl.load(k_row + dims, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_H]
    key2 = tl.load(k_row + HALF + dims, mask=inside, other=0.0).to(tl.float32)
    if QK_NORM:
        weight = tl.load(k_norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)
        weight2 = tl.load(k_norm_ptr + HALF + dims, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt((tl.sum(key * key) + tl.sum(key2 * key2)) / HEAD_DIM + EPS)
        key = rms_scaled(key, inverse_rms, weight, OFFSET, dtype)
        key2 = rms_scaled(key2, inverse_rms, weight2, OFFSET, dtype)
    v_row = k_row + NUM_KV_HEADS * HEAD_DIM
    value = tl.load(v_row + dims, mask=inside, other=0.0).to(tl.float32)
    value2 = tl.load(v_row + HALF + dims, mask=inside, other=0.0).to(tl.float32)

    replaces = tl.load(record + REPLACE) != 0
    victim_ptr = victims_ptr + tl.load(record + ROW) * NUM_KV_HEADS + head
    victim = tl.load(victim_ptr, mask=replaces, other=0)
    tl.debug_barrier()  # every thread has read it before one of them forgets it
    tl.store(victim_ptr, NO_VICTIM, mask=replaces)
    slot = tl.where(replaces, victim, tl.load(record + FIRST_SLOT) + index)
    block = tl.load(tables_ptr + tl.load(record + TABLE) + slot // BLOCK_SIZE).to(tl.int64)
    place = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    tl.store(positions_ptr + place, position)
    tl.store(scores_ptr + place, 0.0)
    kv_dtype: tl.constexpr = kv_ptr.dtype.element_ty
    k_out = kv_ptr + ((2 * block * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    v_out = k_out + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tl.store(k_out + dims, as_stored(key * cos - key2 * sin, kv_dtype), mask=inside)
    tl.store(k_out + HALF + dims, as_stored(key2 * cos + key * sin, kv_dtype), mask=inside)
    tl.store(v_out + dims, as_stored(value, kv_dtype), mask=inside)
    tl.store(v_out + HALF + dims, as_stored(value2, kv_dtype), mask=inside)


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a layer does to queries and keys before attention.

    rotary: [max_position, 2, head_dim / 2] float32, cos then sin of each position.
    q_norm, k_norm: [head_dim] weights of the norms before the rotation, both or none; eps, offset: theirs.
    scale: what queries are multiplied by after it.
    """

    rotary: torch.Tensor
    scale: float
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    offset: float


def append(qkv: torch.Tensor, rotation: Rotation, layer: PoolLayer, step: TritonStep) -> torch.Tensor:
    """Write a step's keys and values into the pool.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: queries, keys, values.
        rotation: how queries and keys are turned.
        layer: where keys and values go; victims that are replaced are forgotten.
        step: the tokens' sequences.

    Returns:
        queries [num_tokens, num_heads, head_dim], normed, rotated and scaled.
    """
    num_tokens = len(qkv)
    num_heads = layer.num_kv_heads * layer.group_size
    head_dim = layer.head_dim
    assert qkv.is_contiguous()
    assert qkv.shape == (num_tokens, (num_heads + 2 * layer.num_kv_heads) * head_dim)
    queries = qkv.new_empty(num_tokens, num_heads, head_dim)
    append_kernel[(num_tokens, layer.num_kv_heads)](
        qkv,
        rotation.rotary,
        qkv if rotation.q_norm is None else rotation.q_norm,
        qkv if rotation.k_norm is None else rotation.k_norm,
        queries,
        layer.kv,
        layer.scores,
        layer.positions,
        layer.victims,
        step.seqs,
        step.token_seqs,
        step.tables,
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=layer.group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=layer.block_size,
        SCALE=rotation.scale,
        QK_NORM=rotation.q_norm is not None,
        EPS=rotation.eps,
        OFFSET=rotation.offset,
        BLOCK_G=triton.next_power_of_2(layer.group_size),
        BLOCK_H=triton.next_power_of_2(head_dim // 2),
        num_warps=1 if layer.group_size <= 4 else 2,
    )
    return queries
