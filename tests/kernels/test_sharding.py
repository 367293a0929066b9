"""Shards cover a model once, evenly, and in a way that every rank can compute alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kernels.sharding import plan_shards
from kvorum.kernels.spec import DecoderSpec, Shard
from kvtest.models import tiny_spec

Range = tuple[int, int]


@st.composite
def models(draw: st.DrawFn) -> tuple[DecoderSpec, int]:
    kv_heads, group = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    spec = replace(
        tiny_spec(num_heads=kv_heads * group, num_kv_heads=kv_heads),
        intermediate_size=draw(st.integers(120, 4_000)),
        vocab_size=draw(st.integers(120, 4_000)),
    )
    return spec, draw(st.integers(1, spec.num_heads))


def assert_covers(ranges: list[Range], size: int) -> None:
    """Contiguous, in order, whole."""
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])]
    assert ranges[-1][1] == size


@given(models())
def test_query_heads_mlp_and_vocabulary_are_dealt_out_once(model: tuple[DecoderSpec, int]) -> None:
    spec, num_ranks = model
    shards = plan_shards(spec, num_ranks)
    assert [shard.rank for shard in shards] == list(range(num_ranks))
    assert_covers([shard.q_heads for shard in shards], spec.num_heads)
    assert_covers([shard.mlp for shard in shards], spec.intermediate_size)
    assert_covers([shard.vocab for shard in shards], spec.vocab_size)
    assert all(first < last for shard in shards for first, last in (shard.q_heads, shard.mlp, shard.vocab))


@given(models())
def test_a_rank_has_just_the_kv_heads_of_its_query_heads(model: tuple[DecoderSpec, int]) -> None:
    spec, num_ranks = model
    for shard in plan_shards(spec, num_ranks):
        groups = Counter(head // spec.group_size for head in range(*shard.q_heads))
        assert list(groups) == list(range(*shard.kv_heads))
        assert set(groups.values()) == {shard.num_heads // shard.num_kv_heads}


@given(models())
def test_replicas_are_the_ranks_with_the_same_kv_heads(model: tuple[DecoderSpec, int]) -> None:
    spec, num_ranks = model
    shards = plan_shards(spec, num_ranks)
    for shard in shards:
        assert shard.replicas == tuple(other.rank for other in shards if other.kv_heads == shard.kv_heads)
    assert (max(len(shard.replicas) for shard in shards) == 1) == (num_ranks <= spec.num_kv_heads)


@given(models())
def test_no_rank_has_more_than_it_must(model: tuple[DecoderSpec, int]) -> None:
    spec, num_ranks = model
    shards = plan_shards(spec, num_ranks)
    assert max(shard.num_kv_heads for shard in shards) == -(-spec.num_kv_heads // num_ranks)
    if num_ranks > spec.num_kv_heads:
        sharers = num_ranks // spec.num_kv_heads  # of the group that has fewest
        assert max(shard.num_heads for shard in shards) == -(-spec.group_size // sharers)


def test_smollm2_on_two_and_four_ranks() -> None:
    spec = replace(tiny_spec(num_heads=9, num_kv_heads=3), intermediate_size=1_536, vocab_size=49_152)
    two, four = plan_shards(spec, 2), plan_shards(spec, 4)
    assert [(shard.q_heads, shard.kv_heads) for shard in two] == [((0, 6), (0, 2)), ((6, 9), (2, 3))]
    assert [shard.q_heads for shard in four] == [(0, 2), (2, 3), (3, 6), (6, 9)]
    assert [shard.replicas for shard in four] == [(0, 1), (0, 1), (2,), (3,)]


def test_one_rank_has_everything() -> None:
    spec = tiny_spec(num_heads=6, num_kv_heads=2)
    assert plan_shards(spec, 1) == (Shard.whole(spec),)


def test_cuts_fall_between_quantised_blocks_where_there_are_enough() -> None:
    spec = replace(tiny_spec(num_heads=4, num_kv_heads=4), intermediate_size=96, vocab_size=100)
    assert [shard.mlp for shard in plan_shards(spec, 3)] == [(0, 32), (32, 64), (64, 96)]
    assert [shard.mlp for shard in plan_shards(spec, 4)] == [(0, 24), (24, 48), (48, 72), (72, 96)]


def test_more_ranks_than_query_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="5 ranks cannot share 4 query heads"):
        plan_shards(tiny_spec(num_heads=4, num_kv_heads=2), 5)
