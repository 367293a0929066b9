"""How a model is cut for tensor parallelism: the one place that deals heads, MLP columns and vocabulary out to ranks.

The loader, the KV pool and `kvorum plan` all follow it. Pure, and free of torch.

The unit of attention is the GQA group: one KV head and the query heads that share it.
  ranks <= groups   each rank has floor or ceil(groups / ranks) whole groups, the first ranks one more:
                    9 query and 3 KV heads on 2 ranks are 6 + 3 and 2 + 1.
  ranks > groups    each group is held by floor or ceil(ranks / groups) ranks, which split its query heads; each keeps
                    the group's keys and values, and they agree on its scores before any of them evicts.
Either way a rank's heads are contiguous, its KV heads are all that its query heads need, and every group on a rank has
equally many of its query heads there.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from kvorum.kernels.spec import DecoderSpec, Shard

# Columns and rows are cut between runs of this many where there are enough: quantised blocks have 32 numbers.
_RUN = 32


def plan_shards(spec: DecoderSpec, world_size: int) -> tuple[Shard, ...]:
    """Return each rank's shard, in the order of ranks.

    Raises:
        ValueError: there are more ranks than query heads.
    """
    if world_size > spec.num_heads:
        raise ValueError(f"{world_size} ranks cannot share {spec.num_heads} query heads")
    heads = _whole_groups(spec, world_size) if world_size <= spec.num_kv_heads else _split_groups(spec, world_size)
    mlp = _share_in_runs(spec.intermediate_size, world_size)
    vocab = _share_in_runs(spec.vocab_size, world_size)
    return tuple(
        Shard(q_heads=q, kv_heads=kv, mlp=mlp[rank], vocab=vocab[rank], rank=rank, replicas=replicas)
        for rank, (q, kv, replicas) in enumerate(heads)
    )


_Range = tuple[int, int]
_Heads = tuple[_Range, _Range, tuple[int, ...]]


def _whole_groups(spec: DecoderSpec, world_size: int) -> list[_Heads]:
    group = spec.group_size
    return [
        ((first * group, last * group), (first, last), (rank,))
        for rank, (first, last) in enumerate(_share(spec.num_kv_heads, world_size))
    ]


def _split_groups(spec: DecoderSpec, world_size: int) -> list[_Heads]:
    heads: list[_Heads] = []
    for kv_head, (first, last) in enumerate(_share(world_size, spec.num_kv_heads)):
        begin = kv_head * spec.group_size
        for start, stop in _share(spec.group_size, last - first):
            heads.append(((begin + start, begin + stop), (kv_head, kv_head + 1), tuple(range(first, last))))
    return heads


def _share(count: int, num_shares: int) -> list[_Range]:
    """Cut range(count) into contiguous parts as even as they go, the larger ones first."""
    even, rest = divmod(count, num_shares)
    ends = accumulate((even + (share < rest) for share in range(num_shares)), initial=0)
    return list(pairwise(ends))


def _share_in_runs(count: int, num_shares: int) -> list[_Range]:
    """Cut range(count) between runs of _RUN, or anywhere when there are too few of them to be fair."""
    runs, rest = divmod(count, _RUN)
    if rest or runs < num_shares:
        return _share(count, num_shares)
    return [(first * _RUN, last * _RUN) for first, last in _share(runs, num_shares)]
