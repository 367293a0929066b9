"""A client's own books of a load run, to be held against the metrics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]

# What the books have, by the metric that must say the same.
BOOKED = (
    "kvorum_requests_total",
    "kvorum_prompt_tokens_total",
    "kvorum_generation_tokens_total",
    "kvorum_request_success_total",
    "kvorum_admission_rejections_total",
    "kvorum_request_failures_total",
    "kvorum_evicted_tokens_total",
    "kvorum_time_to_first_token_seconds_count",
    "kvorum_inter_token_latency_seconds_count",
    "kvorum_e2e_request_latency_seconds_count",
    "kvorum_request_queue_time_seconds_count",
    "kvorum_retained_mass_count",
)


def samples_of(text: str) -> Samples:
    """Return each sample of a scrape by its name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def booked(after: Samples, before: Samples) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return how much each booked sample grew, those that did not left out."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items() if key[0] in BOOKED}
    return {key: value for key, value in grown.items() if value}


class Books:
    """What one tenant's clients sent and got."""

    def __init__(self, tenant: str = "default") -> None:
        self.tenant = tenant
        self.counts: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count by a metric's name without its prefix."""
        self.counts[f"kvorum_{name}", tuple(sorted(labels.items()))] += amount  # type: ignore[assignment]  # floats too

    def sent(self, protocol: str, method: str) -> None:
        """Count a request."""
        self.add("requests_total", protocol=protocol, method=method)

    def refused(self, code: str, *, tenant: str | None = None) -> None:
        """Count an error that is all there was."""
        self.add("admission_rejections_total", reason=code, tenant=self.tenant if tenant is None else tenant)

    def began(self, prompt_tokens: int, completion_tokens: int, *, sequences: int = 1) -> None:
        """Count what came of an answer, which need not be whole."""
        self.add("prompt_tokens_total", prompt_tokens, tenant=self.tenant)
        self.add("generation_tokens_total", completion_tokens, tenant=self.tenant)
        self.add("time_to_first_token_seconds_count")
        self.add("inter_token_latency_seconds_count", completion_tokens - sequences)

    def ended(self) -> None:
        """Count a whole answer."""
        self.add("e2e_request_latency_seconds_count")
        self.add("request_queue_time_seconds_count")

    def finished(self, reason: str, policy: str, evicted: int) -> None:
        """Count a sequence of a whole answer."""
        self.add("request_success_total", finished_reason=reason)
        self.add("evicted_tokens_total", evicted, tenant=self.tenant, policy=policy)
        self.add("retained_mass_count", policy=policy)

    def whole(self, body: Mapping[str, Any]) -> None:
        """Count an answer of the completions route."""
        usage, receipt, choices = body["usage"], body["kvorum"], body["choices"]
        self.began(usage["prompt_tokens"], usage["completion_tokens"], sequences=len(choices))
        self.ended()
        for number, choice in enumerate(choices):
            # The receipt of several is one, whose amounts are sums.
            self.finished(choice["finish_reason"], receipt["policy"], 0 if number else receipt["kv_tokens_evicted"])

    def streamed(self, text: str) -> None:
        """Count a streamed answer of the completions route that has its usage."""
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        chunks = [json.loads(event) for event in events]
        last = chunks.pop()
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
        self.whole(last | {"choices": choices})

    @property
    def entries(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All that was counted, zeros left out."""
        return {key: count for key, count in self.counts.items() if count}
