"""Norms, residual adds and gated activations against the reference's layers."""

from __future__ import annotations

import pytest
import torch

from kvorum.kernels.reference.layers import activate, rms_norm
from kvorum.kernels.spec import Activation
from kvorum.kernels.triton.fused import gated_activation, residual_norm
from kvtest.paged import DEVICE, DTYPES, TOLERANCE, assert_near

SIZES = (1, 15, 16, 17, 576)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_norm(size: int, dtype: torch.dtype, offset: float) -> None:
    hidden, weight = draw(3, size, dtype=dtype), draw(size, dtype=dtype, seed=1)
    same, normed = residual_norm(hidden, None, weight, eps=1e-5, offset=offset)
    assert same is hidden
    assert_near(normed, rms_norm(hidden, weight, eps=1e-5, offset=offset), TOLERANCE[dtype], "norm")


@pytest.mark.parametrize("post", [False, True], ids=["plain", "post-norm"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_an_add_and_a_norm(size: int, dtype: torch.dtype, post: bool) -> None:
    hidden, partial = draw(3, size, dtype=dtype), draw(3, size, dtype=dtype, seed=1)
    weight = draw(size, dtype=dtype, seed=2)
    post_weight = draw(size, dtype=dtype, seed=3) if post else None
    before = hidden.clone()
    summed, normed = residual_norm(hidden, partial, weight, post_weight=post_weight, eps=1e-5, offset=1.0)
    added = partial if post_weight is None else rms_norm(partial, post_weight, eps=1e-5, offset=1.0)
    assert torch.equal(hidden, before)
    assert_near(summed, hidden + added, TOLERANCE[dtype], "sum")
    assert_near(normed, rms_norm(hidden + added, weight, eps=1e-5, offset=1.0), TOLERANCE[dtype], "norm")


def test_an_add_alone_is_the_sum_that_is_normed() -> None:
    hidden, partial = draw(2, 33, dtype=torch.float16), draw(2, 33, dtype=torch.float16, seed=1)
    weight = draw(33, dtype=torch.float16, seed=2)
    alone, same = residual_norm(hidden, partial, None, eps=1e-5, offset=0.0)
    fused, normed = residual_norm(hidden, partial, weight, eps=1e-5, offset=0.0)
    _, after = residual_norm(alone, None, weight, eps=1e-5, offset=0.0)
    assert same is hidden
    assert torch.equal(alone, fused)
    assert torch.equal(after, normed)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 1025])
def test_a_gated_activation(width: int, dtype: torch.dtype, kind: Activation) -> None:
    gate_up = draw(3, 2 * width, dtype=dtype) * 8
    gate, up = gate_up.chunk(2, dim=-1)
    assert_near(gated_activation(gate_up, kind), activate(gate, kind) * up, TOLERANCE[dtype], kind)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_an_activation_of_large_numbers_is_finite(kind: Activation) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], device=DEVICE)
    assert gated_activation(gate_up, kind).tolist() == [[0.0, 1e4]]
