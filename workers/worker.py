"""One rank: weights, a pool, and the forward pass over a step plan. A plain class; `rank_actor.py` is the actor.

Each rank decides by itself what its own KV heads evict. Where several ranks hold the same KV head and split its query
heads, each adds to the scores what its own queries gave; before anything is decided by them they are made equal
shares of the sum, so that all replicas decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol

import torch

from kvorum.kernels.backend import Backend, PoolT, SlotView, StepT, run_layers
from kvorum.kernels.cpu.backend import CpuBackend
from kvorum.kernels.plan import SequenceStep
from kvorum.kernels.reference.attention import values_at_risk
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.sharding import plan_shards
from kvorum.kernels.spec import Shard
from kvorum.kvstore.device import DeviceStore
from kvorum.kvstore.errors import UnsupportedError
from kvorum.kvstore.ops import Residence
from kvorum.kvstore.retention import kept_mass, kept_mass_curve, mass_given, smallest_budget
from kvorum.kvstore.types import SeqId, blocks_for
from kvorum.workers.backends import choose_device, load_backend
from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.communicator import Alone, Communicator
from kvorum.workers.config import CPU_POOL_BYTES, EngineConfig, RankShape
from kvorum.workers.grammar import GrammarSampler, vocabulary_of
from kvorum.workers.plan import (
    BudgetQuery,
    CurveQuery,
    HeadQuery,
    HeadSlots,
    MassQuery,
    RowPlan,
    Sample,
    SampleRequest,
    StepPlan,
    StepResult,
)
from kvorum.workers.sampler import sample_batch

# Draws the next token of each row of logits [num_rows, vocab].
Sampler = Callable[[torch.Tensor, Sequence[RowPlan]], Sequence[Sample]]
Progress = Callable[[int, int], None]
# Joins the ranks that hold these shards.
Meet = Callable[[Sequence[Shard]], Communicator]


def sample_rows(logits: torch.Tensor, rows: Sequence[RowPlan]) -> Sequence[Sample]:
    """Draw each row's next token as its request says."""
    return sample_batch(logits, [row.sample for row in rows if row.sample is not None])


def row_by_row(draw: Callable[[torch.Tensor, SampleRequest, RowPlan], Sample]) -> Sampler:
    """Return a sampler that asks `draw` for each row alone."""

    def draw_rows(logits: torch.Tensor, rows: Sequence[RowPlan]) -> Sequence[Sample]:
        return [draw(each, row.sample, row) for each, row in zip(logits, rows, strict=True) if row.sample is not None]

    return draw_rows


class Worker(Generic[PoolT, StepT]):
    """One tensor-parallel rank. What it reports it reports for all ranks; samples come from rank 0 alone."""

    def __init__(
        self,
        backend: Backend[PoolT, StepT],
        pool: PoolT,
        *,
        sampler: Sampler,
        ranks: Communicator,
    ) -> None:
        self._backend = backend
        self._sampler = sampler
        self._is_replicated = len(backend.shard.replicas) > 1
        self._begin(pool, ranks)

    def _begin(self, pool: PoolT, ranks: Communicator) -> None:
        self._store = DeviceStore(self._backend, pool, share_scores=ranks.share_among_replicas)
        self._ranks = ranks

    def begin_anew(self, ranks: Communicator) -> None:
        """Forget all sequences and go on with other ranks; weights and pool stay."""
        self._begin(self._store.pool, ranks)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step: memory operations, forward pass, sampling."""
        for op in plan.ops:
            self._store.carry_out(op)
        if not plan.rows:
            return StepResult({})
        token_ids = torch.tensor([token for row in plan.rows for token in row.token_ids], dtype=torch.int64)
        hidden = self._forward(token_ids, [row.step for row in plan.rows])
        if self._is_replicated:
            self._choose_victims(plan)
        return StepResult(samples=self._sample(hidden, plan), retained=self._retained(plan))

    def _forward(self, token_ids: torch.Tensor, steps: Sequence[SequenceStep]) -> torch.Tensor:
        backend, pool = self._backend, self._store.pool
        if self._is_replicated:
            steps = [replace(step, choose_victims=False) for step in steps]
        prepared = backend.prepare(pool, token_ids, steps)
        if isinstance(self._ranks, Alone):
            return backend.forward(pool, prepared)
        return run_layers(backend, pool, prepared, add_up=self._ranks.add_up)

    def _choose_victims(self, plan: StepPlan) -> None:
        """Choose victims as a step does, by the scores of all replicas."""
        for row in plan.rows:
            step = row.step
            if step.choose_victims and step.rule is not None:
                self._store.choose_victims(row.residence, step.rule, newest=step.start + step.num_tokens - 1)

    def _sample(self, hidden: torch.Tensor, plan: StepPlan) -> dict[SeqId, Sample]:
        ends, end = [], 0
        for row in plan.rows:
            end += row.step.num_tokens
            ends.append(end - 1)
        sampled = [(last, row) for last, row in zip(ends, plan.rows, strict=True) if row.sample is not None]
        if not sampled:
            return {}
        logits = self._ranks.collect(self._backend.logits(hidden[[last for last, _ in sampled]]))
        if logits is None:
            return {}
        rows = [row for _, row in sampled]
        return {row.seq_id: drawn for row, drawn in zip(rows, self._sampler(logits, rows), strict=True)}

    def _retained(self, plan: StepPlan) -> dict[SeqId, float]:
        queries = {}
        for row in plan.rows:
            step = row.step
            if row.report_retained and step.rule is not None:
                queries[row.seq_id] = MassQuery(row.residence, step.rule, step.start + step.num_tokens)
        return dict(zip(queries, self.retained_masses(list(queries.values())), strict=True))

    def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure the retained mass of sequences."""
        if not queries:
            return []
        kept = torch.tensor([kept_mass(self._store.view(query.residence)) for query in queries], dtype=torch.float64)
        given = [mass_given(query.rule, self._backend.spec, num_tokens=query.num_tokens) for query in queries]
        return [min(1.0, mass / whole) for mass, whole in zip(self._ranks.add_up(kept).tolist(), given, strict=True)]

    def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find the smallest budgets that keep floors."""
        return [self._smallest_budget(query) for query in queries]

    def _smallest_budget(self, query: BudgetQuery) -> int:
        self._store.agree_on_scores(query.residence)
        rule = query.policy.rule(query.budget, prompt_tokens=query.prompt_tokens)
        return smallest_budget(
            self._store.view(query.residence),
            query.policy,
            floor=query.floor * mass_given(rule, self._backend.spec, num_tokens=query.num_tokens),
            budget=query.budget,
            prompt_tokens=query.prompt_tokens,
            add_up=self._ranks.add_up,
        )

    def retention_curves(self, queries: Sequence[CurveQuery]) -> list[tuple[float, ...]]:
        """Measure retained mass were sequences cut to 0, 1, 2 ... blocks."""
        if not queries:
            return []
        curves = [self._kept_mass_curve(query) for query in queries]
        whole = self._ranks.add_up(torch.cat(curves))
        given = [mass_given(query.rule, self._backend.spec, num_tokens=query.num_tokens) for query in queries]
        parts = whole.split([len(curve) for curve in curves])
        return [tuple((part / mass).clamp(max=1.0).tolist()) for part, mass in zip(parts, given, strict=True)]

    def _kept_mass_curve(self, query: CurveQuery) -> torch.Tensor:
        self._store.agree_on_scores(query.residence)
        return kept_mass_curve(self._store.view(query.residence), block_size=query.block_size).cpu()

    def view(self, residence: Residence, *, layer: int | None = None) -> SlotView:
        """Gather positions, scores and life of a sequence's slots in this rank's KV heads; layer: of that one alone."""
        view = self._store.view(residence)
        if layer is None:
            return view
        one = slice(layer, layer + 1)
        return SlotView(view.positions[one].cpu(), view.scores[one].cpu(), view.alive[one].cpu())

    def look(self, query: HeadQuery) -> HeadSlots:
        """Read one KV head's slots; for a rank that has them all."""
        return read_head(self.view(query.residence, layer=query.layer), query)


def read_head(view: SlotView, query: HeadQuery) -> HeadSlots:
    """Read what was asked for out of the view of its layer."""
    positions, scores = view.positions[0, query.kv_head], view.scores[0, query.kv_head]
    return HeadSlots(
        positions=tuple(positions.tolist()),
        scores=tuple(scores.tolist()),
        values=tuple(values_at_risk(query.rule, scores, positions, newest=query.newest).tolist()),
        alive=tuple(view.alive[0, query.kv_head].tolist()),
    )


class RankWorker(Protocol):
    """A Worker of whichever back end."""

    def begin_anew(self, ranks: Communicator) -> None:
        """Forget all sequences and go on with other ranks; weights and pool stay."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step."""

    def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure the retained mass of sequences."""

    def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find the smallest budgets that keep floors."""

    def retention_curves(self, queries: Sequence[CurveQuery]) -> list[tuple[float, ...]]:
        """Measure retained mass were sequences cut to 0, 1, 2 ... blocks."""

    def view(self, residence: Residence, *, layer: int | None = None) -> SlotView:
        """Gather positions, scores and life of a sequence's slots in this rank's KV heads; layer: of that one alone."""

    def look(self, query: HeadQuery) -> HeadSlots:
        """Read one KV head's slots."""


def load_worker(
    config: EngineConfig,
    *,
    on_progress: Progress | None = None,
    sampler: Sampler | None = None,
    rank: int = 0,
    meet: Meet = lambda _shards: Alone(),
) -> tuple[RankWorker, RankShape]:
    """Load a rank's part of a checkpoint onto this process's device and size the pool.

    on_progress: called with bytes loaded and bytes in all. sampler: draws each row's next token; by default as its
    request says. meet: joins the other ranks.

    Raises:
        CheckpointError: the model cannot be found or read.
        UnsupportedError: the back end, its types or so many ranks cannot be had.
    """
    checkpoint = resolve(config.model)
    try:
        shards = plan_shards(checkpoint.spec, config.tensor_parallel_size)
    except ValueError as error:
        raise UnsupportedError(f"tensor_parallel_size: {error}") from error
    ranks = meet(shards)
    backend = load_backend(config, checkpoint, shards[rank], on_progress=on_progress)
    sampler = sampler or GrammarSampler(lambda: vocabulary_of(checkpoint))
    # One call for each kind, so that each keeps its own types of pool and step.
    if isinstance(backend, CpuBackend):
        return _make_worker(backend, config, sampler, ranks)
    if isinstance(backend, ReferenceBackend):
        return _make_worker(backend, config, sampler, ranks)
    return _make_worker(backend, config, sampler, ranks)


def _make_worker(
    backend: Backend[PoolT, StepT], config: EngineConfig, sampler: Sampler, ranks: Communicator
) -> tuple[Worker[PoolT, StepT], RankShape]:
    spec = backend.spec
    max_model_len = min(config.max_model_len or spec.max_position, spec.max_position)
    block_bytes = backend.block_bytes(config.block_size)
    num_blocks = size_pool(
        pool_bytes=_pool_bytes(config),
        block_bytes=block_bytes,
        most_useful=config.max_num_seqs * blocks_for(max_model_len, config.block_size),
    )
    shape = agree_on_shape(
        RankShape(spec.vocab_size, max_model_len, num_blocks, config.kv_offload_bytes // block_bytes), ranks
    )
    pool = backend.allocate_pool(
        num_blocks=shape.num_blocks, block_size=config.block_size, max_num_seqs=config.max_num_seqs
    )
    return Worker(backend, pool, sampler=sampler, ranks=ranks), shape


def agree_on_shape(shape: RankShape, ranks: Communicator) -> RankShape:
    """Return what every rank can hold: each counts on its own, and each meeting of the ranks agrees anew."""
    return replace(
        shape,
        num_blocks=ranks.smallest(shape.num_blocks),
        max_offloaded_blocks=ranks.smallest(shape.max_offloaded_blocks),
    )


def size_pool(*, pool_bytes: int, block_bytes: int, most_useful: int) -> int:
    """Return how many blocks to allocate: what the memory holds, but no more than could ever be used."""
    return max(1, min(pool_bytes // block_bytes, most_useful))


def _pool_bytes(config: EngineConfig) -> int:
    device = choose_device(config.device)
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cpu":
        return CPU_POOL_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - (1.0 - config.gpu_memory_utilization) * total))
