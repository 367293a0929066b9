"""Latencies, rates and goodput, worked out by hand or by a slower way."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.bench_summary import RequestResult, Slo, summarize, summarize_by_tenant


def result(*times_s: float, start_s: float = 10.0, tokens: int | None = None, **fields: object) -> RequestResult:
    """Return a request that started at start_s and got text at times_s after that."""
    values: dict[str, object] = {
        "tenant": "a",
        "start_s": start_s,
        "end_s": start_s + max(times_s, default=0.0),
        "asked_tokens": len(times_s),
        "text_times_s": tuple(start_s + time_s for time_s in times_s),
        "prompt_tokens": 100,
        "output_tokens": len(times_s) if tokens is None else tokens,
    }
    return RequestResult(**(values | fields))  # type: ignore[arg-type]  # each field's own type, by name


def test_latencies_of_a_request_with_a_token_a_piece() -> None:
    request = result(0.5, 0.6, 0.9)
    assert request.ttft_s == pytest.approx(0.5)
    assert request.itls_s == pytest.approx((0.1, 0.3))
    assert request.mean_itl_s == pytest.approx(0.2)
    assert request.e2e_s == pytest.approx(0.9)


def test_a_piece_of_several_tokens_is_spread_over_the_time_since_the_piece_before() -> None:
    assert result(0.5, 0.7, 1.1, tokens=5).itls_s == pytest.approx((0.1, 0.1, 0.2, 0.2))


@given(
    st.lists(st.floats(0.01, 5), min_size=2, max_size=30).map(sorted),
    st.integers(2, 60),
)
def test_however_tokens_are_spread_they_take_all_of_the_time(times_s: list[float], tokens: int) -> None:
    request = result(*times_s, tokens=tokens)
    assert len(request.itls_s) == tokens - 1
    assert min(request.itls_s) >= 0
    assert sum(request.itls_s) == pytest.approx(times_s[-1] - times_s[0], abs=1e-9)


@pytest.mark.parametrize("request_", [result(0.5), result(0.5, tokens=7), result(0.5, 0.6, tokens=1), result()])
def test_there_is_no_time_between_tokens_that_came_at_once(request_: RequestResult) -> None:
    assert request_.itls_s == ()
    assert request_.mean_itl_s is None


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    assert result(end_s=12.0).ttft_s == pytest.approx(2.0)


def test_rates_are_over_the_time_from_the_first_start_to_the_last_end() -> None:
    summary = summarize([result(1.0, 2.0, start_s=10.0), result(1.0, 3.0, start_s=12.0)], Slo())
    assert summary.duration_s == pytest.approx(5.0)
    assert (summary.requests, summary.completed) == (2, 2)
    assert summary.output_tokens_per_s == pytest.approx(4 / 5)
    assert summary.total_tokens_per_s == pytest.approx(204 / 5)
    assert summary.requests_per_s == pytest.approx(2 / 5)
    assert summary.goodput_requests_per_s == summary.requests_per_s


def test_failed_requests_count_as_nothing_but_failed() -> None:
    failed = [result(0.1, error="503: full"), result(error="503: full"), result(error="broken")]
    summary = summarize([result(1.0, 2.0), *failed], Slo())
    assert summary.errors == {"503: full": 2, "broken": 1}
    assert (summary.requests, summary.completed, summary.good_requests, summary.output_tokens) == (4, 1, 1, 2)
    assert summary.ttft_ms
    assert summary.ttft_ms.mean == pytest.approx(1000)


@pytest.mark.parametrize("results", [[], [result(error="broken")]])
def test_when_nothing_was_answered_there_are_no_latencies(results: list[RequestResult]) -> None:
    summary = summarize(results, Slo(ttft_s=1.0))
    assert (summary.ttft_ms, summary.itl_ms, summary.e2e_ms, summary.cache) == (None, None, None, None)
    assert summary.output_tokens_per_s == summary.goodput_requests_per_s == 0


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 3),
        (Slo(ttft_s=0.5), 2),
        (Slo(itl_s=0.3), 2),
        (Slo(e2e_s=0.9), 1),
        (Slo(ttft_s=0.5, itl_s=0.3), 1),
        (Slo(ttft_s=0.1), 0),
    ],
)
def test_goodput_counts_what_keeps_to_every_limit(slo: Slo, good: int) -> None:
    fast_start, fast_end, short = result(0.2, 1.2), result(0.9, 1.1), result(0.5)
    summary = summarize([fast_start, fast_end, short], slo)
    assert summary.good_requests == good
    assert summary.goodput_requests_per_s == pytest.approx(good / summary.duration_s)


@given(st.lists(st.floats(0.001, 100), min_size=2, max_size=100))
def test_percentiles_are_those_of_the_statistics_module(ttfts_s: list[float]) -> None:
    spread = summarize([result(ttft_s) for ttft_s in ttfts_s], Slo()).ttft_ms
    assert spread
    cuts = statistics.quantiles(ttfts_s, n=100, method="inclusive")
    expected = [1000 * cuts[percent - 1] for percent in (50, 90, 95, 99)]
    assert [spread.p50, spread.p90, spread.p95, spread.p99] == pytest.approx(expected)
    assert spread.mean == pytest.approx(1000 * statistics.mean(ttfts_s))
    assert spread.max == pytest.approx(1000 * max(ttfts_s))


def test_receipts_are_added_up() -> None:
    receipt = {"retained_mass": 0.9, "kv_tokens_held": 10, "kv_tokens_evicted": 5, "preemptions": 1}
    worse = receipt | {"retained_mass": 0.5, "kv_tokens_held": 20, "evicted_in_prefill": True}
    results = [result(1.0, receipt=receipt | {"evicted_in_prefill": False}), result(1.0, receipt=worse), result(1.0)]
    cache = summarize(results, Slo()).cache
    assert cache
    assert cache.retained_mass_mean == pytest.approx(0.7)
    assert cache.retained_mass_min == 0.5
    assert (cache.kv_tokens_held_mean, cache.kv_tokens_evicted) == (15, 10)
    assert (cache.preemptions, cache.evicted_in_prefill) == (2, 1)


def test_each_tenant_has_a_summary_of_its_own() -> None:
    results = [result(1.0, tenant="b"), result(2.0, tenant="a"), result(4.0, tenant="b")]
    tenants = summarize_by_tenant(results, Slo(e2e_s=3.0))
    assert [(name, each.requests, each.good_requests) for name, each in tenants.items()] == [("a", 1, 1), ("b", 2, 1)]
