"""Decode and prefill attention, scores and victims against the reference's functions, on poisoned pools."""

from __future__ import annotations

import pytest
import torch

from kvorum.kernels.plan import EvictionRule, SequenceStep
from kvorum.kernels.triton.decode_attention import decode_attention
from kvorum.kernels.triton.prefill_attention import prefill_attention
from kvorum.kernels.triton.ranking import choose_victims
from kvtest.paged import DEVICE, DTYPES, RULES, PagedLayer, chunk, decode

H2O = RULES["h2o"]


def run(paged: PagedLayer) -> PagedLayer:
    prefill_attention(paged.queries, paged.layer, paged.step, paged.out, sliding_window=paged.window, tiles=paged.tiles)
    decode_attention(paged.queries, paged.layer, paged.step, paged.out, sliding_window=paged.window, tiles=paged.tiles)
    choose_victims(paged.layer, paged.step)
    return paged


class TestDecode:
    @pytest.mark.parametrize(("num_kv_heads", "group_size", "head_dim"), [(3, 1, 16), (1, 3, 24), (2, 4, 64)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ragged_rows(self, dtype: torch.dtype, num_kv_heads: int, group_size: int, head_dim: int) -> None:
        steps = [decode(size, H2O, choose=True) for size in (1, 15, 16, 17, 33, 64, 65)]
        paged = PagedLayer(
            [*steps, decode(40)], dtype=dtype, num_kv_heads=num_kv_heads, group_size=group_size, head_dim=head_dim
        )
        run(paged).check()

    @pytest.mark.parametrize("rule", RULES)
    def test_every_rule(self, rule: str) -> None:
        # 12 slots and 9 evicted tokens: the query stands at the first position that "observed" counts.
        sizes = (5, 12, 40, 70)
        run(PagedLayer([decode(size, RULES[rule], choose=True, replace=size == 40) for size in sizes])).check()

    @pytest.mark.parametrize("window", [1, 7, 40])
    def test_sliding_windows(self, window: int) -> None:
        run(PagedLayer([decode(size, H2O, gap=3, choose=True) for size in (1, 17, 70)], window=window)).check()

    def test_scores_are_kept_without_choosing(self) -> None:
        run(PagedLayer([decode(33, H2O), decode(20)])).check()

    @pytest.mark.parametrize("rule", ["h2o", "h2o_avg", "decay"])
    def test_long_rows_are_split_and_joined(self, rule: str) -> None:
        paged = PagedLayer([decode(size, RULES[rule], choose=size != 300) for size in (600, 20, 300)], group_size=3)
        assert paged.step.splits
        run(paged).check()

    def test_split_rows_with_a_window_that_whole_items_do_not_see(self) -> None:
        paged = PagedLayer([decode(600, H2O, gap=0, choose=True)], window=3)
        assert paged.step.splits
        run(paged).check()

    @pytest.mark.parametrize("block_size", [1, 8, 32])
    def test_other_block_sizes(self, block_size: int) -> None:
        run(PagedLayer([decode(size, H2O, choose=True) for size in (7, 33)], block_size=block_size)).check()

    @pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.bfloat16])
    def test_narrow_pools(self, kv_dtype: torch.dtype) -> None:
        run(PagedLayer([decode(size, H2O, choose=True) for size in (17, 130)], kv_dtype=kv_dtype)).check()


class TestPrefill:
    @pytest.mark.parametrize(("num_kv_heads", "group_size", "head_dim"), [(3, 1, 16), (1, 3, 24), (2, 4, 64)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ragged_chunks(self, dtype: torch.dtype, num_kv_heads: int, group_size: int, head_dim: int) -> None:
        steps = [chunk(0, 2, H2O), chunk(0, 17, H2O), chunk(15, 33, H2O), chunk(33, 16), chunk(0, 65, H2O)]
        paged = PagedLayer(steps, dtype=dtype, num_kv_heads=num_kv_heads, group_size=group_size, head_dim=head_dim)
        run(paged).check()

    @pytest.mark.parametrize("rule", RULES)
    def test_every_rule(self, rule: str) -> None:
        steps = [chunk(0, 30, RULES[rule], choose=True), chunk(20, 9, RULES[rule], gap=11, choose=True)]
        run(PagedLayer(steps)).check()

    @pytest.mark.parametrize("window", [1, 2, 7, 40])
    def test_sliding_windows(self, window: int) -> None:
        """Of the 64 slots before the last chunk, one tile, its first query sees window - 1."""
        steps = [chunk(0, 50, H2O), chunk(130, 9, H2O), chunk(30, 20, H2O, gap=4), chunk(64, 9)]
        run(PagedLayer(steps, window=window)).check()

    def test_several_tiles_of_queries_and_keys(self) -> None:
        run(PagedLayer([chunk(0, 150, H2O), chunk(140, 70, H2O)], num_kv_heads=1)).check()

    @pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.bfloat16])
    def test_narrow_pools(self, kv_dtype: torch.dtype) -> None:
        run(PagedLayer([chunk(10, 30, H2O)], kv_dtype=kv_dtype)).check()


def test_decodes_and_chunks_of_one_step() -> None:
    steps: list[SequenceStep] = [
        decode(33, H2O, choose=True),
        chunk(17, 20, EvictionRule(recent_tokens=4, decay=0.9)),
        decode(21),
        chunk(0, 15),
        decode(300, H2O, choose=True, replace=True),
    ]
    run(PagedLayer(steps)).check()


def test_the_largest_group_of_a_model_fits_in_one_tile() -> None:
    run(PagedLayer([decode(20, H2O, choose=True), chunk(3, 9, H2O)], num_kv_heads=1, group_size=32)).check()


def test_nothing_is_launched_for_nothing() -> None:
    paged = PagedLayer([decode(5)])
    prefill_attention(paged.queries, paged.layer, paged.step, paged.out, sliding_window=None, tiles=paged.tiles)
    assert bool(paged.out.isnan().all())
    assert paged.out.device.type == DEVICE.type
