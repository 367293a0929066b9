"""Writing K and V: norms, RoPE and the choice of the slot, against the reference's layers, on a poisoned pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvorum.kernels.reference.layers import rms_norm, rotate
from kvorum.kernels.triton.append import Rotation, append
from kvorum.kernels.triton.backend import rotary_table
from kvorum.kernels.triton.graphs import empty_step, fill_step
from kvtest.models import tiny_spec
from kvtest.paged import DEVICE, DTYPES, INTERPRETED, POISON_POSITION, RULES, PagedLayer, chunk, decode, poison

ROUNDING = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 7e-2}


class Appending:
    """A ragged step, and what its K and V should be."""

    def __init__(
        self, *, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None, qk_norm: bool = False,
        head_dim: int = 16, group_size: int = 3,
    ) -> None:  # fmt: skip
        steps = [chunk(0, 17), decode(33, RULES["h2o"]), decode(20, RULES["h2o"], replace=True), chunk(15, 2)]
        self.paged = PagedLayer(
            steps, dtype=dtype, kv_dtype=kv_dtype, num_kv_heads=2, group_size=group_size, head_dim=head_dim
        )
        poison(self.paged.pool)
        self.victims = torch.tensor([5, 19], dtype=torch.int32, device=DEVICE)
        self.paged.pool.victims[0, 2] = self.victims
        generator = torch.Generator().manual_seed(3)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(DEVICE, dtype)

        num_tokens = len(self.paged.queries)
        self.qkv = draw(num_tokens, 2 * (group_size + 2) * head_dim)
        rope = replace(tiny_spec(head_dim=head_dim).layers[0].rope, attention_factor=1.25)
        self.rotation = Rotation(
            rotary=rotary_table(rope, 64, DEVICE),
            scale=0.3,
            q_norm=draw(head_dim) if qk_norm else None,
            k_norm=draw(head_dim) if qk_norm else None,
            eps=1e-5,
            offset=0.0,
        )
        heads = self.qkv.view(num_tokens, -1, head_dim)
        queries, keys, values = heads.split((2 * group_size, 2, 2), dim=1)
        if self.rotation.q_norm is not None and self.rotation.k_norm is not None:
            queries = rms_norm(queries, self.rotation.q_norm, eps=1e-5, offset=0.0)
            keys = rms_norm(keys, self.rotation.k_norm, eps=1e-5, offset=0.0)
        positions = [s.start + i for s in self.paged.steps for i in range(s.num_tokens)]
        table = self.rotation.rotary[positions]
        cos, sin = (torch.cat((part, part), dim=-1) for part in table.unbind(1))
        self.queries = rotate(queries.float(), cos, sin) * 0.3
        self.keys, self.values = rotate(keys.float(), cos, sin), values.float()
        self.positions = torch.tensor(positions)

    def run(self) -> torch.Tensor:
        return append(self.qkv, self.rotation, self.paged.layer, self.paged.step)

    def check(self, tolerance: float) -> None:
        pool = self.paged.pool
        written = torch.zeros_like(pool.positions[0], dtype=torch.bool)
        token = 0
        for step in self.paged.steps:
            for index in range(step.num_tokens):
                for head in range(2):
                    slot = int(self.victims[head]) if step.replace else step.num_slots + index
                    block, offset = step.block_table[slot // 16], slot % 16
                    found = pool.kv[0, block, :, head, offset].float()
                    expected = torch.stack((self.keys[token, head], self.values[token, head]))
                    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
                    assert int(pool.positions[0, block, head, offset]) == int(self.positions[token])
                    assert float(pool.scores[0, block, head, offset]) == 0.0
                    written[block, head, offset] = True
                token += 1
        untouched = ~written
        assert bool((pool.positions[0][untouched] == POISON_POSITION).all())
        assert bool(pool.scores[0][untouched].isnan().all())
        for part in pool.kv[0].float().unbind(1):
            assert bool(part[untouched].isnan().all())


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_turn_and_keys_and_values_land_in_their_slots(dtype: torch.dtype, qk_norm: bool) -> None:
    it = Appending(dtype=dtype, qk_norm=qk_norm)
    queries = it.run()
    torch.testing.assert_close(queries.float(), it.queries, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    it.check(ROUNDING[dtype])


@pytest.mark.parametrize(("head_dim", "group_size"), [(8, 1), (24, 4), (80, 2)])
def test_other_shapes(head_dim: int, group_size: int) -> None:
    it = Appending(head_dim=head_dim, group_size=group_size)
    torch.testing.assert_close(it.run(), it.queries, rtol=1e-5, atol=1e-5)
    it.check(1e-5)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_narrow_pools_hold_what_they_can_exactly(kv_dtype: torch.dtype) -> None:
    """Numbers of the narrow format, turned by no angle: the interpreter's narrowing casts do not round well."""
    it = Appending(kv_dtype=kv_dtype)
    it.qkv.copy_(it.qkv.to(kv_dtype))
    it.rotation.rotary.copy_(torch.tensor([[1.0], [0.0]], device=DEVICE).expand_as(it.rotation.rotary))
    heads = it.qkv.view(len(it.qkv), -1, 16)
    it.keys, it.values = heads[:, 6:8], heads[:, 8:10]
    it.run()
    it.check(0.0)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts off where GPUs round")
def test_narrow_pools_round(kv_dtype: torch.dtype) -> None:
    it = Appending(kv_dtype=kv_dtype)
    it.run()
    it.check(ROUNDING[kv_dtype])


def test_what_float8_cannot_hold_is_cut_off() -> None:
    it = Appending(kv_dtype=torch.float8_e4m3fn)
    it.qkv *= 1e4
    it.run()
    step = it.paged.steps[0]
    found = it.paged.pool.kv[0, step.block_table[0], 1, 0, 0].float()
    assert bool(found.isfinite().all())
    assert float(found.abs().max()) == 448.0


def test_a_replaced_victim_is_forgotten_and_no_other() -> None:
    it = Appending()
    it.paged.pool.victims[0, 1] = 7
    it.run()
    assert it.paged.pool.victims[0].tolist() == [[-1, -1], [7, 7], [-1, -1], [-1, -1], [-1, -1]]


def test_rows_that_fill_a_batch_write_nothing() -> None:
    paged = PagedLayer([decode(33), decode(20)], group_size=1)
    poison(paged.pool)
    padded = empty_step(5, extra_items=3, max_table=9, splits=False, device=DEVICE)
    fill_step(padded, paged.step)
    rotation = Rotation(rotary_table(tiny_spec(head_dim=16).layers[0].rope, 64, DEVICE), 1.0, None, None, 1e-5, 0.0)
    append(torch.ones(5, 96, device=DEVICE), rotation, paged.layer, padded)
    assert int((paged.pool.positions != POISON_POSITION).sum()) == 4  # two tokens, two heads
    assert int((~paged.pool.scores.isnan()).sum()) == 4
