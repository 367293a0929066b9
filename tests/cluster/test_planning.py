"""Fields and token ids become sequences, or an error that names the field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.planning import GenerationRequest, Prompting, Surroundings, plan_generation
from kvorum.cluster.sampling_fields import KvorumFields, SamplingFields
from kvorum.cluster.tenants import Tenant, TenantTable
from kvorum.kvstore.errors import ContextLengthError, InvalidRequestError
from kvorum.workers.request import KVParams, RequestId
from kvtest.tiny_model import tiny_model

MODEL = tiny_model(max_model_len=100)


def plan(
    fields: SamplingFields | None = None,
    *,
    prompts: tuple[tuple[int, ...], ...] = ((1, 2, 3),),
    max_tokens: int | None = 5,
    default_max_tokens: int | None = None,
    config: ClusterConfig | None = None,
    pool_tokens: int = 1000,
    tenant: Tenant | None = None,
) -> GenerationRequest:
    prompting = Prompting(
        RequestId("r"), prompts, "prompt", max_tokens=max_tokens, default_max_tokens=default_max_tokens
    )
    around = Surroundings(
        MODEL,
        config or ClusterConfig(),
        TenantTable({"acme": tenant or Tenant()}),
        "acme",
        pool_tokens=pool_tokens,
        random_seed=77,
    )
    return plan_generation(fields or SamplingFields(), prompting, around)


def kv_of(kvorum: KvorumFields | None, config: ClusterConfig | None = None) -> KVParams:
    return plan(SamplingFields(kvorum=kvorum), config=config).sequences[0].kv


def test_each_choice_of_each_prompt_is_a_sequence_of_its_own() -> None:
    planned = plan(SamplingFields(n=2, seed=5), prompts=((1,), (2, 3)))
    assert [sequence.request_id for sequence in planned.sequences] == [f"acme/r-{i}" for i in range(4)]
    assert [sequence.prompt_token_ids for sequence in planned.sequences] == [(1,), (1,), (2, 3), (2, 3)]
    assert [sequence.sampling.seed for sequence in planned.sequences] == [5, 6, 5, 6]
    assert planned.prompt_tokens == 3


def test_a_request_without_a_seed_gets_the_drawn_one() -> None:
    assert [sequence.sampling.seed for sequence in plan(SamplingFields(n=2)).sequences] == [77, 78]


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 5))
def test_seeds_stay_in_range_and_differ(seed: int, n: int) -> None:
    seeds = [sequence.sampling.seed for sequence in plan(SamplingFields(seed=seed, n=n)).sequences]
    assert len(set(seeds)) == n
    assert all(0 <= each < 2**63 for each in seeds)


def test_absent_fields_have_the_apis_defaults() -> None:
    sampling = plan().sequences[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.repetition_penalty == 1.0
    assert sampling.logprobs is None
    assert sampling.eos_token_ids == (256,)
    assert plan().stop == ()
    assert plan().skip_special_tokens


def test_zero_is_not_absent() -> None:
    fields = SamplingFields(temperature=0, skip_special_tokens=False, top_k=-1, stop="x", priority=-3)
    planned = plan(fields)
    assert planned.sequences[0].sampling.temperature == 0.0
    assert planned.sequences[0].sampling.top_k == 0
    assert planned.sequences[0].priority == -3
    assert planned.stop == ("x",)
    assert not planned.skip_special_tokens


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "default", "pool_tokens", "expected"),
    [
        (3, 97, None, 1000, 97),
        (3, None, None, 1000, 97),
        (3, None, 16, 1000, 16),
        (90, None, 16, 1000, 10),
        (3, None, None, 64, 61),
        (80, None, None, 64, 1),
        (3, 90, None, 64, 90),
    ],
)
def test_how_long_an_answer_may_be(
    prompt_tokens: int, max_tokens: int | None, default: int | None, pool_tokens: int, expected: int
) -> None:
    planned = plan(
        prompts=((1,) * prompt_tokens,),
        max_tokens=max_tokens,
        default_max_tokens=default,
        pool_tokens=pool_tokens,
    )
    assert planned.sequences[0].sampling.max_tokens == expected


def test_a_budget_lets_an_open_answer_be_longer_than_the_pool() -> None:
    fields = SamplingFields(kvorum=KvorumFields(policy="h2o", kv_budget=32))
    assert plan(fields, max_tokens=None, pool_tokens=64).sequences[0].sampling.max_tokens == 97


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(100, None), (3, 98), (500, 1)])
def test_what_exceeds_the_context_is_refused(prompt_tokens: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthError, match="100"):
        plan(prompts=((1,) * prompt_tokens,), max_tokens=max_tokens)


def test_a_request_that_says_nothing_is_never_shrunk_by_default() -> None:
    assert kv_of(None) == KVParams(policy="full", kv_budget=None, min_retained_mass=0.0)


def test_budgets_are_fractions_up_to_one_and_tokens_above() -> None:
    assert kv_of(KvorumFields(policy="h2o", kv_budget=0.5)).kv_budget == 0.5
    whole = kv_of(KvorumFields(policy="h2o", kv_budget=1)).kv_budget
    assert isinstance(whole, float)
    assert kv_of(KvorumFields(policy="h2o", kv_budget=64)).kv_budget == 64


def test_defaults_of_the_server_fill_in_what_a_request_leaves_out() -> None:
    config = ClusterConfig(default_policy="h2o_avg", default_kv_budget=0.25)
    assert kv_of(None, config) == KVParams("h2o_avg", 0.25)
    assert kv_of(KvorumFields(kv_budget=64), config) == KVParams("h2o_avg", 64)
    assert kv_of(KvorumFields(policy="sliding"), config) == KVParams("sliding", 0.25)
    # Who asks for `full` is not shrunk, whatever the default budget.
    assert kv_of(KvorumFields(policy="full"), config) == KVParams("full", None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (SamplingFields(min_tokens=6), "min_tokens"),
        (SamplingFields(stop_token_ids=[257]), "stop_token_ids"),
        (SamplingFields(logit_bias={257: 1.0}), "logit_bias"),
        (SamplingFields(kvorum=KvorumFields(policy="nope")), "kvorum.policy"),
        (SamplingFields(kvorum=KvorumFields(policy="full", kv_budget=64)), "kvorum.kv_budget"),
    ],
)
def test_errors_name_their_field(fields: SamplingFields, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan(fields)
    assert caught.value.param == param
