"""The engine: the loop that turns requests into steps and steps into streams of tokens.

A request's way:
 1. A router's session submits it. What can never be served is refused here, as is what comes when the queue is full.
 2. The scheduler admits it into a step, with the blocks that the KV store found for it.
 3. The executor carries the step out on every rank.
 4. The scheduler takes the samples in; each session gets everything the step brought for it as one batch.
 5. At its end what was kept is measured, its blocks are freed, and the last output carries the receipt.

The loop is the only writer of the scheduler. It runs in the event loop and only waits for executors there: a step never
blocks it. Ends that clients ask for are taken in between two steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvorum.kvstore.errors import CapacityError, EngineLostError
from kvorum.kvstore.pricing import DEFAULT_RULE, Rule, parse_rule
from kvorum.kvstore.store import KVStore
from kvorum.workers.composer import SchedulerLimits
from kvorum.workers.config import EngineConfig, RankShape
from kvorum.workers.executor import Executor
from kvorum.workers.governance import Directive, EngineReport, LeaseUse
from kvorum.workers.looking import SequenceLook, SequenceRow, head_query, look_at, row_of
from kvorum.workers.plan import StepPlan
from kvorum.workers.request import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestId,
    RequestOutput,
)
from kvorum.workers.scheduler import Scheduler

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine works. max_num_batched_tokens: in a step. max_offloaded_blocks: blocks' worth of host memory.

    rule: by which elastic sequences share the pool.
    """

    max_num_batched_tokens: int
    enable_prefix_caching: bool
    max_offloaded_blocks: int = 0
    rule: Rule = DEFAULT_RULE


def build_engine(config: EngineConfig, shape: RankShape, executor: Executor, *, engine_id: str) -> Engine:
    """Return the engine over loaded ranks; `start` it inside an event loop."""
    info = EngineInfo(
        engine_id=engine_id,
        model_name=config.model_name,
        max_model_len=shape.max_model_len,
        vocab_size=shape.vocab_size,
        num_blocks=shape.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_waiting=config.max_num_waiting,
        tensor_parallel_size=config.tensor_parallel_size,
    )
    return Engine(
        info,
        executor,
        EngineOptions(
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            max_offloaded_blocks=shape.max_offloaded_blocks,
            rule=parse_rule(config.allocation),
        ),
    )


class Engine:
    """One engine: a scheduler, a KV store and an executor.

    clock: monotonic seconds.
    """

    def __init__(
        self,
        info: EngineInfo,
        executor: Executor,
        options: EngineOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self.store = KVStore(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            enable_prefix_caching=options.enable_prefix_caching,
            max_offloaded_blocks=options.max_offloaded_blocks,
        )
        self.scheduler = Scheduler(
            self.store,
            SchedulerLimits(
                max_model_len=info.max_model_len,
                vocab_size=info.vocab_size,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
            ),
            rule=options.rule,
        )
        self._options = options
        self._executor = executor
        self._clock = clock
        self._sessions: dict[RequestId, EngineSession] = {}
        self._ends: list[tuple[RequestId, FinishReason]] = []
        self._looks: list[tuple[RequestId, int, int, asyncio.Future[SequenceLook | None]]] = []
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Start the loop."""
        self._loop = asyncio.create_task(self._run(), name="engine loop")

    async def halt(self) -> None:
        """End the loop; running requests end with ERROR."""
        self._failure = self._failure or EngineLostError("the engine was stopped")
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
            self._loop = None
        self._end_all(FinishReason.ERROR, error="the engine was stopped")

    async def stop(self) -> None:
        """End the loop, then the ranks."""
        await self.halt()
        await self._executor.stop()

    async def rebuild(self) -> Engine:
        """Return a fresh engine on the ranks that are left, with new ones in place of the lost; this one is over.

        Raises EngineLostError, or what a rank raised while it loaded, when that cannot be.
        """
        await self.halt()
        shape = await self._executor.recover()
        return Engine(
            replace(self.info, num_blocks=shape.num_blocks),
            self._executor,
            replace(self._options, max_offloaded_blocks=shape.max_offloaded_blocks),
            clock=self._clock,
        )

    async def check_health(self) -> None:
        """Raise EngineLostError when the loop has failed or a rank is dead."""
        if self._failure is not None:
            raise EngineLostError(f"the engine failed: {self._failure}")
        await self._executor.check_health()

    def open_session(self) -> EngineSession:
        """Return a new session, for one router."""
        return EngineSession(self)

    def stats(self) -> EngineStats:
        """Return a consistent look at the engine."""
        scheduler, store = self.scheduler, self.store
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            blocks_free=store.num_free,
            blocks_held=store.num_held,
            blocks_cached=store.num_cached,
            steps_total=scheduler.totals.steps,
            prompt_tokens_total=scheduler.totals.prompt_tokens,
            generation_tokens_total=scheduler.totals.generation_tokens,
            prefix_cache_queries_total=store.prefix_queries_tokens,
            prefix_cache_hits_total=store.prefix_hits_tokens,
            preemptions_total=scheduler.num_preemptions,
            evicted_tokens_total=dict(scheduler.evicted_tokens),
        )

    # What the cache manager is told, and says.

    def report(self) -> EngineReport:
        """Return a consistent look at the pool and who uses it."""
        return self.scheduler.report()

    def leases(self) -> tuple[LeaseUse, ...]:
        """Return the leases that have sequences here."""
        return self.scheduler.leases.current()

    def take_lease_changes(self) -> tuple[tuple[LeaseUse, ...], tuple[str, ...]]:
        """Return the leases that started, and the ids of those that ended, since the last call."""
        return self.scheduler.leases.take_changes()

    def obey(self, directive: Directive) -> None:
        """Take a directive, which is carried out before the next step, or at once when there is none."""
        self.scheduler.obey(directive)
        self._wake.set()

    @property
    def directive_done(self) -> int:
        """Number of the last directive that was carried out, 0 before the first."""
        return self.scheduler.directive_done

    # What operators look at.

    def sequences(self) -> tuple[SequenceRow, ...]:
        """Return the sequences that are here, at a glance."""
        return tuple(map(row_of, self.scheduler.sequences()))

    async def look(self, request_id: RequestId, *, layer: int, kv_head: int) -> SequenceLook | None:
        """Look at a sequence between two steps; None when it is not here any more.

        layer, kv_head: of the model, not checked. Raises EngineLostError.
        """
        if self._failure is not None:
            raise EngineLostError(f"the engine failed: {self._failure}")
        answer: asyncio.Future[SequenceLook | None] = asyncio.get_running_loop().create_future()
        self._looks.append((request_id, layer, kv_head, answer))
        self._wake.set()
        return await answer

    # What sessions call.

    def submit(self, request: EngineRequest, session: EngineSession) -> None:
        """Queue a request; raises InvalidRequestError, CapacityError or EngineLostError."""
        if self._failure is not None:
            raise EngineLostError("the engine has failed and is being replaced")
        self.scheduler.check(request)
        limit = self.info.max_num_seqs + self.info.max_num_waiting
        if self.scheduler.num_running + self.scheduler.num_waiting >= limit:
            raise CapacityError(
                f"the engine is full: {limit} sequences run or wait already", retry_after_s=RETRY_AFTER_S
            )
        self.scheduler.add(request, now_s=self._clock())
        self._sessions[request.request_id] = session
        self._wake.set()

    def end(self, request_id: RequestId, reason: FinishReason) -> None:
        """End a request between this step and the next."""
        self._ends.append((request_id, reason))
        self._wake.set()

    # The loop.

    async def _run(self) -> None:
        try:
            while True:
                if not (self.scheduler.has_work or self.scheduler.has_orders or self._ends or self._looks):
                    self._wake.clear()
                    await self._wake.wait()
                await self._step()
        except asyncio.CancelledError:
            raise
        except BaseException as failure:
            logger.exception("engine %s failed", self.info.engine_id)
            self._failure = failure
            self._end_all(FinishReason.ERROR, error="the engine failed while it served the request")
            raise

    async def _step(self) -> None:
        """Take ends in, carry out one step, send what it brought."""
        for request_id, reason in self._ends:
            self.scheduler.end(request_id, reason)
        self._ends = []
        self._send(await self._release_ended())
        plan = self.scheduler.schedule(now_s=self._clock())
        outputs: list[RequestOutput] = []
        if plan is not None:
            result = await self._executor.execute(plan)
            outputs = self.scheduler.apply(plan, result)
        has_measured = await self._measure()
        await self._answer_looks()
        released = await self._release_ended()
        self._send(outputs + released)
        assert plan or released or has_measured or not self.scheduler.has_work, "work is waiting and nothing runs"

    async def _measure(self) -> bool:
        """Have measured what the next step depends on; returns whether a sequence waits for a budget."""
        budget_queries = self.scheduler.budget_queries()
        if budget_queries:
            budgets = await self._executor.smallest_budgets(list(budget_queries.values()))
            self.scheduler.set_budgets(dict(zip(budget_queries, budgets, strict=True)))
        curve_queries = self.scheduler.curve_queries()
        if curve_queries:
            curves = await self._executor.retention_curves(list(curve_queries.values()))
            self.scheduler.set_curves(dict(zip(curve_queries, curves, strict=True)))
        return bool(budget_queries)

    async def _answer_looks(self) -> None:
        # Those that came meanwhile are answered after the next step. One that a rank fails in stays, to be told so.
        for _ in range(len(self._looks)):
            request_id, layer, kv_head, answer = self._looks[0]
            sequence = None if answer.done() else self.scheduler.find(request_id)  # whoever asked may have gone
            look = None
            if sequence is not None:
                query, slots = head_query(sequence, layer=layer, kv_head=kv_head), None
                if query is not None:
                    await self._execute_ops()
                    slots = await self._executor.look(query)
                look = look_at(sequence, slots)
            if not answer.done():
                answer.set_result(look)
            del self._looks[0]

    async def _execute_ops(self) -> None:
        """Carry out memory operations that wait for the next step: without them what a rank reads is not yet true."""
        await self._executor.execute(StepPlan(self.store.take_ops(), ()))

    async def _release_ended(self) -> list[RequestOutput]:
        queries = self.scheduler.mass_queries()
        masses: list[float] = []
        if queries:
            # A victim that was spared by the last step must be alive when the kept mass is measured.
            await self._execute_ops()
            masses = await self._executor.retained_masses(list(queries.values()))
        return self.scheduler.release(dict(zip(queries, masses, strict=True)), now_s=self._clock())

    def _send(self, outputs: list[RequestOutput]) -> None:
        batches: dict[EngineSession, list[RequestOutput]] = defaultdict(list)
        for output in outputs:
            batches[self._sessions[output.request_id]].append(output)
            if output.finish_reason is not None:
                del self._sessions[output.request_id]
        for session, batch in batches.items():
            session.deliver(batch)

    def _end_all(self, reason: FinishReason, *, error: str | None) -> None:
        for *_, answer in self._looks:
            if not answer.done():
                answer.set_exception(EngineLostError(error or "the engine was stopped"))
        self._looks = []
        self._send([RequestOutput(request_id, finish_reason=reason, error=error) for request_id in self._sessions])


class EngineSession:
    """One router's requests on an engine; everything a step brought for it comes as one batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._batches: asyncio.Queue[list[RequestOutput]] = asyncio.Queue()
        self._open: set[RequestId] = set()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; raises InvalidRequestError, CapacityError or EngineLostError."""
        self._engine.submit(request, self)
        self._open.add(request.request_id)

    def abort(self, request_id: RequestId) -> None:
        """End a request whose client went away; its last output says ABORT."""
        self._end(request_id, FinishReason.ABORT)

    def finish(self, request_id: RequestId) -> None:
        """End a request that reached a stop string; its last output says STOP."""
        self._end(request_id, FinishReason.STOP)

    def _end(self, request_id: RequestId, reason: FinishReason) -> None:
        if request_id in self._open:
            self._engine.end(request_id, reason)

    async def outputs(self) -> list[RequestOutput]:
        """Wait for the next batch."""
        return await self._batches.get()

    def deliver(self, batch: list[RequestOutput]) -> None:
        """Take what a step brought for this session."""
        self._open.difference_update(output.request_id for output in batch if output.finish_reason is not None)
        self._batches.put_nowait(batch)

    def close(self) -> None:
        """End all requests of this session."""
        for request_id in tuple(self._open):
            self.abort(request_id)
