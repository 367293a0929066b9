"""Rotary frequencies, worked out as transformers does: in float32, rounded after each operation.

The rounding is followed because an inverse frequency that is off by one part in 10^7 turns a key at position 100,000
by a hundredth of a radian.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvorum.kernels.spec import RopeSpec
from kvorum.workers.checkpoint.fields import Fields

Float32 = NDArray[np.float32]


def rope_from_parameters(parameters: Fields, *, head_dim: int, max_position: int) -> RopeSpec:
    """Return the table that `rope_parameters` (or the older `rope_scaling` with its `rope_theta`) describes.

    Args:
        parameters: holds rope_theta, and for scaled kinds rope_type (or its old name, type) with its parameters.
        head_dim: all of a head is rotated.
        max_position: what original_max_position_embeddings is when not given.
    """
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if parameters.number("partial_rotary_factor", 1.0) != 1.0:
        raise parameters.error("partial_rotary_factor", "is not supported: all of a head must be rotated")
    build = _KINDS.get(kind)
    if build is None:
        name = "rope_type" if parameters.has("rope_type") else "type"
        raise parameters.error(name, f"is not supported; supported are {', '.join(_KINDS)}")
    return build(parameters, head_dim, max_position)


def base_inv_freq(theta: float, head_dim: int) -> Float32:
    """Return the unscaled inverse frequencies, theta ** (-2i / head_dim)."""
    return np.float32(1.0) / _base_freq(theta, head_dim)


def rope_spec(inv_freq: Float32, attention_factor: float = 1.0) -> RopeSpec:
    """Return inverse frequencies as plain data."""
    return RopeSpec(inv_freq=tuple(inv_freq.tolist()), attention_factor=attention_factor)


def _base_freq(theta: float, head_dim: int) -> Float32:
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # A power in float64, rounded, is what a good float32 power gives; NumPy's own is less exact on some machines.
    return np.power(np.float64(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)


def _default(parameters: Fields, head_dim: int, max_position: int) -> RopeSpec:
    return rope_spec(base_inv_freq(parameters.number("rope_theta"), head_dim))


def _linear(parameters: Fields, head_dim: int, max_position: int) -> RopeSpec:
    inv_freq = base_inv_freq(parameters.number("rope_theta"), head_dim)
    return rope_spec(inv_freq / np.float32(parameters.number("factor")))


def _llama3(parameters: Fields, head_dim: int, max_position: int) -> RopeSpec:
    """Scale as Llama 3.1 does: long wavelengths by factor, short ones not at all, those between gradually."""
    inv_freq = base_inv_freq(parameters.number("rope_theta"), head_dim)
    factor = np.float32(parameters.number("factor"))
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    if high <= low:
        raise parameters.error("high_freq_factor", f"must be above low_freq_factor, {low}")
    original = parameters.size("original_max_position_embeddings", max_position)

    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1.0) - smooth) * inv_freq / factor + smooth * inv_freq
    is_long, is_short = wavelength > np.float32(original / low), wavelength < np.float32(original / high)
    return rope_spec(np.where(is_long, inv_freq / factor, np.where(is_short, inv_freq, between)))


def _yarn(parameters: Fields, head_dim: int, max_position: int) -> RopeSpec:
    """Scale as YaRN (arXiv:2309.00071, section 3.2) with the truncated bounds and attention factor of transformers."""
    theta = parameters.number("rope_theta")
    if theta <= 1:
        raise parameters.error("rope_theta", "must be above 1")
    original = parameters.size("original_max_position_embeddings", max_position)
    factor = parameters.number("factor", max_position / original)

    low = _index_turning(parameters.number("beta_fast", 32.0), theta, head_dim, original)
    high = _index_turning(parameters.number("beta_slow", 1.0), theta, head_dim, original)
    if parameters.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001

    index = np.arange(head_dim // 2, dtype=np.float32)
    keep = np.float32(1.0) - np.clip((index - np.float32(low)) / np.float32(width), np.float32(0), np.float32(1))
    freq = _base_freq(theta, head_dim)
    interpolated = np.float32(1.0) / (np.float32(factor) * freq)
    scaled = interpolated * (np.float32(1.0) - keep) + (np.float32(1.0) / freq) * keep
    return rope_spec(scaled, _yarn_attention_factor(parameters, factor))


def _index_turning(rotations: float, theta: float, head_dim: int, original: int) -> float:
    """Return the (fractional) index of the frequency that turns this often over the original context."""
    return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_attention_factor(parameters: Fields, factor: float) -> float:
    if parameters.has("attention_factor"):
        return parameters.number("attention_factor")
    if parameters.has("mscale") and parameters.has("mscale_all_dim"):
        return _mscale(factor, parameters.number("mscale")) / _mscale(factor, parameters.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_KINDS: dict[str, Callable[[Fields, int, int], RopeSpec]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
