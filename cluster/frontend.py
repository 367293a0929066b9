"""What a router is, without the protocols: the model, the engines, admission and generation, and their background work.

`http.py` and `grpc_service.py` stand in front of it; `router.py` puts all of them into a Serve replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from typing import TYPE_CHECKING

from kvorum.cluster.admission import LocalAdmission
from kvorum.cluster.calls import Call, Protocol
from kvorum.cluster.config import ClusterConfig, read_api_key
from kvorum.cluster.engine_client import EngineClient
from kvorum.cluster.engine_directory import EngineDirectory
from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.generation import Delta, Generator, ResumePolicy, Trail
from kvorum.cluster.grammar_trial import GrammarTrial
from kvorum.cluster.managed_admission import ManagedAdmission
from kvorum.cluster.manager.channel import FindManager
from kvorum.cluster.manager.tls import read_tls
from kvorum.cluster.manager.types import ClusterView
from kvorum.cluster.manager.watching import ViewChange
from kvorum.cluster.metrics import RouterMetrics
from kvorum.cluster.model import ServedModel
from kvorum.cluster.planning import GenerationRequest, Prompting, Surroundings, plan_generation
from kvorum.cluster.sampling_fields import SamplingFields
from kvorum.cluster.structured import Form
from kvorum.cluster.tenants import Tenant, TenantTable
from kvorum.kvstore.errors import CapacityError, InvalidRequestError
from kvorum.workers.request import RequestId

if TYPE_CHECKING:
    from kvorum.cluster.tracing import Tracing

logger = logging.getLogger(__name__)

# A scrape waits for the cache manager's numbers no longer than this.
_LOOK_TIMEOUT_S = 1.0


class Frontend:
    """Everything that serving a request needs; one per router."""

    def __init__(
        self,
        config: ClusterConfig,
        model: ServedModel,
        engines: EngineDirectory,
        *,
        find_manager: FindManager | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """Serve `model` on `engines`.

        find_manager: finds the cache manager, without which this router admits by itself. rng: draws the seeds of
        requests that have none.
        """
        self.config = config
        self.model = model
        self._api_key = read_api_key(config)
        self.tenants = self._tenant_table(config.tenants)
        self.metrics = RouterMetrics(self.tenants.names, self.statuses)
        self._tracing = _open_tracing(config.otlp_endpoint) if config.otlp_endpoint else None
        self.is_draining = False
        self._engines = engines
        self._rng = rng or random.Random(config.seed)
        self._managed = self._managed_admission(find_manager) if find_manager else None
        self._generator = Generator(
            model,
            engines.clients,
            self._managed or LocalAdmission(self.live_engines),
            resume=ResumePolicy(max_resumes=config.max_resumes, timeout_s=config.resume_timeout_s),
            on_resume=self.metrics.resumes.inc,
        )
        self._grammar_trial = GrammarTrial(
            model.tokenizer.to_json(), vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
        self._tasks: list[asyncio.Task[None]] = []

    def _managed_admission(self, find_manager: FindManager) -> ManagedAdmission:
        tls = read_tls(self.config.control_tls) if self.config.control_tls else None
        return ManagedAdmission(
            find_manager,
            self.live_engines,
            router_id=uuid.uuid4().hex,
            tls=tls,
            on_answer=lambda rpc, seconds: self.metrics.manager_rpc.labels(rpc).observe(seconds),
        )

    def start(self) -> None:
        """Connect to the engines, and to the cache manager."""
        self._tasks = [asyncio.create_task(self._engines.run())]
        if self._managed:
            self._tasks.append(asyncio.create_task(self._managed.run()))

    async def stop(self) -> None:
        """Let go of the engines, which aborts what still runs, and send the traces that are left."""
        await self._grammar_trial.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests, wait until those that run are done or timeout_s is over, and send their traces."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.num_running:
                    await asyncio.sleep(0.02)
        if self._tracing:
            await asyncio.to_thread(self._tracing.flush)

    @property
    def is_ready(self) -> bool:
        """Whether a request would find an engine."""
        return not self.is_draining and bool(self.live_engines())

    @property
    def num_running(self) -> int:
        """Requests that came and are not over."""
        return self._generator.num_running

    def statuses(self) -> Mapping[str, EngineStatus]:
        """Return what each connected engine said last, by id."""
        return {client.status.info.engine_id: client.status for client in self._engines.clients() if client.status}

    def engine_clients(self) -> Collection[EngineClient]:
        """Return the clients of all engines, connected or not."""
        return self._engines.clients()

    def live_engines(self) -> Mapping[str, EngineStatus]:
        """Return the engines whose ranks are all alive."""
        return {engine_id: status for engine_id, status in self.statuses().items() if status.healthy}

    def set_tenants(self, tenants: Mapping[str, Tenant]) -> TenantTable:
        """Take new tenants and return their table; requests that were planned go on under the old ones."""
        self.tenants = self._tenant_table(tenants)
        self.metrics.tenants.add(self.tenants.names)
        return self.tenants

    def _tenant_table(self, tenants: Mapping[str, Tenant]) -> TenantTable:
        return TenantTable(tenants, api_key=self._api_key)

    def authenticate(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header or metadata entry; raises AuthenticationError."""
        return self.tenants.authenticate(authorization)

    async def grammar_of(self, form: Form, *, tenant: str) -> str:
        """Return the grammar of a form that engines can follow; raises InvalidRequestError for one that they cannot."""
        await self._grammar_trial.check(form.grammar, param=form.param, tenant=tenant)
        return form.grammar

    def plan(self, fields: SamplingFields, prompting: Prompting, *, tenant: str) -> GenerationRequest:
        """Check a tenant's request against the model and lay out its sequences."""
        pools = [status.info.num_blocks * status.info.block_size for status in self.live_engines().values()]
        around = Surroundings(
            model=self.model,
            config=self.config,
            tenants=self.tenants,
            tenant=tenant,
            pool_tokens=max(pools, default=self.model.max_model_len),
            random_seed=self._rng.getrandbits(63),
        )
        return plan_generation(fields, prompting, around)

    @contextlib.asynccontextmanager
    async def generate(
        self, request: GenerationRequest, *, trail: Trail | None = None
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """Run a request; leaving the context ends whatever of it still runs."""
        if self.is_draining:
            raise CapacityError("the router is shutting down", retry_after_s=1.0)
        async with self._generator.open(request, trail=trail) as deltas:
            yield deltas

    def call(self, protocol: Protocol, method: str, *, generates: bool, headers: Mapping[str, str]) -> Call:
        """Return what a client's call is noted in, from its arrival to its end."""
        on_end = self._tracing.export if self._tracing else None
        return Call(protocol, method, generates=generates, headers=headers, metrics=self.metrics, on_end=on_end)

    @contextlib.asynccontextmanager
    async def answer(self, call: Call, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Delta]]:
        """Run what a call asks for; leaving the context ends whatever of it still runs."""
        async with (
            self.generate(request, trail=call.trail) as deltas,
            contextlib.aclosing(call.watch(request, deltas)) as watched,
        ):
            yield watched

    async def render_metrics(self) -> bytes:
        """Write the router's, the engines' and the cache manager's numbers in Prometheus' text format."""
        await self.refresh_metrics()
        return self.metrics.render()

    async def refresh_metrics(self) -> None:
        """Ask the cache manager for its numbers, if there is one, and name the tenants that have most requests."""
        self.metrics.tenants.give_names()
        if self._managed:
            self.metrics.show_manager(await self.look_at_cluster())

    async def look_at_cluster(self) -> ClusterView | None:
        """Return what the cache manager knows now; None without one, or while it is away."""
        return await self._managed.link.look(timeout_s=_LOOK_TIMEOUT_S) if self._managed else None

    def watch_cluster(self, *, tenant: str) -> AsyncGenerator[ViewChange]:
        """Return the cluster's whole state, then what changes, to an operator.

        Raises:
            PermissionDeniedError: the tenant is no operator.
            InvalidRequestError: there is no cache manager.
        """
        self.tenants.check_operator(tenant)
        if self._managed is None:
            raise InvalidRequestError("this cluster runs without the cache manager, which alone knows its state")
        return self._managed.link.watch()

    def abort(self, request_id: RequestId, *, tenant: str) -> bool:
        """End a tenant's running request; return whether it has one with that id."""
        return self._generator.abort(request_id, tenant=tenant)


def _open_tracing(endpoint: str) -> Tracing:
    from kvorum.cluster.tracing import open_tracing  # brings OpenTelemetry along, which only those who want it need

    return open_tracing(endpoint)
