"""Linear, norm, rotary and activation: rows that know nothing of each other, and formulas written out."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvorum.kernels.reference.layers import activate, linear, rms_norm, rotary_table, rotate, wide_dtype
from kvorum.kernels.spec import Activation, RopeSpec

MAX_ROWS = 40
# in_features, out_features; the last two are a 135M model's.
SIZES = ((7, 5), (64, 48), (576, 192), (1536, 576))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class TestLinear:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("size", SIZES)
    def test_a_row_does_not_depend_on_how_many_stand_beside_it(self, size: tuple[int, int], dtype: torch.dtype) -> None:
        inputs, weight, bias = draw(MAX_ROWS, size[0], dtype=dtype), draw(*size[::-1], dtype=dtype), draw(size[1])
        whole = linear(inputs, weight, bias.to(dtype))
        for num_rows in range(1, MAX_ROWS + 1):
            assert torch.equal(linear(inputs[:num_rows], weight, bias.to(dtype)), whole[:num_rows]), num_rows

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_does_not_depend_on_its_place_or_on_what_its_neighbours_hold(self, dtype: torch.dtype) -> None:
        weight, row = draw(192, 576, dtype=dtype), draw(1, 576, dtype=dtype)
        alone = linear(row, weight)[0]
        for place in range(12):
            inputs = draw(12, 576, dtype=dtype, seed=place + 1) * 100
            inputs[place] = row[0]
            assert torch.equal(linear(inputs, weight)[place], alone), place

    @pytest.mark.parametrize("num_rows", [1, 7, 8, 9])
    def test_it_is_a_product_and_a_sum(self, num_rows: int) -> None:
        inputs, weight, bias = draw(num_rows, 7), draw(5, 7, seed=1), draw(5, seed=2)
        expected = torch.tensor(
            [
                [math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in weight.tolist()]
                for row in inputs.tolist()
            ],
            dtype=torch.float64,
        )
        torch.testing.assert_close(linear(inputs, weight), expected)
        torch.testing.assert_close(linear(inputs, weight, bias), expected + bias)

    def test_no_row_gives_no_row(self) -> None:
        assert linear(draw(0, 7), draw(5, 7)).shape == (0, 5)


class TestRmsNorm:
    # The second is small enough for eps to weigh in.
    @pytest.mark.parametrize("scale", [1.0, 1e-3])
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_it_divides_by_the_root_of_the_mean_square(self, offset: float, scale: float) -> None:
        inputs, weight = draw(3, 10) * scale, draw(10, seed=1)
        expected = [
            [
                x / math.sqrt(math.fsum(y * y for y in row) / len(row) + 1e-5) * (offset + w)
                for x, w in zip(row, weight.tolist(), strict=True)
            ]
            for row in inputs.tolist()
        ]
        found = rms_norm(inputs, weight, eps=1e-5, offset=offset)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0.0)

    @pytest.mark.parametrize("offset", [0.0, 1.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_it_rounds_where_the_models_do(self, dtype: torch.dtype, offset: float) -> None:
        inputs, weight = draw(5, 64, dtype=dtype), draw(64, dtype=dtype, seed=1)
        module = Gemma3RMSNorm(64, eps=1e-6) if offset else LlamaRMSNorm(64, eps=1e-6)
        module.weight = torch.nn.Parameter(weight)
        assert torch.equal(rms_norm(inputs, weight, eps=1e-6, offset=offset), module(inputs).detach())

    def test_squares_beyond_the_range_of_float16_do_not_overflow(self) -> None:
        inputs = torch.full((1, 4), 1000.0, dtype=torch.float16)
        weight = torch.ones(4, dtype=torch.float16)
        assert rms_norm(inputs, weight, eps=1e-6, offset=0.0).tolist() == [[1.0] * 4]


class TestRotary:
    ROPE = RopeSpec(inv_freq=(1.0, 0.31, 0.01), attention_factor=1.25)
    POSITIONS = (0, 1, 15, 16, 17, 257, 100_003)

    def test_it_turns_pairs_as_complex_numbers(self) -> None:
        heads = draw(len(self.POSITIONS), 2, 6)
        cos, sin = rotary_table(self.ROPE, torch.tensor(self.POSITIONS), torch.float64)
        found = rotate(heads, cos, sin)
        for token, position in enumerate(self.POSITIONS):
            for head in range(2):
                x, y = heads[token, head].tolist(), found[token, head].tolist()
                for pair, frequency in enumerate(self.ROPE.inv_freq):
                    turned = complex(x[pair], x[pair + 3]) * cmath.rect(1.25, position * frequency)
                    assert complex(y[pair], y[pair + 3]) == pytest.approx(turned, rel=1e-9)

    def test_products_depend_on_the_distance_of_positions_only(self) -> None:
        query, key = draw(1, 1, 6), draw(1, 1, 6, seed=1)

        def product(at: int, by: int) -> float:
            (cos, sin), (cos_by, sin_by) = (
                rotary_table(self.ROPE, torch.tensor([position]), torch.float64) for position in (at, by)
            )
            return float((rotate(query, cos, sin) * rotate(key, cos_by, sin_by)).sum())

        assert product(105, 100) == pytest.approx(product(5, 0), rel=1e-9)
        assert product(105, 100) != pytest.approx(product(6, 0), rel=1e-3)

    def test_the_table_of_a_narrow_model_is_rounded_only_at_the_end(self) -> None:
        positions = torch.tensor(self.POSITIONS)
        wide = rotary_table(self.ROPE, positions, torch.float32)
        narrow = rotary_table(self.ROPE, positions, torch.bfloat16)
        assert all(torch.equal(n, w.bfloat16()) for n, w in zip(narrow, wide, strict=True))


def slow_activation(x: float, kind: Activation) -> float:
    if kind == "silu":
        return x / (1.0 + math.exp(-x))
    return 0.5 * x * (1.0 + math.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_are_their_formulas(kind: Activation) -> None:
    inputs = torch.linspace(-9.0, 9.0, 181, dtype=torch.float64)
    expected = [slow_activation(x, kind) for x in inputs.tolist()]
    assert activate(inputs, kind).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_wide_is_float32_unless_the_model_is_wider(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert wide_dtype(dtype) is wide


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [5, 48, 64])
def test_a_row_of_activations_does_not_depend_on_how_many_stand_beside_it(
    kind: Activation, dtype: torch.dtype, width: int
) -> None:
    inputs = draw(MAX_ROWS, width, dtype=dtype)
    whole = activate(inputs, kind)
    for num_rows in range(1, MAX_ROWS + 1):
        assert torch.equal(activate(inputs[:num_rows], kind), whole[:num_rows]), num_rows
