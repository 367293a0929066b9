"""Experiments that show what the KV cache does, on a real model, stepped by hand.

Each returns plain data; `cluster/lab.py` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvorum.kernels.reference.backend import ReferenceBackend, ReferenceStep
from kvorum.kernels.reference.pool import ReferencePool
from kvorum.kernels.spec import Shard
from kvorum.kvstore.store import KVStore
from kvorum.kvstore.types import BlockId
from kvorum.workers.checkpoint.resolve import Checkpoint
from kvorum.workers.checkpoint.weights import iter_weights
from kvorum.workers.communicator import Alone
from kvorum.workers.composer import SchedulerLimits
from kvorum.workers.plan import StepPlan
from kvorum.workers.request import EngineRequest, KVParams, RequestId, SamplingParams
from kvorum.workers.scheduler import Scheduler
from kvorum.workers.worker import Worker, sample_rows

BLOCK_SIZE = 16


class CountingBackend(ReferenceBackend):
    """Counts the K and V projections it makes: tokens that pass an attention block, over all layers."""

    kv_projections = 0

    def attention_block(
        self, hidden: torch.Tensor, layer: int, pool: ReferencePool, step: ReferenceStep
    ) -> torch.Tensor:
        """Count, then compute."""
        self.kv_projections += len(hidden)
        return super().attention_block(hidden, layer, pool, step)


def load_backend(checkpoint: Checkpoint) -> CountingBackend:
    """Load a checkpoint in float32 on the CPU."""
    shard = Shard.whole(checkpoint.spec)
    backend = CountingBackend(checkpoint.spec, shard, dtype=torch.float32, device=torch.device("cpu"))
    backend.load(iter_weights(checkpoint, shard, dtype=torch.float32))
    return backend


class Bench:
    """An engine without a loop: scheduler, store and one rank, a step at a time."""

    def __init__(self, backend: ReferenceBackend, *, num_blocks: int, max_num_seqs: int = 4) -> None:
        self.store = KVStore(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, enable_prefix_caching=True
        )
        limits = SchedulerLimits(
            max_model_len=backend.spec.max_position,
            vocab_size=backend.spec.vocab_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=backend.spec.max_position,
        )
        self.scheduler = Scheduler(self.store, limits)
        pool = backend.allocate_pool(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs)
        self.worker = Worker(backend, pool, ranks=Alone(), sampler=sample_rows)
        self.answers: dict[RequestId, list[int]] = {}

    def submit(self, name: str, prompt: Sequence[int], *, max_tokens: int, kv: KVParams) -> None:
        """Queue a greedy request; raises InvalidRequestError."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = EngineRequest(RequestId(name), tuple(prompt), sampling, kv)
        self.scheduler.check(request)
        self.scheduler.add(request, now_s=time.monotonic())
        self.answers[request.request_id] = []

    def steps(self) -> Iterator[StepPlan]:
        """Run until nothing is left; yields each plan once it is carried out, before ended sequences are released."""
        while (plan := self.scheduler.schedule(now_s=time.monotonic())) is not None:
            for output in self.scheduler.apply(plan, self.worker.execute(plan)):
                self.answers[output.request_id] += output.token_ids
            yield plan
            self.scheduler.release({}, now_s=time.monotonic())


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What one more token cost. Projections are of K and V, per layer. token_id: the one that came of it."""

    token_id: int
    context_tokens: int
    projections_with_cache: int
    projections_without: int
    with_cache_s: float
    without_s: float


def compare_caching(backend: CountingBackend, prompt: Sequence[int], *, num_tokens: int) -> list[TokenCost]:
    """Generate num_tokens with the cache, then again computing everything for every token."""
    num_blocks = -(-(len(prompt) + num_tokens) // BLOCK_SIZE)
    bench = Bench(backend, num_blocks=num_blocks)
    bench.submit("cached", prompt, max_tokens=num_tokens, kv=KVParams())
    steps = bench.steps()
    cached = [_timed(backend, steps) for _ in range(num_tokens)]
    answer = bench.answers[RequestId("cached")]
    costs = []
    for index, (projections, seconds) in enumerate(cached):
        context = [*prompt, *answer[:index]]
        fresh = Bench(backend, num_blocks=num_blocks)
        fresh.submit("whole", context, max_tokens=1, kv=KVParams())
        whole_projections, whole_s = _timed(backend, fresh.steps())
        assert fresh.answers[RequestId("whole")] == [answer[index]], "the cache changed an answer"
        costs.append(TokenCost(answer[index], len(context), projections, whole_projections, seconds, whole_s))
    return costs


def _timed(backend: CountingBackend, steps: Iterator[StepPlan]) -> tuple[int, float]:
    before, start_s = backend.kv_projections, time.perf_counter()
    next(steps)
    projections = (backend.kv_projections - before) // backend.spec.num_layers
    return projections, time.perf_counter() - start_s


@dataclass(frozen=True, slots=True)
class PoolView:
    """Who holds each block after a step: request names; none and cached: only the prefix tree; none: free."""

    holders: tuple[tuple[str, ...], ...]
    cached: frozenset[BlockId]


def watch_blocks(
    backend: ReferenceBackend, requests: Sequence[tuple[str, Sequence[int], int, KVParams]], *, num_blocks: int
) -> list[PoolView]:
    """Run (name, prompt, max_tokens, kv) requests together and look at the pool after every step and at the end."""
    bench = Bench(backend, num_blocks=num_blocks)
    for name, prompt, max_tokens, kv in requests:
        bench.submit(name, prompt, max_tokens=max_tokens, kv=kv)
    names = [name for name, *_ in requests]
    views = [_pool_view(bench.store, names) for _ in bench.steps()]
    return [*views, _pool_view(bench.store, names)]


def _pool_view(store: KVStore, names: Sequence[str]) -> PoolView:
    holders: list[list[str]] = [[] for _ in range(store.num_blocks)]
    for sequence in store.open_sequences():
        for block_id in sequence.block_ids:
            holders[block_id].append(names[sequence.seq_id])
    return PoolView(tuple(map(tuple, holders)), frozenset(node.block_id for node in store.cached_nodes()))


@dataclass(frozen=True, slots=True)
class Eviction:
    """One step in one (layer, KV head): the token that came, the one that went, and the lowest score that stayed.

    Tokens of the recent window, which may not go, are left out of lowest_kept_score.
    """

    new_position: int
    victim_position: int
    victim_score: float
    lowest_kept_score: float


@dataclass(frozen=True, slots=True)
class EvictionLog:
    """tokens: prompt and answer. cut: positions dropped at the prompt's end. kept: positions left at the end."""

    tokens: tuple[int, ...]
    cut: tuple[int, ...]
    evictions: tuple[Eviction, ...]
    kept: tuple[int, ...]


def watch_evictions(
    backend: ReferenceBackend, prompt: Sequence[int], *, max_tokens: int, kv: KVParams, layer: int, head: int
) -> EvictionLog:
    """Run one request and log what (layer, head) evicts."""
    bench = Bench(backend, num_blocks=2 * -(-(len(prompt) + max_tokens) // BLOCK_SIZE))
    bench.submit("watched", prompt, max_tokens=max_tokens, kv=kv)
    kept: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    evictions: list[Eviction] = []
    for _ in bench.steps():
        (sequence,) = bench.store.open_sequences()
        newest, rule = sequence.num_tokens - 1, sequence.rule
        assert rule is not None, "a policy that evicts keeps scores"
        view = bench.worker.view(sequence.residence)
        positions, scores, alive = (tensor[layer, head] for tensor in (view.positions, view.scores, view.alive))
        now_kept = tuple(sorted(positions[alive].tolist()))
        victim = positions[~alive].tolist()
        gone = set(kept) - set(now_kept) - set(victim)
        cut += tuple(sorted(gone))
        kept = now_kept
        if victim:
            evictions.append(
                Eviction(
                    new_position=newest,
                    victim_position=victim[0],
                    victim_score=float(scores[~alive][0]),
                    lowest_kept_score=float(scores[alive & (positions <= newest - rule.recent_tokens)].min()),
                )
            )
    tokens = (*prompt, *bench.answers[RequestId("watched")])
    return EvictionLog(tokens, cut, tuple(evictions), kept)
