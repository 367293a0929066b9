"""An engine's ranks as Ray actors in one placement group, and the executor that drives them.

One rank today; the group is where tensor parallelism will add more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

import ray
from ray.actor import ActorClass
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvorum.kvstore.errors import EngineLostError, KvorumError
from kvorum.workers.channel import ChannelAddress, ChannelClient, ChannelServer
from kvorum.workers.config import COMPUTE_ENVIRONMENT, EngineConfig, RankShape
from kvorum.workers.engine import Engine, build_engine
from kvorum.workers.plan import BudgetQuery, MassQuery, StepPlan, StepResult
from kvorum.workers.worker import RankWorker, load_worker

HEALTH_TIMEOUT_S = 5.0
PLACEMENT_TIMEOUT_S = 60.0
PROGRESS_PERIOD_S = 0.2

Progress = Callable[[int, int], None]
ResultT = TypeVar("ResultT")


class _RankActor:
    """Holds a Worker, which the engine calls over a channel of its own; Ray's calls are for control."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: RankWorker | None = None
        self._progress = (0, 0)

    @ray.method
    def load(self) -> RankShape:
        """Load the model and allocate the pool."""
        self._worker, shape = load_worker(self._config, on_progress=self._note_progress)
        return shape

    def _note_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, int]:
        """Return bytes loaded and bytes in all; (0, 0) before the checkpoint is open."""
        return self._progress

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer."""

    @ray.method
    def open_channel(self) -> ChannelAddress:
        """Begin to listen for the engine, which calls the worker from here on."""
        assert self._worker is not None
        self._channel = ChannelServer(self._worker, host=ray.util.get_node_ip_address())
        return self._channel.address


# Ray's type stubs do not know concurrency_groups.
RankActor: ActorClass[_RankActor] = ray.remote(concurrency_groups={"control": 1})(_RankActor)  # type: ignore[call-overload]


class RayExecutor:
    """Executor over one rank actor and its placement group."""

    def __init__(self, group: PlacementGroup, config: EngineConfig, *, num_cpus: int, num_gpus: int) -> None:
        self._group = group
        self._rank = RankActor.options(
            num_cpus=num_cpus,  # Ray has OpenMP use as many threads
            num_gpus=num_gpus,
            runtime_env={"env_vars": COMPUTE_ENVIRONMENT},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group),
        ).remote(config)
        self._channel: ChannelClient | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="channel")

    async def load(self, on_progress: Progress) -> RankShape:
        """Load the model; raises CheckpointError when it cannot be read, EngineLostError when the rank dies."""
        loading: asyncio.Future[RankShape] = asyncio.ensure_future(_alive(self._rank.load.remote()))
        while True:
            done, _ = await asyncio.wait({loading}, timeout=PROGRESS_PERIOD_S)
            if done:
                break
            on_progress(*await _alive(self._rank.progress.remote()))
        shape = loading.result()
        self._channel = await asyncio.to_thread(ChannelClient, await _alive(self._rank.open_channel.remote()))
        return shape

    async def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a step."""
        return cast("StepResult", await self._call("execute", plan))

    async def retained_masses(self, queries: Sequence[MassQuery]) -> list[float]:
        """Measure retained masses."""
        return cast("list[float]", await self._call("retained_masses", queries))

    async def smallest_budgets(self, queries: Sequence[BudgetQuery]) -> list[int]:
        """Find budgets that keep floors."""
        return cast("list[int]", await self._call("smallest_budgets", queries))

    async def _call(self, method: str, argument: object) -> object:
        assert self._channel is not None, "load comes first"
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._channel.call, method, argument)

    async def check_health(self) -> None:
        """Raise EngineLostError when the rank is dead or does not answer."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await _alive(self._rank.ping.remote())
        except TimeoutError:
            raise EngineLostError(f"a rank has not answered for {HEALTH_TIMEOUT_S:g} s") from None

    async def stop(self) -> None:
        """Kill the rank and give its resources back."""
        if self._channel is not None:
            self._channel.close()
        self._thread.shutdown(wait=False)
        ray.kill(self._rank)  # type: ignore[arg-type]  # Ray's types say that options().remote() may be the class
        remove_placement_group(self._group)


async def _alive(call: Awaitable[ResultT]) -> ResultT:
    """Wait for a rank's answer; its death is an EngineLostError, its KvorumErrors come without Ray's frame."""
    try:
        return await call
    except RayActorError as error:
        raise EngineLostError("a rank died") from error
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
    cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    num_cpus = config.num_cpus or (1 if on_gpu else share_of_cores(cores, num_engines=num_engines))
    group = await _place(num_cpus, num_gpus)
    executor = RayExecutor(group, config, num_cpus=num_cpus, num_gpus=num_gpus)
    try:
        shape = await executor.load(on_progress)
    except BaseException:
        await executor.stop()
        raise
    return build_engine(config, shape, executor, engine_id=engine_id)


def share_of_cores(cores: Sequence[int], *, num_engines: int) -> int:
    """Return how many cores each engine can have if all get as many: the most that place num_engines on these nodes."""
    for share in range(max(cores, default=1), 1, -1):
        if sum(count // share for count in cores) >= num_engines:
            return share
    return 1


async def _place(num_cpus: int, num_gpus: int) -> PlacementGroup:
    """Reserve a bundle a rank; an infeasible group would stay pending without an error."""
    group: PlacementGroup = placement_group(
        [{"CPU": float(num_cpus), **({"GPU": float(num_gpus)} if num_gpus else {})}], strategy="PACK"
    )
    try:
        async with asyncio.timeout(PLACEMENT_TIMEOUT_S):
            await group.ready()
    except TimeoutError:
        remove_placement_group(group)
        wanted = f"{num_cpus} CPU{'s' if num_cpus > 1 else ''}{' and 1 GPU' if num_gpus else ''}"
        raise EngineLostError(f"the cluster has no node with {wanted} free for a rank") from None
    return group
