"""What a router is, without the protocols: the model, the engines, admission and generation, and their background work.

`http.py` and `grpc_service.py` stand in front of it; `router.py` puts all of them into a Serve replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import random
import time
from collections.abc import AsyncIterator, Mapping

from kvorum.cluster.admission import Admission, LocalAdmission
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.engine_directory import EngineDirectory
from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.errors import status_of
from kvorum.cluster.generation import Delta, Generator, ResumePolicy
from kvorum.cluster.metrics import RouterMetrics
from kvorum.cluster.model import ServedModel
from kvorum.cluster.planning import GenerationRequest, Prompting, Surroundings, plan_generation
from kvorum.cluster.sampling_fields import SamplingFields
from kvorum.kvstore.errors import AuthenticationError, CapacityError, NeverFitsError
from kvorum.workers.request import RequestId

logger = logging.getLogger(__name__)


class Frontend:
    """Everything that serving a request needs; one per router."""

    def __init__(
        self,
        config: ClusterConfig,
        model: ServedModel,
        engines: EngineDirectory,
        *,
        rng: random.Random | None = None,
    ) -> None:
        """Serve `model` on `engines`; rng draws the seeds of requests that have none."""
        self.config = config
        self.model = model
        self.metrics = RouterMetrics(self.statuses)
        self.is_draining = False
        self._engines = engines
        self._rng = rng or random.Random(config.seed)
        self._lease_s = 30.0
        self._admission: Admission = LocalAdmission(self.live_engines, clock=time.monotonic, lease_s=self._lease_s)
        self._generator = Generator(
            model,
            engines.clients,
            self._admission,
            resume=ResumePolicy(max_resumes=config.max_resumes, timeout_s=config.resume_timeout_s),
            on_finish=self.metrics.count_finish,
            on_resume=self.metrics.count_resume,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Connect to the engines and keep the leases of running requests."""
        self._tasks = [asyncio.create_task(self._engines.run()), asyncio.create_task(self._renew_leases())]

    async def stop(self) -> None:
        """Let go of the engines, which aborts what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until those that run are done, or timeout_s is over."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.running:
                    await asyncio.sleep(0.02)

    @property
    def is_ready(self) -> bool:
        """Whether a request would find an engine."""
        return not self.is_draining and bool(self.live_engines())

    @property
    def running(self) -> tuple[RequestId, ...]:
        """Requests that have been admitted and are not over."""
        return self._generator.running

    def statuses(self) -> Mapping[str, EngineStatus]:
        """Return what each connected engine said last, by id."""
        return {client.status.info.engine_id: client.status for client in self._engines.clients() if client.status}

    def live_engines(self) -> Mapping[str, EngineStatus]:
        """Return the engines whose ranks are all alive."""
        return {engine_id: status for engine_id, status in self.statuses().items() if status.healthy}

    def authenticate(self, authorization: str | None) -> None:
        """Check an Authorization header or metadata entry.

        Raises:
            AuthenticationError: a key is needed and this is not it.
        """
        expected = self.config.api_key
        if expected is None:
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), expected.encode()):
            raise AuthenticationError("a valid key is needed: Authorization: Bearer <key>")

    def plan(self, fields: SamplingFields, prompting: Prompting) -> GenerationRequest:
        """Check a request against the model and lay out its sequences."""
        pools = [status.info.num_blocks * status.info.block_size for status in self.live_engines().values()]
        around = Surroundings(
            model=self.model,
            config=self.config,
            pool_tokens=max(pools, default=self.model.max_model_len),
            random_seed=self._rng.getrandbits(63),
        )
        return plan_generation(fields, prompting, around)

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Delta]]:
        """Run a request; leaving the context ends whatever of it still runs."""
        if self.is_draining:
            raise CapacityError("the router is shutting down", retry_after_s=1.0)
        try:
            async with self._generator.open(request) as deltas:
                yield deltas
        except (CapacityError, NeverFitsError) as error:
            self.metrics.count_rejection(status_of(error).code)
            raise

    def abort(self, request_id: RequestId) -> bool:
        """End a running request; return whether there was one."""
        return self._generator.abort(request_id)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            await self._admission.renew(self.running)
