"""Copies of whole blocks, all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvorum.kernels.triton.pool import TritonPool

COPY_BLOCK = 1024


@triton.jit
def copy_blocks_kernel(
    kv_ptr,
    scores_ptr,
    positions_ptr,
    pairs_ptr,
    num_blocks,
    KV_WORDS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy BLOCK words of one pair's K and V in one layer; the first program of a block its slots as well."""
    layer = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1)
    source = layer * num_blocks + tl.load(pairs_ptr + 2 * pair)
    target = layer * num_blocks + tl.load(pairs_ptr + 2 * pair + 1)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = words < KV_WORDS
    tl.store(kv_ptr + target * KV_WORDS + words, tl.load(kv_ptr + source * KV_WORDS + words, mask=inside), mask=inside)
    if tl.program_id(2) == 0:
        for first in range(0, NUM_SLOTS, BLOCK):
            slots = first + tl.arange(0, BLOCK)
            inside = slots < NUM_SLOTS
            score = tl.load(scores_ptr + source * NUM_SLOTS + slots, mask=inside)
            tl.store(scores_ptr + target * NUM_SLOTS + slots, score, mask=inside)
            position = tl.load(positions_ptr + source * NUM_SLOTS + slots, mask=inside)
            tl.store(positions_ptr + target * NUM_SLOTS + slots, position, mask=inside)


def copy_blocks(pool: TritonPool, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy blocks with scores and positions; sources and targets are disjoint and of one length."""
    assert not set(sources) & set(targets), "sources and targets overlap"
    if not sources:
        return
    num_layers, num_blocks, num_kv_heads, block_size = pool.scores.shape
    flat = [block for pair in zip(sources, targets, strict=True) for block in pair]
    pairs = torch.tensor(flat, dtype=torch.int32, device=pool.kv.device)
    # Bits are copied, whatever the dtype.
    words = pool.kv.view(num_layers, num_blocks, -1).view(torch.int32)
    kv_words = words.shape[-1]
    grid = (num_layers, len(sources), triton.cdiv(kv_words, COPY_BLOCK))
    copy_blocks_kernel[grid](
        words,
        pool.scores,
        pool.positions,
        pairs,
        num_blocks,
        KV_WORDS=kv_words,
        NUM_SLOTS=num_kv_heads * block_size,
        BLOCK=COPY_BLOCK,
        num_warps=4,
    )
