"""What carries out step plans: the seam between the engine's loop and its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol

from kvorum.kernels.backend import PoolT, StepT
from kvorum.workers.plan import BudgetQuery, MassQuery, StepPlan, StepResult
from kvorum.workers.worker import Worker


class Executor(Protocol):
    """All ranks of one engine. Calls come one at a time."""

    async def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step on every rank; raises EngineLostError when one is dead."""

    async def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure the retained mass of sequences between two steps."""

    async def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find the budgets that keep a floor of retained mass, between two steps."""

    async def check_health(self) -> None:
        """Raise EngineLostError when a rank is dead."""

    async def stop(self) -> None:
        """End the ranks."""


class LocalExecutor(Generic[PoolT, StepT]):
    """One rank in a thread of this process: for tools and tests that look inside."""

    def __init__(self, worker: Worker[PoolT, StepT]) -> None:
        self.worker = worker

    async def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step."""
        return await asyncio.to_thread(self.worker.execute, plan)

    async def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure retained masses."""
        return await asyncio.to_thread(self.worker.retained_masses, queries)

    async def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find budgets."""
        return await asyncio.to_thread(self.worker.smallest_budgets, queries)

    async def check_health(self) -> None:
        """A thread of this process lives as long as its caller."""

    async def stop(self) -> None:
        """Nothing outlives the process."""
