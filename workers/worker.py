"""One rank: weights, a pool, and the forward pass over a step plan. A plain class; `group.py` puts it into an actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol

import torch

from kvorum.kernels.backend import Backend, PoolT, SlotView, StepT
from kvorum.kernels.cpu.backend import CpuBackend
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kvstore.device import DeviceStore
from kvorum.kvstore.ops import Residence
from kvorum.kvstore.retention import mass_given, retained_mass, smallest_budget
from kvorum.kvstore.types import SeqId, blocks_for
from kvorum.workers.backends import choose_device, load_backend
from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.config import CPU_POOL_BYTES, EngineConfig, RankShape
from kvorum.workers.plan import BudgetQuery, MassQuery, RowPlan, Sample, SampleRequest, StepPlan, StepResult
from kvorum.workers.sampler import sample_batch

# Draws the next token of each row of logits [num_rows, vocab].
Sampler = Callable[[torch.Tensor, Sequence[RowPlan]], Sequence[Sample]]
Progress = Callable[[int, int], None]


def sample_rows(logits: torch.Tensor, rows: Sequence[RowPlan]) -> Sequence[Sample]:
    """Draw each row's next token as its request says."""
    return sample_batch(logits, [row.sample for row in rows if row.sample is not None])


def row_by_row(draw: Callable[[torch.Tensor, SampleRequest, RowPlan], Sample]) -> Sampler:
    """Return a sampler that asks `draw` for each row alone."""

    def draw_rows(logits: torch.Tensor, rows: Sequence[RowPlan]) -> Sequence[Sample]:
        return [draw(each, row.sample, row) for each, row in zip(logits, rows, strict=True) if row.sample is not None]

    return draw_rows


class Worker(Generic[PoolT, StepT]):
    """One tensor-parallel rank."""

    def __init__(
        self,
        backend: Backend[PoolT, StepT],
        pool: PoolT,
        *,
        sampler: Sampler,
    ) -> None:
        self._backend = backend
        self._store = DeviceStore(backend, pool)
        self._sampler = sampler

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step: memory operations, forward pass, sampling."""
        for op in plan.ops:
            self._store.carry_out(op)
        if not plan.rows:
            return StepResult({})
        token_ids = torch.tensor([token for row in plan.rows for token in row.token_ids], dtype=torch.int64)
        backend, pool = self._backend, self._store.pool
        hidden = backend.forward(pool, backend.prepare(pool, token_ids, [row.step for row in plan.rows]))
        return StepResult(samples=self._sample(hidden, plan), retained=self._retained(plan))

    def _sample(self, hidden: torch.Tensor, plan: StepPlan) -> dict[SeqId, Sample]:
        ends, end = [], 0
        for row in plan.rows:
            end += row.step.num_tokens
            ends.append(end - 1)
        sampled = [(last, row) for last, row in zip(ends, plan.rows, strict=True) if row.sample is not None]
        if not sampled:
            return {}
        logits = self._backend.logits(hidden[[last for last, _ in sampled]])
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
        return [
            retained_mass(
                self._store.view(query.residence),
                mass=mass_given(query.rule, num_tokens=query.num_tokens, group_size=self._group_size),
            )
            for query in queries
        ]

    def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find the smallest budgets that keep the floors at a prompt's end."""
        return [
            smallest_budget(
                self._store.view(query.residence),
                query.policy,
                floor=query.floor,
                budget=query.budget,
                prompt_tokens=query.prompt_tokens,
                mass=mass_given(
                    query.policy.rule(query.budget, prompt_tokens=query.prompt_tokens),
                    num_tokens=query.num_tokens,
                    group_size=self._group_size,
                ),
            )
            for query in queries
        ]

    def view(self, residence: Residence) -> SlotView:
        """Gather positions, scores and life of a sequence's slots."""
        return self._store.view(residence)

    @property
    def _group_size(self) -> int:
        return self._backend.shard.num_heads // self._backend.shard.num_kv_heads


class RankWorker(Protocol):
    """A Worker of whichever back end."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step."""

    def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure the retained mass of sequences."""

    def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find the smallest budgets that keep the floors at a prompt's end."""

    def view(self, residence: Residence) -> SlotView:
        """Gather positions, scores and life of a sequence's slots."""


def load_worker(
    config: EngineConfig, *, on_progress: Progress | None = None, sampler: Sampler = sample_rows
) -> tuple[RankWorker, RankShape]:
    """Load a checkpoint onto this process's device and size the pool.

    on_progress: called with bytes loaded and bytes in all. sampler: draws each row's next token.

    Raises:
        CheckpointError: the model cannot be found or read.
        UnsupportedError: the back end, or its types, cannot be had here.
    """
    checkpoint = resolve(config.model)
    backend = load_backend(config, checkpoint, on_progress=on_progress)
    # One call for each kind, so that each keeps its own types of pool and step.
    if isinstance(backend, CpuBackend):
        return _make_worker(backend, config, sampler)
    if isinstance(backend, ReferenceBackend):
        return _make_worker(backend, config, sampler)
    return _make_worker(backend, config, sampler)


def _make_worker(
    backend: Backend[PoolT, StepT], config: EngineConfig, sampler: Sampler
) -> tuple[Worker[PoolT, StepT], RankShape]:
    spec = backend.spec
    max_model_len = min(config.max_model_len or spec.max_position, spec.max_position)
    num_blocks = size_pool(
        pool_bytes=_pool_bytes(config),
        block_bytes=backend.block_bytes(config.block_size),
        most_useful=config.max_num_seqs * blocks_for(max_model_len, config.block_size),
    )
    pool = backend.allocate_pool(num_blocks=num_blocks, block_size=config.block_size, max_num_seqs=config.max_num_seqs)
    return Worker(backend, pool, sampler=sampler), RankShape(spec.vocab_size, max_model_len, num_blocks)


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
