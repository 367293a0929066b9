"""A rank in this process, for tools and tests that look inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic

from kvorum.kernels.backend import PoolT, StepT
from kvorum.workers.plan import BudgetQuery, MassQuery, StepPlan, StepResult
from kvorum.workers.worker import Worker


class LocalExecutor(Generic[PoolT, StepT]):
    """Executor over one rank in a thread of this process."""

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
