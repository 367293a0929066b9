"""Linear, norm, rotary and activation of the reference back end."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from kvorum.kernels.spec import Activation, RopeSpec

# A row of a matrix product must not depend on how many rows stand beside it, or a request's tokens would depend on
# its neighbours. BLAS libraries choose another order of summation for a few small row counts; multiples of 8 agree.
ROW_TILE = 8


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return inputs @ weight.T + bias, each row independent of the others bit for bit.

    Args:
        inputs: [num_rows, in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    num_rows = inputs.shape[0]
    padding = -num_rows % ROW_TILE
    if padding:
        inputs = functional.pad(inputs, (0, 0, 0, padding))
    return functional.linear(inputs, weight, bias)[:num_rows]


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float) -> torch.Tensor:
    """Return inputs / rms(inputs) * (offset + weight) over the last dimension, computed in float32 or wider."""
    wide = inputs.to(wide_dtype(inputs.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (offset + weight.to(wide.dtype))).to(inputs.dtype)
    return weight * normed.to(inputs.dtype)


def rotary_table(rope: RopeSpec, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [num_tokens, head_dim] at the given positions [num_tokens]."""
    wide = wide_dtype(dtype)
    inv_freq = torch.tensor(rope.inv_freq, dtype=wide, device=positions.device)
    angles = positions.to(wide)[:, None] * inv_freq[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * rope.attention_factor).to(dtype), (angles.sin() * rope.attention_factor).to(dtype)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [num_tokens, num_heads, head_dim] by cos and sin [num_tokens, head_dim], rotate-half layout."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def activate(inputs: torch.Tensor, kind: Activation) -> torch.Tensor:
    """Apply the gate's activation."""
    # Written out: torch's fused kernels compute the elements left over by their vectors, and by the threads' shares,
    # with another exp and tanh, so that a row would depend on how many stand beside it.
    wide = inputs.to(wide_dtype(inputs.dtype))
    if kind == "silu":
        activated = wide / (1.0 + torch.exp(-wide))
    else:
        activated = 0.5 * wide * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)))
    return activated.to(inputs.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 when the model itself is float64."""
    return torch.promote_types(dtype, torch.float32)
