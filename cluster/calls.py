"""One client's call of the API, from its arrival to its end: what is counted, measured and traced of it.

Where a number is counted decides whether it equals what clients count themselves, so all of it is here:
 1. Arrival: requests.
 2. An error before anything was answered: rejections, whatever the protocol calls it.
 3. First delta: prompt tokens, time to first token. Each delta: its tokens, the time since the one before.
 4. End of a sequence: successes, its receipt's evictions and mass.
 5. Whole answer: latency and time in queues. Anything else that had begun: failures.
What is handed to the protocol counts as the client's; one that hangs up may have read less.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Literal, Self

from kvorum.cluster.errors import UnforeseenError, status_of
from kvorum.cluster.generation import Delta, Ending, Trail
from kvorum.cluster.logs import CONTEXT, LogContext
from kvorum.cluster.metrics import RouterMetrics
from kvorum.cluster.planning import GenerationRequest
from kvorum.cluster.tenant_labels import NOBODY
from kvorum.kvstore.errors import KvorumError
from kvorum.workers.request import RequestId

CANCELLED = "cancelled"
# Of what clients call their requests, logs and traces hold no more.
MAX_ID_CHARS = 256

# vllm: over gRPC too, by the service that gateways speak.
Protocol = Literal["http", "grpc", "vllm"]


class Call:
    """A call; what happened to it until it ended is in its attributes, times in monotonic seconds.

    generates: whether it asks for an answer. headers: what the client sent beside it, names in lower case. on_end hears
    of calls that generate when they are over.
    """

    def __init__(
        self,
        protocol: Protocol,
        method: str,
        *,
        generates: bool,
        headers: Mapping[str, str],
        metrics: RouterMetrics,
        on_end: Callable[[Call], None] | None = None,
    ) -> None:
        self.protocol = protocol
        self.method = method
        self.headers = headers
        self.request_id = RequestId(uuid.uuid4().hex)
        self.trail = Trail()
        self.started_s = time.monotonic()
        self.started_ns = time.time_ns()
        self.first_token_s: float | None = None
        self.ended_s = self.started_s
        self.plan: GenerationRequest | None = None
        self.endings: dict[int, Ending] = {}
        self.error_code: str | None = None
        self.num_tokens = 0
        self._generates = generates
        self._metrics = metrics
        self._on_end = on_end
        self._log = LogContext(headers.get("x-request-id", "")[:MAX_ID_CHARS] or self.request_id)
        self._last_token_s: dict[int, float] = {}

    @property
    def tenant(self) -> str:
        """Whose it is; nobody's until a key was looked up."""
        return self._log.tenant or NOBODY

    @tenant.setter
    def tenant(self, name: str) -> None:
        self._log.tenant = name

    def identify(self, request_id: RequestId) -> None:
        """Take the id that the client chose."""
        self.request_id = self._log.request_id = request_id

    @property
    def is_whole(self) -> bool:
        """Whether all sequences ended well."""
        return self.plan is not None and len(self.endings) == len(self.plan.sequences)

    def __enter__(self) -> Self:
        """Count it, and have log lines name it."""
        CONTEXT.set(self._log)
        self._metrics.requests.labels(self.protocol, self.method).inc()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Count how it ended."""
        if isinstance(error, Exception) and self.error_code is None:
            self.refuse(UnforeseenError())
        self.ended_s = time.monotonic()
        if not self._generates:
            return
        if self.error_code is None and self.is_whole:
            self._metrics.e2e_latency.observe(self.ended_s - self.started_s)
            self._metrics.queue_time.observe(max(ending.queued_ms for ending in self.endings.values()) / 1e3)
        elif self.error_code is None:
            self._fail(CANCELLED)
        if self._on_end:
            self._on_end(self)

    def refuse(self, error: KvorumError) -> None:
        """Note an error that is all the client gets."""
        self.error_code = status_of(error).code
        self._metrics.rejections.labels(self.error_code, self._metrics.tenants.of(self.tenant)).inc()

    def fail(self, error: KvorumError) -> None:
        """Note an error that ends an answer of which the client has a part."""
        self._fail(status_of(error).code)

    def _fail(self, code: str) -> None:
        self.error_code = code
        if self._generates:
            self._metrics.failures.labels(code).inc()

    async def watch(self, plan: GenerationRequest, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta]:
        """Pass an answer on and note what it brings."""
        self.plan = plan
        self._metrics.tenants.count(plan.tenant)
        tenant = self._metrics.tenants.of(plan.tenant)
        generation_tokens = self._metrics.generation_tokens.labels(tenant)
        async for delta in deltas:
            now_s = time.monotonic()
            if self.first_token_s is None:
                self.first_token_s = now_s
                self._metrics.time_to_first_token.observe(now_s - self.started_s)
                self._metrics.prompt_tokens.labels(tenant).inc(plan.prompt_tokens)
            if delta.token_ids:
                self.num_tokens += len(delta.token_ids)
                generation_tokens.inc(len(delta.token_ids))
                self._note_token(delta.index, now_s)
            if delta.ending:
                self.endings[delta.index] = delta.ending
                self._note_ending(delta.ending, tenant)
            yield delta

    def _note_token(self, index: int, now_s: float) -> None:
        last_s = self._last_token_s.get(index)
        if last_s is not None:
            self._metrics.inter_token_latency.observe(now_s - last_s)
        self._last_token_s[index] = now_s

    def _note_ending(self, ending: Ending, tenant: str) -> None:
        receipt = ending.receipt
        self._metrics.successes.labels(ending.reason.value).inc()
        self._metrics.evicted_tokens.labels(tenant, receipt.policy).inc(receipt.kv_tokens_evicted)
        self._metrics.retained_mass.labels(receipt.policy).observe(receipt.retained_mass)
