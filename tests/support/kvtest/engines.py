"""Engines in this process, and what they did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

from kvorum.kernels.backend import Backend, PoolT, StepT
from kvorum.kvstore.pricing import parse_rule
from kvorum.kvstore.types import SeqId
from kvorum.workers.communicator import Alone
from kvorum.workers.engine import Engine, EngineOptions
from kvorum.workers.local import LocalExecutor
from kvorum.workers.plan import RowPlan, Sample, SampleRequest, StepPlan, StepResult
from kvorum.workers.request import EngineInfo, EngineRequest, FinishReason, KVParams, Receipt, RequestId, SamplingParams
from kvorum.workers.sampler import sample
from kvorum.workers.worker import Worker, row_by_row

Kept = list[list[list[int]]]
FULL = KVParams()


class PoisonablePool(Protocol):
    """What the pools of all back ends have."""

    @property
    def kv(self) -> torch.Tensor: ...
    @property
    def scores(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...


PoisonT = TypeVar("PoisonT", bound=PoisonablePool)


@dataclass
class Answer:
    """All that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None


class Recorder(LocalExecutor):
    """Executor that notes logits, kept positions after each sampled step, and the plans.

    Sequences are noted under seq_id, which counts from 0 in order of submission.
    """

    def __init__(self, backend: Backend[PoolT, StepT], pool: PoolT, *, note_kept: bool = True) -> None:
        super().__init__(Worker(backend, pool, sampler=row_by_row(self._note_logits), ranks=Alone()))
        self.logits: dict[SeqId, list[torch.Tensor]] = {}
        self.kept: dict[SeqId, list[Kept]] = {}
        self.plans: list[StepPlan] = []
        self._note_kept = note_kept

    def _note_logits(self, logits: torch.Tensor, request: SampleRequest, row: RowPlan) -> Sample:
        self.logits.setdefault(row.seq_id, []).append(logits.clone())
        return sample(logits, request)

    async def execute(self, plan: StepPlan) -> StepResult:
        result = await super().execute(plan)
        self.plans.append(plan)
        for row in plan.rows if self._note_kept else ():
            if row.sample is not None:
                self.kept.setdefault(row.seq_id, []).append(self._kept(row))
        return result

    def _kept(self, row: RowPlan) -> Kept:
        view = self.worker.view(row.residence)
        layers, heads, _ = view.positions.shape
        return [
            [sorted(view.positions[layer, head][view.alive[layer, head]].tolist()) for head in range(heads)]
            for layer in range(layers)
        ]


def request(
    name: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    kv: KVParams = FULL,
    sampling: SamplingParams | None = None,
    priority: int = 0,
    timeout_s: float | None = None,
    cache_salt: str = "",
) -> EngineRequest:
    """Return a request, greedy and without end-of-sequence unless sampling says otherwise."""
    return EngineRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0),
        kv=kv,
        priority=priority,
        timeout_s=timeout_s,
        cache_salt=cache_salt,
    )


async def collect(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, Answer]:
    """Submit all at once and wait for all; audit after every batch."""
    session = engine.open_session()
    answers: dict[str, Answer] = {item.request_id: Answer() for item in requests}
    for item in requests:
        session.submit(item)
    while any(answer.finish_reason is None for answer in answers.values()):
        for output in await session.outputs():
            answer = answers[output.request_id]
            answer.token_ids += output.token_ids
            answer.logprobs += [entry.logprob for entry in output.logprobs]
            answer.finish_reason = output.finish_reason or answer.finish_reason
            answer.receipt = output.receipt or answer.receipt
        engine.scheduler.audit()
    return answers


@dataclass
class Rig:
    """A running engine with its recorder."""

    engine: Engine
    recorder: Recorder

    async def run(self, requests: Sequence[EngineRequest]) -> dict[str, Answer]:
        """Submit all at once, wait for all, audit after every batch."""
        return await collect(self.engine, requests)


@asynccontextmanager
async def rig(
    backend: Backend[PoisonT, StepT],
    *,
    num_blocks: int,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 2048,
    enable_prefix_caching: bool = False,
    note_kept: bool = True,
    max_offloaded_blocks: int = 0,
    allocation: str = "same_cap",
) -> AsyncIterator[Rig]:
    """Run an engine over a back end; its memory is poisoned first."""
    pool = backend.allocate_pool(num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs)
    pool.kv.fill_(torch.nan)
    pool.scores.fill_(torch.nan)
    pool.positions.fill_(10**9)
    info = EngineInfo(
        engine_id="test",
        model_name="test",
        max_model_len=backend.spec.max_position,
        vocab_size=backend.spec.vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_waiting=64,
    )
    recorder = Recorder(backend, pool, note_kept=note_kept)
    engine = Engine(
        info,
        recorder,
        EngineOptions(
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            max_offloaded_blocks=max_offloaded_blocks,
            rule=parse_rule(allocation),
        ),
    )
    await engine.start()
    try:
        yield Rig(engine, recorder)
    finally:
        await engine.stop()
