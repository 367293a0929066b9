"""A rank in this process, for tools and tests that look inside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from kvorum.kvstore.errors import EngineLostError
from kvorum.workers.config import RankShape
from kvorum.workers.plan import BudgetQuery, CurveQuery, HeadQuery, HeadSlots, MassQuery, StepPlan, StepResult
from kvorum.workers.worker import RankWorker

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class LocalExecutor:
    """Executor over one rank in one thread of this process; always the same, since OpenMP keeps a team for each."""

    def __init__(self, worker: RankWorker) -> None:
        self.worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank")

    async def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step."""
        return await self._run(self.worker.execute, plan)

    async def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure retained masses."""
        return await self._run(self.worker.retained_masses, queries)

    async def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find budgets."""
        return await self._run(self.worker.smallest_budgets, queries)

    async def retention_curves(self, queries: Sequence[CurveQuery]) -> list[tuple[float, ...]]:
        """Measure retention curves."""
        return await self._run(self.worker.retention_curves, queries)

    async def look(self, query: HeadQuery) -> HeadSlots:
        """Read one KV head's slots."""
        return await self._run(self.worker.look, query)

    async def check_health(self) -> None:
        """A thread of this process lives as long as its caller."""

    async def recover(self) -> RankShape:
        """Nothing here is ever lost."""
        raise EngineLostError("this executor's ranks cannot be replaced")

    async def stop(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    async def _run(self, call: Callable[P, ResultT], *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))
