"""From what happened to each request to what is reported: latencies, throughput, goodput, and what the KV cache lost.

TTFT runs from when a request was due until its first text, E2E until its last. ITL is the time between tokens: when a
piece of text stands for several tokens, they are spread evenly over the time since the piece before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What happened to one request; times on one clock.

    text_times_s: when each piece of text came. output_tokens: the server's count, or the number of pieces when it gives
    none (is_counted is then False). receipt: kvorum's own, from other servers None. error: why there is no whole
    answer.
    """

    tenant: str
    start_s: float
    end_s: float
    asked_tokens: int
    text_times_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    is_counted: bool = True
    receipt: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token; to the end of an answer without any text."""
        return (self.text_times_s[0] if self.text_times_s else self.end_s) - self.start_s

    @property
    def e2e_s(self) -> float:
        """Time to the end of the answer."""
        return self.end_s - self.start_s

    @property
    def itls_s(self) -> tuple[float, ...]:
        """Time between each two neighbouring tokens; nothing when all came at once."""
        if len(self.text_times_s) < 2 or self.output_tokens < 2:
            return ()
        known = np.linspace(1, self.output_tokens, len(self.text_times_s))
        token_times_s = np.interp(np.arange(1, self.output_tokens + 1), known, self.text_times_s)
        return tuple(np.diff(token_times_s).tolist())

    @property
    def mean_itl_s(self) -> float | None:
        """Mean time between tokens (TPOT); None when it is not known."""
        itls_s = self.itls_s
        return sum(itls_s) / len(itls_s) if itls_s else None

    def as_json(self, *, began_s: float) -> dict[str, Any]:
        """Return it as plain data, in milliseconds; the start from when the run began."""
        return {
            "tenant": self.tenant,
            "start_ms": _ms(self.start_s - began_s),
            "ttft_ms": _ms(self.ttft_s),
            "e2e_ms": _ms(self.e2e_s),
            "text_ms": [_ms(time_s - self.start_s) for time_s in self.text_times_s],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "kvorum": self.receipt,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request must keep to count as good; None is no limit. itl_s limits a request's mean ITL."""

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, result: RequestResult) -> bool:
        """Whether a request ended well and in time."""
        measured = ((self.ttft_s, result.ttft_s), (self.itl_s, result.mean_itl_s), (self.e2e_s, result.e2e_s))
        return result.error is None and all(
            limit is None or value is None or value <= limit for limit, value in measured
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and largest of a latency, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What kvorum's receipts say, over all answers."""

    retained_mass_mean: float
    retained_mass_min: float
    kv_tokens_held_mean: float
    kv_tokens_evicted: int
    preemptions: int
    evicted_in_prefill: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a benchmark reports. Rates are over duration_s, from the first request until the last answer.

    asked_tokens: how many output tokens the requests that were answered had asked for. Goodput counts requests, and
    output tokens of requests, that met the SLO. errors: how often each happened.
    """

    duration_s: float
    requests: int
    completed: int
    errors: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    asked_tokens: int
    tokens_are_counted: bool
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good_requests: int
    goodput_requests_per_s: float
    goodput_output_tokens_per_s: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    mean_itl_ms: Spread | None
    e2e_ms: Spread | None
    cache: CacheUse | None

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def summarize(results: Sequence[RequestResult], slo: Slo) -> Summary:
    """Add up the results of one run."""
    done = [result for result in results if result.error is None]
    good = [result for result in done if slo.is_met(result)]
    duration_s = _duration_s(results)
    output_tokens = sum(result.output_tokens for result in done)
    prompt_tokens = sum(result.prompt_tokens for result in done)
    return Summary(
        duration_s=duration_s,
        requests=len(results),
        completed=len(done),
        errors=dict(Counter(result.error for result in results if result.error is not None)),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(result.cached_tokens for result in done),
        output_tokens=output_tokens,
        asked_tokens=sum(result.asked_tokens for result in done),
        tokens_are_counted=all(result.is_counted for result in done),
        requests_per_s=_rate(len(done), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration_s),
        good_requests=len(good),
        goodput_requests_per_s=_rate(len(good), duration_s),
        goodput_output_tokens_per_s=_rate(sum(result.output_tokens for result in good), duration_s),
        ttft_ms=_spread(result.ttft_s for result in done),
        itl_ms=_spread(itl_s for result in done for itl_s in result.itls_s),
        mean_itl_ms=_spread(result.mean_itl_s for result in done if result.mean_itl_s is not None),
        e2e_ms=_spread(result.e2e_s for result in done),
        cache=_cache_use([result.receipt for result in done if result.receipt]),
    )


def summarize_by_tenant(results: Sequence[RequestResult], slo: Slo) -> dict[str, Summary]:
    """Add up the results of each tenant, in order of name."""
    names = sorted({result.tenant for result in results})
    return {name: summarize([result for result in results if result.tenant == name], slo) for name in names}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _duration_s(results: Sequence[RequestResult]) -> float:
    if not results:
        return 0.0
    return max(result.end_s for result in results) - min(result.start_s for result in results)


def _rate(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _spread(values_s: Iterable[float]) -> Spread | None:
    values_ms = 1000 * np.fromiter(values_s, dtype=float)
    if not values_ms.size:
        return None
    p50, p90, p95, p99 = np.percentile(values_ms, _PERCENTILES).tolist()
    return Spread(float(values_ms.mean()), p50, p90, p95, p99, float(values_ms.max()))


def _cache_use(receipts: Sequence[Mapping[str, Any]]) -> CacheUse | None:
    if not receipts:
        return None
    masses = [float(receipt["retained_mass"]) for receipt in receipts]
    return CacheUse(
        retained_mass_mean=sum(masses) / len(masses),
        retained_mass_min=min(masses),
        kv_tokens_held_mean=sum(int(receipt["kv_tokens_held"]) for receipt in receipts) / len(receipts),
        kv_tokens_evicted=sum(int(receipt["kv_tokens_evicted"]) for receipt in receipts),
        preemptions=sum(int(receipt["preemptions"]) for receipt in receipts),
        evicted_in_prefill=sum(bool(receipt["evicted_in_prefill"]) for receipt in receipts),
    )
