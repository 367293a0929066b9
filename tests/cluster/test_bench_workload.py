"""What a benchmark sends is named by a seed, has the lengths that were asked for and shares what it should."""

from __future__ import annotations

import itertools
import statistics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.bench_trace import TraceEntry
from kvorum.cluster.bench_workload import (
    Lengths,
    Tenant,
    Workload,
    as_text,
    draw_requests,
    parse_lengths,
    parse_tenant,
)
from kvorum.cluster.config import ConfigError

FIXED = Lengths("fixed", 12, 12)


def work(**fields: object) -> Workload:
    values: dict[str, object] = {"num_requests": 20, "prompt_tokens": FIXED, "output_tokens": FIXED, "vocab_size": 1000}
    return Workload(**(values | fields))  # type: ignore[arg-type]  # each field's own type, by name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128", Lengths("fixed", 128, 128)),
        ("uniform:64:256", Lengths("uniform", 64, 256)),
        ("normal:256:64", Lengths("normal", 256, 64)),
        ("lognormal:256:0", Lengths("lognormal", 256, 0)),
    ],
)
def test_lengths_are_read(text: str, expected: Lengths) -> None:
    assert parse_lengths(text, option="--prompt-tokens") == expected


@pytest.mark.parametrize(
    "text",
    ["", "x", "0", "-1", "1.5", "nan", "inf", "uniform:5", "uniform:9:3", "uniform:1:2:3", "zipf:1:2", "normal:5:-1"],
)
def test_lengths_that_cannot_be_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--prompt-tokens: expected N, uniform.*got '"):
        parse_lengths(text, option="--prompt-tokens")


@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_uniform_lengths_stay_within_their_bounds(low: int, width: int, seed: int) -> None:
    lengths = Lengths("uniform", low, low + width)
    assert all(low <= lengths.draw(Random(seed)) <= low + width for _ in range(10))


@given(st.sampled_from(["normal", "lognormal"]), st.integers(1, 100), st.integers(0, 300), st.integers())
def test_there_is_always_a_token(kind: str, mean: int, std: int, seed: int) -> None:
    lengths = parse_lengths(f"{kind}:{mean}:{std}", option="-")
    rng = Random(seed)
    assert all(lengths.draw(rng) >= 1 for _ in range(10))


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_mean_and_deviation_are_the_ones_asked_for(kind: str) -> None:
    rng, lengths = Random(1), parse_lengths(f"{kind}:400:80", option="-")
    drawn = [lengths.draw(rng) for _ in range(5000)]
    assert statistics.mean(drawn) == pytest.approx(400, rel=0.02)
    assert statistics.stdev(drawn) == pytest.approx(80, rel=0.05)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a=k", Tenant("a", "k", 1.0)), ("b=k:2.5", Tenant("b", "k", 2.5)), ("c=k=:1", Tenant("c", "k=", 1.0))],
)
def test_tenants_are_read(text: str, expected: Tenant) -> None:
    assert parse_tenant(text, option="--tenants") == expected


@pytest.mark.parametrize("text", ["", "a", "a=", "=k", "a=k:0", "a=k:x", "a=k:inf", "a=k:-1"])
def test_tenants_that_cannot_be_are_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--tenants: expected NAME=KEY"):
        parse_tenant(text, option="--tenants")


@given(st.integers(0, 2**32))
def test_a_seed_names_the_work(seed: int) -> None:
    asked = work(prompt_tokens=Lengths("lognormal", 30, 10), request_rate=3.0)
    assert draw_requests(asked, Random(seed)) == draw_requests(asked, Random(seed))
    assert draw_requests(asked, Random(seed)) != draw_requests(asked, Random(seed + 1))


@given(st.integers(0, 50), st.integers(4, 5000), st.integers())
def test_every_prompt_begins_with_the_shared_prefix_and_goes_its_own_way(prefix: int, vocab: int, seed: int) -> None:
    requests = draw_requests(work(shared_prefix_tokens=prefix, vocab_size=vocab), Random(seed))
    assert {len(request.prompt) for request in requests} == {prefix + 12}
    assert len({request.prompt[:prefix] for request in requests}) == 1
    assert len({request.prompt for request in requests}) > 1
    assert all(vocab // 4 <= token < vocab for request in requests for token in request.prompt)


def test_poisson_arrivals_have_the_rate_asked_for() -> None:
    dues = [request.due_s for request in draw_requests(work(num_requests=4000, request_rate=8.0), Random(2))]
    assert dues == sorted(dues)
    assert dues[-1] == pytest.approx(4000 / 8, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(dues)]
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.1)  # as an exponential distribution's, not a clock's


def test_requests_are_spread_over_tenants_by_weight() -> None:
    tenants = (Tenant("big", "k1", 3.0), Tenant("small", "k2", 1.0))
    requests = draw_requests(work(num_requests=2000, tenants=tenants), Random(3))
    assert sum(request.tenant.name == "big" for request in requests) == pytest.approx(1500, rel=0.05)


def test_a_trace_gives_lengths_times_and_shared_prefixes() -> None:
    trace = (TraceEntry(0.0, 1000, 5, (7, 8)), TraceEntry(0.5, 1100, 6, (7, 9, 10)), TraceEntry(2.0, 30, 7))
    requests = draw_requests(work(trace=trace), Random(4))
    assert [len(request.prompt) for request in requests] == [1000, 1100, 30]
    assert [request.max_tokens for request in requests] == [5, 6, 7]
    assert [request.due_s for request in requests] == [0.0, 0.5, 2.0]
    first, second, _ = (request.prompt for request in requests)
    assert first[:512] == second[:512]
    assert first[512:520] != second[512:520]


def test_a_rate_goes_before_the_traces_own_times() -> None:
    trace = tuple(TraceEntry(0.0, 3, 3) for _ in range(5))
    dues = [request.due_s for request in draw_requests(work(trace=trace, request_rate=2.0), Random(5))]
    assert len(set(dues)) == 5


def test_only_as_much_of_a_trace_as_asked_is_sent() -> None:
    trace = tuple(TraceEntry(0.0, 3, 3) for _ in range(5))
    assert len(draw_requests(work(trace=trace, num_requests=2), Random(6))) == 2


def test_text_is_equal_where_ids_are() -> None:
    one, other = as_text((5, 6, 7)), as_text((5, 6, 8))
    assert one.split()[:2] == other.split()[:2]
    assert one != other
    assert len(one.split()) == 3
