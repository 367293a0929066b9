"""Packed weights: GGUF's blocks bit for bit, int8 to within its step, products against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvorum.kernels.backend import QuantizedWeight, Weight
from kvorum.kernels.cpu.backend import CpuBackend, CpuStep
from kvorum.kernels.cpu.weights import Format
from kvorum.kernels.plan import SequenceStep
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.spec import DecoderSpec
from kvtest.cpu import cpu_backend, relative_error
from kvtest.models import random_weights, reference_backend, tiny_spec

QUANTIZATIONS = ("Q8_0", "Q4_0", "Q4_1")
# Products of exact blocks with activations of 15 bits, and of 7 bits.
EXACT_TOLERANCE, BYTES_TOLERANCE = 2e-4, 6e-2
# Half a step of 127 beside the largest of 32.
INT8_STEP = 0.5 / 127 * 1.01


def blocks_of(weight: torch.Tensor, quantization: str) -> QuantizedWeight:
    kind = GGMLQuantizationType[quantization]
    rows = quantize(weight.float().numpy(), kind)
    return QuantizedWeight(torch.from_numpy(rows), cast("Literal['Q8_0', 'Q4_0', 'Q4_1']", quantization))


def numbers_in(weight: QuantizedWeight) -> torch.Tensor:
    return torch.from_numpy(np.array(dequantize(weight.blocks.numpy(), GGMLQuantizationType[weight.quantization])))


def spec_of(*, vocab_size: int = 64, intermediate_size: int = 96) -> DecoderSpec:
    return replace(
        tiny_spec(num_heads=6, num_kv_heads=2, head_dim=32), vocab_size=vocab_size, intermediate_size=intermediate_size
    )


def embedded_rows(weight: Weight, format: Format, vocab_size: int) -> torch.Tensor:
    """Return the rows of an embedding that was packed as `weight`."""
    spec = spec_of(vocab_size=vocab_size)
    weights: dict[str, Weight] = {**random_weights(spec), "embed": weight}
    backend = cpu_backend(spec, weights, format=format)
    pool = backend.allocate_pool(num_blocks=1, block_size=16, max_num_seqs=1)
    rows = []
    for token in range(vocab_size):
        rows.append(backend.embed(backend.prepare(pool, torch.tensor([token]), [SequenceStep(0, (0,), 0, 1, 0)])))
    return torch.cat(rows)


@pytest.mark.parametrize("vocab_size", [16, 37])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_blocks_are_kept_bit_for_bit(quantization: str, vocab_size: int) -> None:
    weight = blocks_of(torch.randn(vocab_size, 192, generator=torch.manual_seed(0)), quantization)
    assert torch.equal(embedded_rows(weight, Format.Q8, vocab_size), numbers_in(weight))


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.Q8])
def test_floats_are_rounded_to_the_format(format: Format) -> None:
    weight = torch.randn(37, 192, generator=torch.manual_seed(0))
    weight[3] = 0.0
    found = embedded_rows(weight, format, 37)
    if format == Format.F32:
        assert torch.equal(found, weight)
    elif format == Format.BF16:
        assert torch.equal(found, weight.to(torch.bfloat16).float())
    else:
        groups = (found - weight).view(37, -1, 32).abs()
        assert bool((groups <= INT8_STEP * weight.view(37, -1, 32).abs().amax(-1, keepdim=True)).all())


def step_of(backend: CpuBackend, *counts: int) -> CpuStep:
    """Return a step of so many tokens for each sequence; one token is a decode, more are a prompt."""
    blocks = -(-max(counts) // 16)
    pool = backend.allocate_pool(num_blocks=blocks * len(counts), block_size=16, max_num_seqs=len(counts))
    tables = [tuple(range(row * blocks, (row + 1) * blocks)) for row in range(len(counts))]
    steps = [
        SequenceStep(row, table, 0, count, 0) for row, (table, count) in enumerate(zip(tables, counts, strict=True))
    ]
    return backend.prepare(pool, torch.zeros(sum(counts), dtype=torch.int64), steps)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 9, 97, 100])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_products_with_blocks_equal_those_with_their_numbers(quantization: str, rows: int) -> None:
    spec = spec_of()
    floats = random_weights(spec)
    linears = {name for name, tensor in floats.items() if tensor.dim() == 2}
    blocks = {name: blocks_of(floats[name], quantization) for name in linears}
    backend = cpu_backend(spec, {**floats, **blocks}, format=Format.Q8)
    in_bytes = cpu_backend(spec, {**floats, **blocks}, format=Format.Q8, byte_prompts=True)
    reference = reference_backend(spec, {**floats, **{name: numbers_in(block) for name, block in blocks.items()}})
    hidden = torch.randn(rows, spec.hidden_size, generator=torch.manual_seed(1))
    hidden[:, 7] *= 1000.0  # an outlier, as trained models have
    assert relative_error(backend.logits(hidden), reference.logits(hidden.double())) < EXACT_TOLERANCE
    expected = mlp_of(reference, hidden)
    for step in (step_of(backend, *[1] * rows), step_of(backend, rows)):
        assert relative_error(backend.mlp_block(hidden, 1, step), expected) < EXACT_TOLERANCE
    assert relative_error(in_bytes.mlp_block(hidden, 1, step_of(in_bytes, *[1] * rows)), expected) < EXACT_TOLERANCE
    assert relative_error(in_bytes.mlp_block(hidden, 1, step_of(in_bytes, rows)), expected) < BYTES_TOLERANCE
    if rows > 4:
        mixed = in_bytes.mlp_block(hidden, 1, step_of(in_bytes, 2, 1, 1, rows - 4))
        assert relative_error(mixed[2:4], expected[2:4]) < EXACT_TOLERANCE
        assert relative_error(mixed, expected) < BYTES_TOLERANCE


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_of_a_product_depends_neither_on_its_neighbours_nor_on_threads(
    quantization: str, num_threads: int
) -> None:
    spec = spec_of()
    floats = random_weights(spec)
    linears = {name for name, tensor in floats.items() if tensor.dim() == 2}
    blocks = {name: blocks_of(floats[name], quantization) for name in linears}
    weights: dict[str, Weight] = {**floats, **blocks}
    first = cpu_backend(spec, weights, format=Format.Q8, byte_prompts=True, num_threads=2)
    other = cpu_backend(spec, weights, format=Format.Q8, byte_prompts=True, num_threads=num_threads)
    hidden = torch.randn(101, spec.hidden_size, generator=torch.manual_seed(1))
    prompt = first.mlp_block(hidden, 1, step_of(first, 101))
    decoded = first.mlp_block(hidden, 1, step_of(first, *[1] * 101))
    for start, stop in ((0, 2), (2, 9), (9, 17), (17, 30), (30, 101)):
        part, count = hidden[start:stop], stop - start
        assert torch.equal(other.mlp_block(part, 1, step_of(other, count)), prompt[start:stop])
        assert torch.equal(other.mlp_block(part, 1, step_of(other, *[1] * count)), decoded[start:stop])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_largest_sums_of_a_group_do_not_overflow(quantization: str) -> None:
    spec = spec_of()
    floats = random_weights(spec)
    largest = torch.ones(spec.intermediate_size, spec.hidden_size)
    # Every other number of its block becomes the largest there is.
    largest[:, ::32] = -1.0 if quantization == "Q8_0" else -1.14
    blocks = {f"layers.1.{name}": blocks_of(largest, quantization) for name in ("gate", "up")}
    floats["layers.1.mlp_norm"] = torch.ones(spec.hidden_size)
    backend = cpu_backend(spec, {**floats, **blocks}, format=Format.Q8, byte_prompts=True)
    reference = reference_backend(spec, {**floats, **{name: numbers_in(block) for name, block in blocks.items()}})
    hidden = torch.ones(9, spec.hidden_size)  # one number for all, which is 127 as a byte, 32,767 as a word
    for step in (step_of(backend, 9), step_of(backend, *[1] * 9)):
        assert relative_error(backend.mlp_block(hidden, 1, step), mlp_of(reference, hidden)) < 1e-2


def mlp_of(reference: ReferenceBackend, hidden: torch.Tensor, *, layer: int = 1) -> torch.Tensor:
    """Return the reference's half layer, for which it does not matter what the step is."""
    pool = reference.allocate_pool(num_blocks=1, block_size=16, max_num_seqs=1)
    step = reference.prepare(pool, torch.tensor([0]), [SequenceStep(0, (0,), 0, 1, 0)])
    return reference.mlp_block(hidden.double(), layer, step)


def test_where_parts_differ_in_type_all_become_int8() -> None:
    spec = spec_of()
    floats = random_weights(spec)
    mixed = {f"layers.{layer}.{name}": kind for layer in (0, 1) for name, kind in (("gate", "Q4_1"), ("up", "Q8_0"))}
    blocks = {name: blocks_of(floats[name], kind) for name, kind in mixed.items()}
    backend = cpu_backend(spec, {**floats, **blocks}, format=Format.Q8)
    reference = reference_backend(spec, {**floats, **{name: numbers_in(block) for name, block in blocks.items()}})
    hidden = torch.randn(5, spec.hidden_size, generator=torch.manual_seed(1))
    found = backend.mlp_block(hidden, 0, step_of(backend, 1, 1, 1, 1, 1))
    assert relative_error(found, mlp_of(reference, hidden, layer=0)) < 2e-2


def test_a_row_that_is_no_multiple_of_32_long_stays_in_bf16() -> None:
    odd = spec_of(intermediate_size=41)
    weights = random_weights(odd)
    backend = cpu_backend(odd, weights, format=Format.Q8)
    reference = reference_backend(odd, weights)
    hidden = torch.randn(5, odd.hidden_size, generator=torch.manual_seed(1))
    found = backend.mlp_block(hidden, 0, step_of(backend, 1, 1, 1, 1, 1))
    assert relative_error(found, mlp_of(reference, hidden, layer=0)) < 2e-2


def test_missing_weights_are_named() -> None:
    spec = spec_of()
    weights = random_weights(spec)
    del weights["layers.1.up"]
    with pytest.raises(AssertionError, match=r"layers\.1\.up"):
        cpu_backend(spec, weights)
