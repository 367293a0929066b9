"""What carries out step plans: the seam between the engine's loop and its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvorum.workers.config import RankShape
from kvorum.workers.plan import BudgetQuery, CurveQuery, HeadQuery, HeadSlots, MassQuery, StepPlan, StepResult


class Executor(Protocol):
    """All ranks of one engine. Calls come one at a time."""

    async def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step on every rank; raises EngineLostError when one is dead."""

    async def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure the retained mass of sequences between two steps."""

    async def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find the budgets that keep a floor of retained mass, between two steps."""

    async def retention_curves(self, queries: Sequence[CurveQuery]) -> list[tuple[float, ...]]:
        """Measure retained mass were sequences cut to 0, 1, 2 ... blocks, between two steps."""

    async def look(self, query: HeadQuery) -> HeadSlots:
        """Read a sequence's slots in one KV head, between two steps."""

    async def check_health(self) -> None:
        """Raise EngineLostError when a rank is dead."""

    async def recover(self) -> RankShape:
        """Put new ranks in place of lost ones, and have all of them forget every sequence.

        Raises EngineLostError, or what a rank raised while it loaded, when that cannot be.
        """

    async def stop(self) -> None:
        """End the ranks."""
