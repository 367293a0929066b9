"""Names in metrics: bounded, for those with most traffic, and never taken away."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.tenant_labels import NOBODY, OTHER, TenantLabels, with_names

TENANTS = st.sampled_from("abcdefgh")


def test_while_there_are_few_all_have_names_at_once() -> None:
    labels = TenantLabels(("a", "b"), max_names=3)
    assert [labels.of(name) for name in "abc"] == ["a", "b", OTHER]
    labels.add(("a", "c"))
    assert labels.of("c") == "c"


def test_of_many_those_with_most_requests_get_the_names() -> None:
    labels = TenantLabels("abcd", max_names=2)
    assert labels.of("a") == OTHER
    for name in "ccbdda":
        labels.count(name)
    labels.give_names()
    assert [labels.of(name) for name in "abcd"] == [OTHER, OTHER, "c", "d"]
    for _ in range(9):
        labels.count("a")
    labels.give_names()
    assert [labels.of(name) for name in "abcd"] == [OTHER, OTHER, "c", "d"]


def test_who_brings_no_key_is_nobody() -> None:
    assert TenantLabels((), max_names=0).of(NOBODY) == NOBODY


@given(
    named=st.frozensets(TENANTS, max_size=4),
    requests=st.dictionaries(TENANTS, st.integers(1, 9)),
    most=st.integers(0, 6),
)
def test_names_are_kept_bounded_and_given_by_traffic(
    named: frozenset[str], requests: dict[str, int], most: int
) -> None:
    after = with_names(named, requests, max_names=most)
    assert named <= after
    assert len(after) <= max(most, len(named))
    given = after - named
    passed_over = Counter(requests).keys() - after
    assert all(requests[name] >= requests[other] for name in given for other in passed_over)
    assert not passed_over or len(after) >= most
