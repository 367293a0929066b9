"""How the ranks of an engine keep in step: rank 0 hands each command out before it carries it out itself.

What the others need of a command travels as one tensor of whole numbers (flat.py). Sampling happens on rank 0 alone, so
what it takes stays there. While there is nothing to do rank 0 hands out a KeepAlive, by which the others know that it
is still there: a rank that hears nothing for COLLECTIVE_TIMEOUT_S gives up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvorum.kernels.backend import SlotView
from kvorum.kernels.plan import SequenceStep
from kvorum.kvstore.ops import MemoryOp, Residence
from kvorum.kvstore.types import SeqId
from kvorum.workers.communicator import RankGroup
from kvorum.workers.flat import FlatCodec
from kvorum.workers.plan import (
    BudgetQuery,
    CurveQuery,
    HeadQuery,
    HeadSlots,
    MassQuery,
    RowPlan,
    SampleRequest,
    StepPlan,
    StepResult,
)
from kvorum.workers.request import SamplingParams
from kvorum.workers.worker import RankWorker, read_head

KEEP_ALIVE_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """Nothing to do."""


@dataclass(frozen=True, slots=True)
class RowCommand:
    """A RowPlan without what only sampling needs."""

    seq_id: SeqId
    token_ids: tuple[int, ...]
    step: SequenceStep
    is_sampled: bool
    report_retained: bool


@dataclass(frozen=True, slots=True)
class StepCommand:
    """Carry out a step."""

    ops: tuple[MemoryOp, ...]
    rows: tuple[RowCommand, ...]


@dataclass(frozen=True, slots=True)
class MassCommand:
    """Measure retained masses."""

    queries: tuple[MassQuery, ...]


@dataclass(frozen=True, slots=True)
class BudgetCommand:
    """Find the budgets that keep floors."""

    queries: tuple[BudgetQuery, ...]


@dataclass(frozen=True, slots=True)
class CurveCommand:
    """Measure retention curves."""

    queries: tuple[CurveQuery, ...]


@dataclass(frozen=True, slots=True)
class ViewCommand:
    """Look at a sequence's slots, in one layer or in all."""

    residence: Residence
    layer: int | None


Command = KeepAlive | StepCommand | MassCommand | BudgetCommand | CurveCommand | ViewCommand

COMMANDS: Final[FlatCodec[Command]] = FlatCodec(Command)
_DRAWN_ON_RANK_0 = SampleRequest(SamplingParams(max_tokens=1), index=0)


class Leader:
    """What the engine calls on rank 0, which takes the others along."""

    def __init__(self, worker: RankWorker, group: RankGroup) -> None:
        self._worker = worker
        self._group = group

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step on all ranks."""
        rows = (
            RowCommand(row.seq_id, row.token_ids, row.step, row.sample is not None, row.report_retained)
            for row in plan.rows
        )
        self._hand_out(StepCommand(plan.ops, tuple(rows)))
        return self._worker.execute(plan)

    def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure the retained mass of sequences over all ranks' heads."""
        self._hand_out(MassCommand(tuple(queries)))
        return self._worker.retained_masses(queries)

    def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find the smallest budgets that keep the floors over all ranks' heads."""
        self._hand_out(BudgetCommand(tuple(queries)))
        return self._worker.smallest_budgets(queries)

    def retention_curves(self, queries: Sequence[CurveQuery]) -> list[tuple[float, ...]]:
        """Measure the retention curves of sequences over all ranks' heads."""
        self._hand_out(CurveCommand(tuple(queries)))
        return self._worker.retention_curves(queries)

    def view(self, residence: Residence, *, layer: int | None = None) -> SlotView:
        """Gather positions, scores and life of a sequence's slots in all ranks' KV heads, in one layer or in all."""
        self._hand_out(ViewCommand(residence, layer))
        view = self._group.whole_view(self._worker.view(residence, layer=layer))
        assert view is not None, "this is rank 0"
        return view

    def look(self, query: HeadQuery) -> HeadSlots:
        """Read one KV head's slots, whichever ranks have it."""
        return read_head(self.view(query.residence, layer=query.layer), query)

    def keep_alive(self) -> None:
        """Let the other ranks know that this one is there."""
        self._hand_out(KeepAlive())

    def _hand_out(self, command: Command) -> None:
        self._group.hand_out(COMMANDS.write(command))


def follow(worker: RankWorker, group: RankGroup) -> None:
    """Do what rank 0 hands out until it is gone: never returns, and raises what the group or the worker raised."""
    while True:
        match COMMANDS.read(group.take()):
            case StepCommand(ops, rows):
                worker.execute(StepPlan(ops, tuple(map(_row_plan, rows))))
            case MassCommand(queries):
                worker.retained_masses(queries)
            case BudgetCommand(queries):
                worker.smallest_budgets(queries)
            case CurveCommand(queries):
                worker.retention_curves(queries)
            case ViewCommand(residence, layer):
                group.whole_view(worker.view(residence, layer=layer))


def _row_plan(row: RowCommand) -> RowPlan:
    sample = _DRAWN_ON_RANK_0 if row.is_sampled else None
    return RowPlan(row.seq_id, row.token_ids, row.step, sample, row.report_retained)
