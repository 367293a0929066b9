"""How work is cut and batches are padded, and what the back end refuses: no kernel runs here."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kernels.plan import EvictionRule, SequenceStep
from kvorum.kernels.spec import Shard
from kvorum.kernels.triton.backend import TritonBackend
from kvorum.kernels.triton.graphs import padded_size
from kvorum.kernels.triton.step import build_step
from kvorum.kernels.triton.tiles import CUT, MIN_PIECE, Architecture, Tiles, cut_row
from kvtest.models import random_weights, tiny_spec

CPU = torch.device("cpu")


def tiles(*, extra_items: int = 50, group_size: int = 4, head_dim: int = 128) -> Tiles:
    chosen = Tiles.choose(
        Architecture.HOPPER,
        num_kv_heads=8,
        group_size=group_size,
        head_dim=head_dim,
        kv_itemsize=2,
        programs=396,
    )
    return replace(chosen, extra_items=extra_items)


@given(num_slots=st.integers(1, 200_000), cuts=st.integers(4, 500))
def test_a_row_is_cut_into_even_pieces_without_gaps(num_slots: int, cuts: int) -> None:
    pieces = cut_row(num_slots, cuts * CUT)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == num_slots
    assert all(end == first for (_, end), (first, _) in pairwise(pieces))
    lengths = [end - first for first, end in pieces]
    assert all(0 < length <= cuts * CUT for length in lengths)
    assert max(lengths) - min(lengths[:-1], default=max(lengths)) <= CUT


@given(rows=st.lists(st.integers(1, 70_000), min_size=1, max_size=64), extra=st.integers(1, 255))
def test_a_steps_pieces_fit_into_a_graph_whatever_its_rows(rows: list[int], extra: int) -> None:
    cut = tiles(extra_items=extra)
    piece = cut.piece_of_decode(rows)
    assert piece >= MIN_PIECE
    pieces = [len(cut_row(row, piece)) for row in rows]
    assert sum(pieces) <= len(rows) + extra
    assert max(pieces) <= extra + 1


def test_one_long_row_fills_the_device() -> None:
    assert len(cut_row(65_536, tiles().piece_of_decode([65_536]))) == 49  # of the 50 that may be


@pytest.mark.parametrize("architecture", Architecture)
@pytest.mark.parametrize("group_size", [1, 3, 8, 9, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_a_tile_of_prefill_holds_whole_groups(architecture: Architecture, group_size: int, head_dim: int) -> None:
    cut = Tiles.choose(
        architecture, num_kv_heads=1, group_size=group_size, head_dim=head_dim, kv_itemsize=2, programs=12
    )
    assert cut.group >= group_size
    assert cut.queries * cut.group == cut.prefill.rows
    assert cut.column_sums.rows % cut.group == 0
    assert cut.decode.rows >= cut.group


@given(st.integers(1, 1000))
def test_a_batch_is_padded_a_little(num_seqs: int) -> None:
    padded = padded_size(num_seqs)
    assert num_seqs <= padded < max(2 * num_seqs, num_seqs + 32)
    assert padded_size(padded) == padded


def test_a_step_names_the_work_of_each_sequence_once() -> None:
    rule = EvictionRule(recent_tokens=4)
    steps = [
        SequenceStep(0, (3, 1), 0, 20, 0, rule),
        SequenceStep(1, (2, 5, 6), 40, 1, 33, rule, choose_victims=True),
        SequenceStep(2, (4,), 3, 2, 3),
    ]
    step = build_step(torch.zeros(23, dtype=torch.int64), steps, block_size=16, tiles=tiles(), device=CPU)
    assert step.token_seqs.tolist() == [0] * 20 + [1] + [2] * 2
    assert step.tables.tolist() == [3, 1, 2, 5, 6, 4]
    assert step.decode_items.tolist() == [[1, 0, 34, 0]]
    assert step.query_tiles.tolist() == [[0, 0], [2, 0]]
    assert step.key_tiles.tolist() == [[0, 0]]
    assert step.choosers.tolist() == []  # the decode kernel chooses for a row that is one item
    assert not step.splits
    assert not step.only_decodes


def test_what_kernels_assume_to_be_aligned_is() -> None:
    steps = [SequenceStep(row, (row,), 0, 3, 0, EvictionRule(recent_tokens=1)) for row in range(3)]
    step = build_step(torch.zeros(9, dtype=torch.int64), steps, block_size=16, tiles=tiles(), device=CPU)
    parts = (step.token_seqs, step.seqs, step.tables, step.query_tiles, step.key_tiles)
    offsets = [part.data_ptr() - step.token_seqs.data_ptr() for part in parts]
    assert all(offset % 16 == 0 for offset in offsets)


@pytest.mark.parametrize("kv_heads", [(0, 2), (0, 1)])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("block_size", [1, 16])
def test_block_bytes_are_the_bytes_that_a_pool_takes(
    block_size: int, kv_dtype: torch.dtype, kv_heads: tuple[int, int]
) -> None:
    spec = tiny_spec()
    shard = replace(Shard.whole(spec), q_heads=(0, 2 * kv_heads[1]), kv_heads=kv_heads)
    backend = TritonBackend(spec, shard, dtype=torch.float32, device=CPU, kv_dtype=kv_dtype)
    pool = backend.allocate_pool(num_blocks=7, block_size=block_size, max_num_seqs=1)
    taken = pool.kv.nbytes + pool.scores.nbytes + pool.positions.nbytes + pool.logits.nbytes
    assert taken == 7 * backend.block_bytes(block_size)
    assert bool((pool.victims == -1).all())


class TestRefusals:
    def backend(self, kv_dtype: torch.dtype, device: str = "cpu") -> TritonBackend:
        spec = tiny_spec()
        return TritonBackend(
            spec, Shard.whole(spec), dtype=torch.bfloat16, device=torch.device(device), kv_dtype=kv_dtype
        )

    def test_a_pool_of_integers(self) -> None:
        with pytest.raises(ValueError, match="kv_dtype"):
            self.backend(torch.int8)

    def test_float8_on_a_gpu_that_does_not_convert_it(self) -> None:
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
            pytest.raises(ValueError, match=r"8\.9"),
        ):
            self.backend(torch.float8_e4m3fn, "cuda")

    def test_missing_weights(self) -> None:
        spec = tiny_spec()
        weights = {name: weight for name, weight in random_weights(spec).items() if name != "layers.1.k"}
        with pytest.raises(AssertionError, match=r"layers\.1\.k"):
            self.backend(torch.bfloat16).load(weights.items())
