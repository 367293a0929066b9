"""Residual add + RMSNorm, and activation x gate: one read and one write of what they touch.

    hidden' = hidden + post(partial)          post: RMSNorm where the model norms after the half-layer, else identity
    normed  = hidden' / rms(hidden') * (norm_offset + weight)

RMSNorm: Zhang and Sennrich 2019. Numbers are rounded to the model's dtype exactly where the reference rounds them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvorum.kernels.spec import Activation


@triton.jit
def rms_scaled(values, inverse_rms, weight, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Return values * inverse_rms * (OFFSET + weight) in float32, rounded as the reference rounds it."""
    normed = values * inverse_rms
    if OFFSET == 0.0:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * (OFFSET + weight)).to(dtype).to(tl.float32)


@triton.jit
def residual_norm_kernel(
    hidden_ptr,
    partial_ptr,
    post_weight_ptr,
    weight_ptr,
    hidden_out_ptr,
    normed_ptr,
    HIDDEN_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
    HAS_POST: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Work on one token's row."""
    row = tl.program_id(0).to(tl.int64) * HIDDEN_SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN_SIZE
    dtype = hidden_ptr.dtype.element_ty
    hidden = tl.load(hidden_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_PARTIAL:
        partial = tl.load(partial_ptr + row + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_POST:
            post_weight = tl.load(post_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            inverse_rms = tl.rsqrt(tl.sum(partial * partial) / HIDDEN_SIZE + EPS)
            partial = rms_scaled(partial, inverse_rms, post_weight, OFFSET, dtype)
        hidden = (hidden + partial).to(dtype).to(tl.float32)
        tl.store(hidden_out_ptr + row + columns, hidden.to(dtype), mask=inside)
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(hidden * hidden) / HIDDEN_SIZE + EPS)
        normed = rms_scaled(hidden, inverse_rms, weight, OFFSET, dtype)
        tl.store(normed_ptr + row + columns, normed.to(dtype), mask=inside)


def residual_norm(
    hidden: torch.Tensor,
    partial: torch.Tensor | None,
    weight: torch.Tensor | None,
    *,
    post_weight: torch.Tensor | None = None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a half-layer's result to the residual stream and norm the sum.

    Args:
        hidden, partial: [num_tokens, hidden_size]; partial None adds nothing.
        weight: [hidden_size] of the norm that follows; None norms nothing.
        post_weight: [hidden_size] of the norm that partial goes through first, if any.
        eps, offset: RMSNorm's.

    Returns:
        the new hidden and its norm, [num_tokens, hidden_size] each; the very `hidden` where nothing was to do.
    """
    num_tokens, hidden_size = hidden.shape
    assert hidden.is_contiguous()
    assert partial is None or (partial.is_contiguous() and partial.shape == hidden.shape)
    summed = hidden if partial is None else torch.empty_like(hidden)
    normed = hidden if weight is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(hidden_size)
    residual_norm_kernel[(num_tokens,)](
        hidden,
        hidden if partial is None else partial,
        hidden if post_weight is None else post_weight,
        hidden if weight is None else weight,
        summed,
        normed,
        HIDDEN_SIZE=hidden_size,
        EPS=eps,
        OFFSET=offset,
        HAS_PARTIAL=partial is not None,
        HAS_POST=post_weight is not None,
        HAS_NORM=weight is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return summed, normed


GATE_BLOCK = 1024


@triton.jit
def gated_activation_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, GELU_TANH: tl.constexpr, BLOCK: tl.constexpr):
    """Work on BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + 2 * token * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (2 * token + 1) * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if GELU_TANH:
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate / (1.0 + tl.exp(-inner))
    else:
        activated = gate / (1.0 + tl.exp(-gate))
    product = activated.to(dtype).to(tl.float32) * up
    tl.store(out_ptr + token * WIDTH + columns, product.to(dtype), mask=inside)


def gated_activation(gate_up: torch.Tensor, kind: Activation) -> torch.Tensor:
    """Return activation(gate) * up of [num_tokens, gate columns then up columns]: [num_tokens, half of the columns]."""
    num_tokens, columns = gate_up.shape
    assert gate_up.is_contiguous()
    width = columns // 2
    out = gate_up.new_empty(num_tokens, width)
    grid = (num_tokens, triton.cdiv(width, GATE_BLOCK))
    gated_activation_kernel[grid](
        gate_up, out, WIDTH=width, GELU_TANH=kind == "gelu_tanh", BLOCK=GATE_BLOCK, num_warps=4
    )
    return out
