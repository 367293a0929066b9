"""An engine without a model, whose tokens can be worked out by hand: it repeats the prompt.

Token i of the answer is prompt[i % len(prompt)], with log-probability 0. Scheduler, block accounting and prefix cache
are the real ones, and the tokens are read back from the slots that the plan names, so a block that is freed, shared or
moved wrongly changes the answer. Eviction keeps the newest tokens; a token that was evicted is answered by the oldest
that is left.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from kvorum.kernels.plan import SequenceStep, ShrinkRequest
from kvorum.kvstore import ops
from kvorum.kvstore.errors import EngineLostError
from kvorum.kvstore.types import SeqId
from kvorum.workers.config import RankShape
from kvorum.workers.engine import Engine, EngineOptions
from kvorum.workers.plan import (
    BudgetQuery,
    CurveQuery,
    HeadQuery,
    HeadSlots,
    MassQuery,
    RowPlan,
    Sample,
    StepPlan,
    StepResult,
)
from kvorum.workers.request import EngineInfo, TokenLogprobs

# One token in a slot: (position, token id).
Slot = tuple[int, int]


class FakeExecutor:
    """Executor over slots that hold token ids instead of keys and values.

    step_delay_s: how long a step takes.
    """

    def __init__(self, *, block_size: int, step_delay_s: float = 0.0) -> None:
        self._block_size = block_size
        self._step_delay_s = step_delay_s
        self._slots: dict[tuple[int, int], Slot] = {}
        self._swapped: dict[SeqId, list[Slot]] = {}
        self._pending_rows: set[int] = set()

    async def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step."""
        await asyncio.sleep(self._step_delay_s)
        return self.carry_out(plan)

    def carry_out(self, plan: StepPlan) -> StepResult:
        """Carry out a step at once."""
        for op in plan.ops:
            self._move(op)
        for row in plan.rows:
            self._write(row)
        return StepResult(
            samples={row.seq_id: self._sample(row) for row in plan.rows if row.sample is not None},
            retained={row.seq_id: self._retained(row.step) for row in plan.rows if row.report_retained},
        )

    def _move(self, op: ops.MemoryOp) -> None:
        match op:
            case ops.CopyBlocks(sources, targets):
                for source, target in zip(sources, targets, strict=True):
                    self._put([target], self._get([source], self._block_size))
            case ShrinkRequest():
                self._put(op.targets, sorted(self._get(op.sources, op.num_slots))[-op.keep :])
                self._pending_rows.discard(op.row)
            case ops.SwapOut(seq_id, row, block_ids, num_slots):
                slots = self._get(block_ids, num_slots)
                if row in self._pending_rows:
                    slots.remove(min(slots))
                self._swapped[seq_id] = slots
            case ops.SwapIn(seq_id, block_ids):
                self._put(block_ids, self._swapped.pop(seq_id))
            case ops.DropSwap(seq_id):
                del self._swapped[seq_id]
            case ops.ClearVictims(row):
                self._pending_rows.discard(row)
            case ops.SaveScores() | ops.LoadScores() | ops.DropScores():
                pass

    def read_block(self, block_id: int) -> list[Slot]:
        """Return what a full block holds."""
        return self._get([block_id], self._block_size)

    def _get(self, block_ids: Sequence[int], num_slots: int) -> list[Slot]:
        places = [divmod(slot, self._block_size) for slot in range(num_slots)]
        return [self._slots[block_ids[index], offset] for index, offset in places]

    def _put(self, block_ids: Sequence[int], slots: Sequence[Slot], *, first: int = 0) -> None:
        for place, slot in enumerate(slots, start=first):
            index, offset = divmod(place, self._block_size)
            self._slots[block_ids[index], offset] = slot

    def _write(self, row: RowPlan) -> None:
        step = row.step
        new = list(enumerate(row.token_ids, start=step.start))
        first = step.num_slots
        if step.replace:
            held = self._get(step.block_table, step.num_slots)
            first = held.index(min(held))
        self._put(step.block_table, new, first=first)
        if step.choose_victims:
            self._pending_rows.add(step.row)

    def _held(self, step: SequenceStep) -> list[Slot]:
        return self._get(step.block_table, step.num_slots_after)

    def _sample(self, row: RowPlan) -> Sample:
        assert row.sample is not None
        prompt_tokens = row.step.start + row.step.num_tokens - row.sample.index
        held = sorted(self._held(row.step))
        token_id = dict(held).get(row.sample.index % prompt_tokens, held[0][1])
        if row.sample.params.logprobs is None:
            return Sample(token_id)
        return Sample(token_id, TokenLogprobs(0.0, ((token_id, 0.0),) if row.sample.params.logprobs else ()))

    def _retained(self, step: SequenceStep) -> float:
        return (len(self._held(step)) - 1) / (step.start + step.num_tokens)

    async def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Every token has the same mass here."""
        return [self._alive(query.residence) / query.num_tokens for query in queries]

    def _alive(self, residence: ops.Residence) -> int:
        return residence.num_slots - int(residence.row in self._pending_rows and residence.seq_id not in self._swapped)

    async def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Every token has the same mass here."""
        return [max(query.budget, -int(-query.floor * query.num_tokens // 1)) for query in queries]

    async def retention_curves(self, queries: Sequence[CurveQuery]) -> list[tuple[float, ...]]:
        """Measure retained mass were sequences cut to 0, 1, 2 ... blocks."""
        return [self.curve(query) for query in queries]

    def curve(self, query: CurveQuery) -> tuple[float, ...]:
        """Every token has the same mass here."""
        alive = self._alive(query.residence)
        kept = range(0, alive + query.block_size, query.block_size)
        return tuple(min(slots, alive) / query.num_tokens for slots in kept)

    async def look(self, query: HeadQuery) -> HeadSlots:
        """Every token has the same score here, so the oldest goes first."""
        residence, rule = query.residence, query.rule
        swapped = self._swapped.get(residence.seq_id)
        slots = self._get(residence.block_ids, residence.num_slots) if swapped is None else swapped
        positions = tuple(position for position, _ in slots)
        first, last = rule.sink_tokens, query.newest - rule.recent_tokens
        victim = min(positions) if self._alive(residence) < residence.num_slots else None
        return HeadSlots(
            positions=positions,
            scores=(1.0,) * len(slots),
            values=tuple(1.0 if first <= position <= last else math.inf for position in positions),
            alive=tuple(position != victim for position in positions),
        )

    async def check_health(self) -> None:
        """A fake never dies."""

    async def recover(self) -> RankShape:
        """Nothing here is ever lost."""
        raise EngineLostError("this executor's ranks cannot be replaced")

    async def stop(self) -> None:
        """Nothing to end."""


def build_fake_engine(info: EngineInfo, *, max_num_batched_tokens: int, step_delay_s: float = 0.0) -> Engine:
    """Return an engine that repeats its prompts; `start` it inside an event loop."""
    return Engine(
        info,
        FakeExecutor(block_size=info.block_size, step_delay_s=step_delay_s),
        EngineOptions(max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=True),
    )
