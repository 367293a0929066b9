"""What a router counts and measures itself, and its registry; docs/metrics.md says what each number means.

What engines and the cache manager say of themselves is added by `metrics_views.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.manager.types import ClusterView
from kvorum.cluster.metrics_views import engine_families, manager_families
from kvorum.cluster.tenant_labels import TenantLabels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_RPC_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
_MASS_BUCKETS = (0.25, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)


class RouterMetrics:
    """One router's registry.

    tenants: who may have a label of its own. engines: returns what each engine said last, by id.
    """

    def __init__(self, tenants: Collection[str], engines: Callable[[], Mapping[str, EngineStatus]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # has no types; series that nothing reads
        self.tenants = TenantLabels(tenants)
        self.registry = CollectorRegistry()
        self._manager = _ManagerCollector(self.tenants)
        self.registry.register(_EngineCollector(engines))
        self.registry.register(self._manager)
        self.requests = self._counter("requests", "Calls of the API, by protocol.", "protocol", "method")
        self.rejections = self._counter(
            "admission_rejections", "Calls answered with an error and nothing else, by its code.", "reason", "tenant"
        )
        self.failures = self._counter(
            "request_failures", "Answers that ended before they were whole: an error's code, or cancelled.", "reason"
        )
        self.successes = self._counter("request_success", "Sequences that ended well.", "finished_reason")
        self.resumes = self._counter(
            "request_resumes", "Times that a request which lost its engine went on with another."
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests whose answers began.", "tenant")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers, as clients got them.", "tenant")
        self.evicted_tokens = self._counter(
            "evicted_tokens", "Tokens evicted per KV head, as receipts told clients.", "tenant", "policy"
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _LATENCY_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", _TOKEN_BUCKETS
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its whole answer.", _LATENCY_BUCKETS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Waited for a lease and in the engine, by whole answers.", _LATENCY_BUCKETS
        )
        self.retained_mass = self._histogram(
            "retained_mass", "Attention mass that sequences kept to their end.", _MASS_BUCKETS, "policy"
        )
        self.manager_rpc = self._histogram(
            "manager_rpc_seconds", "The cache manager's answers; Admit waits in line for room.", _RPC_BUCKETS, "rpc"
        )

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"kvorum_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: Collection[float], *labels: str) -> Histogram:
        return Histogram(f"kvorum_{name}", help_text, labels, buckets=tuple(buckets), registry=self.registry)

    def show_manager(self, view: ClusterView | None) -> None:
        """Report what the cache manager says, or that it cannot be reached."""
        self._manager.show(view)

    def render(self) -> bytes:
        """Write everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    def __init__(self, engines: Callable[[], Mapping[str, EngineStatus]]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        return engine_families(self._engines())


class _ManagerCollector(Collector):
    def __init__(self, tenants: TenantLabels) -> None:
        self._tenants = tenants
        self._families: list[Metric] = []

    def show(self, view: ClusterView | None) -> None:
        self._families = manager_families(view, self._tenants)

    def collect(self) -> Iterable[Metric]:
        return self._families
