"""What the cache manager is told of an engine's pool."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from kvorum.kvstore.pricing import Rule, worths
from kvorum.kvstore.store import KVStore
from kvorum.workers.bidding import bid_for_context, can_be_shrunk, surplus_blocks
from kvorum.workers.governance import NUM_WORTH_BINS, EngineReport, TenantUse, worth_bin
from kvorum.workers.reclaim import Reclaimer
from kvorum.workers.sequence import Sequence


def report_pool(store: KVStore, reclaimer: Reclaimer, sequences: Iterable[Sequence]) -> EngineReport:
    """Return a consistent look at a pool. sequences: all that the engine has, waiting ones included."""
    reserved: Counter[str] = Counter()
    elastic: Counter[str] = Counter()
    histograms: defaultdict[str, list[int]] = defaultdict(lambda: [0] * NUM_WORTH_BINS)
    unread_tokens = 0
    for sequence in sequences:
        if not sequence.prompt_done:
            unread_tokens += len(sequence.tokens) - (0 if sequence.kv is None else sequence.kv.num_tokens)
        reserved[sequence.tenant] += sequence.request.terms.reserved_blocks
        if sequence.is_elastic:
            elastic[sequence.tenant] += surplus_blocks(sequence)
        if can_be_shrunk(sequence) and sequence.kv is not None and not sequence.kv.swapped:
            _count_worths(sequence, reclaimer.rule, store.block_size, histograms[sequence.tenant])
    held, cached = store.held_by_tenant(), store.cached_by_tenant()
    return EngineReport(
        total_blocks=store.num_blocks,
        free_blocks=store.num_free,
        cached_blocks=store.num_cached,
        price=reclaimer.price,
        tenants={
            tenant: TenantUse(
                held=held.get(tenant, 0),
                reserved=reserved[tenant],
                elastic=elastic[tenant],
                cached=cached.get(tenant, 0),
                worths=tuple(histograms[tenant]),
            )
            for tenant in sorted(reserved.keys() | held.keys() | cached.keys())
        },
        reclaimed=reclaimer.reclaimed,
        unread_tokens=unread_tokens,
    )


def _count_worths(sequence: Sequence, rule: Rule, block_size: int, histogram: list[int]) -> None:
    bid = bid_for_context(sequence, block_size)
    for worth in worths(bid, rule)[sequence.request.terms.reserved_blocks :]:
        if worth > 0.0:
            histogram[worth_bin(worth)] += 1
