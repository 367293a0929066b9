"""An engine's ranks as Ray actors in one placement group, and the executor that drives them through rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvorum.kernels.backend import SlotView
from kvorum.kvstore.errors import EngineLostError, KvorumError
from kvorum.kvstore.ops import Residence
from kvorum.workers.channel import ChannelClient
from kvorum.workers.communicator import COLLECTIVE_TIMEOUT_S
from kvorum.workers.config import COMPUTE_ENVIRONMENT, EngineConfig, RankShape
from kvorum.workers.engine import Engine, build_engine
from kvorum.workers.plan import BudgetQuery, CurveQuery, HeadQuery, HeadSlots, MassQuery, StepPlan, StepResult
from kvorum.workers.rank_actor import RankActor

# A rank that does not answer for so long is stuck; with the time between two checks it is known within 5 s.
HEALTH_TIMEOUT_S = 4.0
# While it loads, a rank that reads a large tensor from a slow disk answers late.
LOADING_TIMEOUT_S = 20.0
# Until a rank's process has started, which takes as long as its node is busy.
START_TIMEOUT_S = 120.0
PLACEMENT_TIMEOUT_S = 60.0
# In which a rank that lives answers, and one that has lost a peer has noticed it.
LIFE_TIMEOUT_S = 1.5
RETIRE_TIMEOUT_S = COLLECTIVE_TIMEOUT_S + 2.0
PROGRESS_PERIOD_S = 0.2

Progress = Callable[[int, int], None]
ResultT = TypeVar("ResultT")


class RayExecutor:
    """Executor over rank actors and their placement group: bundle i is rank i's."""

    def __init__(self, group: PlacementGroup, config: EngineConfig, *, num_cpus: float, num_gpus: int) -> None:
        self._group = group
        self._config = config
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._ranks = [self._start_rank(rank) for rank in range(config.tensor_parallel_size)]
        self._channel: ChannelClient | None = None

    def _start_rank(self, rank: int) -> Any:  # noqa: ANN401  # Ray's handles have no usable type
        return RankActor.options(
            num_cpus=self._num_cpus,  # Ray has OpenMP use as many threads
            num_gpus=self._num_gpus,
            runtime_env={"env_vars": COMPUTE_ENVIRONMENT},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
        ).remote(self._config, rank)

    async def load(self, on_progress: Progress) -> RankShape:
        """Load the model on every rank; on_progress hears how far rank 0 is.

        Raises:
            CheckpointError: the model cannot be read.
            UnsupportedError: it cannot be computed as asked.
            EngineLostError: a rank died or is stuck.
        """
        await self._ping_all(START_TIMEOUT_S)
        meeting = None
        if len(self._ranks) > 1:
            meeting = await _in_time(_alive(0, self._ranks[0].open_meeting.remote()))
        loading = asyncio.gather(*(_alive(rank, it.load.remote(meeting)) for rank, it in enumerate(self._ranks)))
        try:
            while not (await asyncio.wait({loading}, timeout=PROGRESS_PERIOD_S))[0]:
                await self._ping_all(LOADING_TIMEOUT_S)
                on_progress(*await _alive(0, self._ranks[0].progress.remote()))
            shapes: list[RankShape] = loading.result()
        finally:
            loading.cancel()
        serving = asyncio.gather(*(_alive(rank, it.serve.remote()) for rank, it in enumerate(self._ranks)))
        address, *_ = await _in_time(serving)
        self._channel = await _in_time(ChannelClient.connect(address))
        return shapes[0]

    async def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step."""
        return cast("StepResult", await self._call("execute", plan))

    async def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure retained masses."""
        return cast("list[float]", await self._call("retained_masses", queries))

    async def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find budgets that keep floors."""
        return cast("list[int]", await self._call("smallest_budgets", queries))

    async def retention_curves(self, queries: Sequence[CurveQuery]) -> list[tuple[float, ...]]:
        """Measure retention curves."""
        return cast("list[tuple[float, ...]]", await self._call("retention_curves", queries))

    async def look(self, query: HeadQuery) -> HeadSlots:
        """Read one KV head's slots."""
        return cast("HeadSlots", await self._call("look", query))

    async def view(self, residence: Residence) -> SlotView:
        """Gather a sequence's slots in all KV heads."""
        return cast("SlotView", await self._call("view", residence))

    async def _call(self, method: str, argument: object) -> object:
        assert self._channel is not None, "load comes first"
        return await self._channel.call(method, argument)

    async def check_health(self) -> None:
        """Raise EngineLostError, which names the rank, when one is dead, has lost the others or does not answer."""
        await self._ping_all(HEALTH_TIMEOUT_S)

    async def _ping_all(self, timeout_s: float) -> None:
        async def ping(rank: int) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await _alive(rank, self._ranks[rank].ping.remote())
            except TimeoutError:
                raise EngineLostError(f"rank {rank} has not answered for {timeout_s:g} s") from None

        await asyncio.gather(*map(ping, range(len(self._ranks))))

    async def recover(self) -> RankShape:
        """Put new ranks in place of lost ones; the others keep their weights and forget every sequence."""
        self._hang_up()
        lost = set(await self._failing(lambda rank: rank.ping.remote(), LIFE_TIMEOUT_S, ignoring=EngineLostError))
        for rank in lost:
            ray.kill(self._ranks[rank])
        # With those gone, the others notice and stop.
        stuck = await self._failing(lambda rank: rank.retire.remote(RETIRE_TIMEOUT_S), RETIRE_TIMEOUT_S + 1)
        lost |= set(stuck)
        if len(lost) in (0, len(self._ranks)):
            raise EngineLostError("all ranks are lost, or one has failed that lives: none can be trusted")
        for rank in lost:
            ray.kill(self._ranks[rank])
            self._ranks[rank] = self._start_rank(rank)
        return await self.load(lambda _done, _total: None)

    async def _failing(
        self, call: Callable[[Any], Any], timeout_s: float, *, ignoring: type[Exception] | tuple[()] = ()
    ) -> list[int]:
        """Return the ranks whose call fails, or does not end in time."""

        async def fails(rank: Any) -> bool:  # noqa: ANN401  # as in _start_rank
            try:
                async with asyncio.timeout(timeout_s):
                    await call(rank)
            except RayTaskError as error:
                return not isinstance(error.cause, ignoring)
            except (RayActorError, TimeoutError):
                return True
            return False

        failed = await asyncio.gather(*map(fails, self._ranks))
        return [rank for rank, has_failed in enumerate(failed) if has_failed]

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def stop(self) -> None:
        """Kill the ranks and give their resources back."""
        self._hang_up()
        for rank in self._ranks:
            ray.kill(rank)
        remove_placement_group(self._group)


async def _in_time(call: Awaitable[ResultT]) -> ResultT:
    """Wait for ranks that have no reason to take long."""
    try:
        async with asyncio.timeout(LOADING_TIMEOUT_S):
            return await call
    except TimeoutError:
        raise EngineLostError(f"the ranks have not answered for {LOADING_TIMEOUT_S:g} s") from None


async def _alive(rank: int, call: Awaitable[ResultT]) -> ResultT:
    """Wait for a rank's answer; its death is an EngineLostError, its KvorumErrors come without Ray's frame."""
    try:
        return await call
    except RayActorError as error:
        raise EngineLostError(f"rank {rank} died") from error
    except RayTaskError as error:
        if isinstance(error.cause, KvorumError):
            raise error.cause from None
        raise


async def build_ray_engine(config: EngineConfig, *, num_engines: int, engine_id: str, on_progress: Progress) -> Engine:
    """Place and load an engine's ranks; the caller starts and stops the engine.

    num_engines: how many engines share the cluster.

    Raises:
        EngineLostError: the cluster has no room for the ranks, or one died while it loaded.
        CheckpointError: the model cannot be found or read.
    """
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    num_gpus = int(on_gpu)
    num_ranks = num_engines * config.tensor_parallel_size
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    num_cpus = config.num_cpus or (1 if on_gpu else share_of_cores(cores, num_ranks=num_ranks))
    group = await _place(config, num_cpus, num_gpus)
    executor = RayExecutor(group, config, num_cpus=num_cpus, num_gpus=num_gpus)
    try:
        shape = await executor.load(on_progress)
    except BaseException:
        await executor.stop()
        raise
    return build_engine(config, shape, executor, engine_id=engine_id)


def share_of_cores(cores: Sequence[int], *, num_ranks: int) -> float:
    """Return how many cores each rank can have if all get as many: the most that place num_ranks on these nodes.

    Less than one where ranks outnumber cores.
    """
    for share in range(max(cores, default=1), 0, -1):
        if sum(count // share for count in cores) >= num_ranks:
            return share
    # So many to a core that all find room on nodes of whole cores.
    return 1 / -(-num_ranks // max(1, sum(cores)))


async def _place(config: EngineConfig, num_cpus: float, num_gpus: int) -> PlacementGroup:
    """Reserve a bundle for each rank; an infeasible group would stay pending without an error."""
    bundle = {"CPU": float(num_cpus), **({"GPU": float(num_gpus)} if num_gpus else {})}
    group: PlacementGroup = placement_group([bundle] * config.tensor_parallel_size, strategy=config.placement_strategy)
    try:
        async with asyncio.timeout(PLACEMENT_TIMEOUT_S):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        wanted = f"{num_cpus:g} CPU{'s' if num_cpus > 1 else ''}{' and 1 GPU' if num_gpus else ''}"
        ranks = "a rank" if config.tensor_parallel_size == 1 else f"each of {config.tensor_parallel_size} ranks"
        raise EngineLostError(
            f"the cluster has no room ({config.placement_strategy}) with {wanted} free for {ranks}"
        ) from None
    return group
