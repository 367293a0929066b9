"""Policies: what their names and options mean, what a budget becomes, and what is refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kernels.plan import EvictionRule
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.kvstore.policies import (
    MAX_SINK_TOKENS,
    MIN_BUDGET_TOKENS,
    POLICIES,
    Policy,
    parse_policy,
    policy_names,
    resolve_budget,
    smallest_footprint,
)
from kvorum.kvstore.types import blocks_for

FULL, H2O = POLICIES["full"], POLICIES["h2o"]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any policy that a request can name."""
    name = draw(st.sampled_from(policy_names()))
    options = ""
    if name in ("h2o", "h2o_avg", "snap_h2o"):
        recent, sinks = draw(st.floats(0.0, 1.0)), draw(st.integers(0, MAX_SINK_TOKENS))
        options = f":recent={recent},sinks={sinks},decay={draw(st.floats(0.9, 1.0))}"
    return parse_policy(name + options)


class TestParsing:
    @pytest.mark.parametrize("name", policy_names())
    def test_a_name_alone_is_the_registered_policy(self, name: str) -> None:
        assert parse_policy(name) is POLICIES[name]

    def test_full_alone_never_evicts(self) -> None:
        assert [name for name in policy_names() if not POLICIES[name].evicts] == ["full"]

    def test_options_change_what_they_name_and_nothing_else(self) -> None:
        plain, changed = parse_policy("h2o_avg"), parse_policy("h2o_avg:recent=0.1,sinks=8,decay=0.99")
        assert (changed.recent_share, changed.sink_tokens, changed.decay) == (0.1, 8, 0.99)
        assert (changed.name, changed.per_lifetime, changed.evicts) == ("h2o_avg", True, True)
        assert (plain.recent_share, plain.sink_tokens, plain.decay) == (0.25, 4, 1.0)

    def test_of_two_options_with_one_key_the_last_counts(self) -> None:
        assert parse_policy("h2o:sinks=2,sinks=3").sink_tokens == 3

    @pytest.mark.parametrize(
        "text", ["h2o:recent=0", "h2o:recent=1", "h2o:sinks=0", "h2o:sinks=8", "h2o:decay=0.9", "h2o:decay=1"]
    )
    def test_the_ends_of_a_range_are_allowed(self, text: str) -> None:
        assert parse_policy(text).name == "h2o"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "H2O",
            "h20",
            ":recent=0.5",
            "h2o:recent",
            "h2o:recent=",
            "h2o:recent=half",
            "h2o:recent=-0.01",
            "h2o:recent=1.01",
            "h2o:recent=nan",
            "h2o:sinks=-1",
            "h2o:sinks=9",
            "h2o:sinks=2.5",
            "h2o:sinks=inf",
            "h2o:decay=0.89",
            "h2o:decay=1.01",
            "h2o:window=5",
            "h2o:=1",
            "full:recent=0.5",
            "sliding:recent=0.5",
            "sinks:sinks=8",
        ],
    )
    def test_anything_else_is_refused_by_the_field_it_came_in(self, text: str) -> None:
        with pytest.raises(InvalidRequestError) as refused:
            parse_policy(text)
        assert refused.value.param == "kvorum.policy"

    def test_an_unknown_name_is_told_the_known_ones(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"'h20'.*full, h2o, h2o_avg, snap_h2o, sliding, sinks"):
            parse_policy("h20")

    def test_a_bad_option_is_told_the_ranges(self) -> None:
        with pytest.raises(InvalidRequestError, match=r"'sinks=9'.*recent=0\.\.1, sinks=0\.\.8 or decay=0\.9\.\.1"):
            parse_policy("h2o:sinks=9")


class TestRules:
    """The numbers of each policy, worked out by hand from its definition."""

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("h2o", EvictionRule(recent_tokens=51)),
            ("h2o_avg", EvictionRule(recent_tokens=25, sink_tokens=4, per_lifetime=True)),
            ("snap_h2o", EvictionRule(recent_tokens=51, observe_from=168)),
            ("sliding", EvictionRule(recent_tokens=0, by_age=True)),
            ("sinks", EvictionRule(recent_tokens=0, sink_tokens=4, by_age=True)),
            ("h2o:recent=0.1,sinks=8,decay=0.99", EvictionRule(recent_tokens=10, sink_tokens=8, decay=0.99)),
        ],
    )
    def test_a_budget_of_103_and_a_prompt_of_200(self, name: str, expected: EvictionRule) -> None:
        assert parse_policy(name).rule(103, prompt_tokens=200) == expected

    def test_a_prompt_shorter_than_the_observed_queries_is_observed_whole(self) -> None:
        assert POLICIES["snap_h2o"].rule(50, prompt_tokens=31).observe_from == 0

    def test_without_a_budget_the_smallest_one_is_protected(self) -> None:
        assert H2O.rule(None, prompt_tokens=5) == H2O.rule(MIN_BUDGET_TOKENS, prompt_tokens=5)

    @given(policies(), st.none() | st.integers(MIN_BUDGET_TOKENS, 10**6), st.integers(1, 10**6))
    def test_there_is_always_a_token_that_is_not_protected(
        self, policy: Policy, budget: int | None, prompt_tokens: int
    ) -> None:
        rule = policy.rule(budget, prompt_tokens=prompt_tokens)
        assert rule.recent_tokens >= 0
        assert rule.recent_tokens + rule.sink_tokens < (budget or MIN_BUDGET_TOKENS)

    @given(policies(), st.integers(MIN_BUDGET_TOKENS, 10**6))
    def test_a_token_more_of_budget_protects_one_token_more_at_most(self, policy: Policy, budget: int) -> None:
        """What a smaller budget keeps, a larger one keeps too: the search for a budget relies on it."""
        less, more = (policy.rule(tokens, prompt_tokens=100).recent_tokens for tokens in (budget, budget + 1))
        assert more - less in (0, 1)


class TestBudgets:
    @pytest.mark.parametrize("policy", [FULL, H2O])
    def test_none_is_no_limit(self, policy: Policy) -> None:
        assert resolve_budget(policy, None, context_tokens=1000) is None

    @pytest.mark.parametrize("kv_budget", [16, 17, 5000])
    def test_an_integer_is_a_count_of_tokens(self, kv_budget: int) -> None:
        assert resolve_budget(H2O, kv_budget, context_tokens=1000) == kv_budget

    @pytest.mark.parametrize(("fraction", "tokens"), [(0.25, 250), (1.0, 1000), (0.0999, 99), (0.001, 16)])
    def test_a_fraction_is_of_the_context_and_never_below_the_smallest(self, fraction: float, tokens: int) -> None:
        assert resolve_budget(H2O, fraction, context_tokens=1000) == tokens

    @pytest.mark.parametrize("kv_budget", [15, 0, -1, 0.0, -0.5, 1.0001, 16.0, math.nan, math.inf])
    def test_what_is_out_of_range_is_refused_by_its_field(self, kv_budget: float) -> None:
        with pytest.raises(InvalidRequestError) as refused:
            resolve_budget(H2O, kv_budget, context_tokens=1000)
        assert refused.value.param == "kvorum.kv_budget"

    @pytest.mark.parametrize("kv_budget", [100, 0.5])
    def test_a_policy_that_never_evicts_takes_none(self, kv_budget: float) -> None:
        with pytest.raises(InvalidRequestError, match="'full'") as refused:
            resolve_budget(FULL, kv_budget, context_tokens=1000)
        assert refused.value.param == "kvorum.kv_budget"


class TestFootprint:
    def test_without_a_budget_it_is_the_whole_context(self) -> None:
        assert smallest_footprint(None, context_tokens=100, min_retained_mass=0.0, block_size=16) == 7

    def test_a_floor_needs_the_whole_context_too(self) -> None:
        assert smallest_footprint(32, context_tokens=100, min_retained_mass=0.1, block_size=16) == 7

    @pytest.mark.parametrize(("budget", "blocks"), [(31, 3), (32, 3), (33, 4)])
    def test_a_budget_needs_itself_and_a_block_of_prompt(self, budget: int, blocks: int) -> None:
        assert smallest_footprint(budget, context_tokens=1000, min_retained_mass=0.0, block_size=16) == blocks

    @given(st.integers(MIN_BUDGET_TOKENS, 500), st.integers(1, 500), st.integers(1, 32))
    def test_it_is_never_more_than_the_whole_context(self, budget: int, context_tokens: int, block_size: int) -> None:
        blocks = smallest_footprint(budget, context_tokens=context_tokens, min_retained_mass=0.0, block_size=block_size)
        assert blocks <= blocks_for(context_tokens, block_size)
