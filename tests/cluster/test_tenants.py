"""Tenants: known by their keys alone, bounded in what they may ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.tenants import DEFAULT_TENANT, Tenant, TenantTable, hash_key, new_key
from kvorum.kvstore.errors import AuthenticationError, PermissionDeniedError

ACME_KEY, BETA_KEY = "kv-acme", "kv-beta"


def table() -> TenantTable:
    return TenantTable(
        {
            "acme": Tenant(api_key_sha256=(hash_key(ACME_KEY), hash_key("kv-second")), is_operator=True),
            "beta": Tenant(api_key_sha256=(hash_key(BETA_KEY),), prefix_group="shared"),
            "gamma": Tenant(prefix_group="shared"),
        }
    )


def test_a_key_names_its_tenant_and_nothing_else_does() -> None:
    assert table().authenticate(f"Bearer {ACME_KEY}") == "acme"
    assert table().authenticate("bearer kv-second") == "acme"
    assert table().authenticate(f"Bearer  {BETA_KEY} ") == "beta"
    for wrong in (None, "", "Bearer", "Bearer ", "Bearer kv-acm", f"Basic {ACME_KEY}", ACME_KEY, "Bearer acme"):
        with pytest.raises(AuthenticationError):
            table().authenticate(wrong)


def test_a_hash_is_no_key() -> None:
    with pytest.raises(AuthenticationError):
        table().authenticate(f"Bearer {hash_key(ACME_KEY)}")


def test_without_tenants_there_is_one_that_may_see_everything() -> None:
    open_table = TenantTable({})
    assert open_table.authenticate(None) == DEFAULT_TENANT
    open_table.check_operator(DEFAULT_TENANT)
    with_key = TenantTable({}, api_key="s3cret")
    assert with_key.authenticate("Bearer s3cret") == DEFAULT_TENANT
    with pytest.raises(AuthenticationError):
        with_key.authenticate(None)


def test_nobody_is_let_in_while_the_tenants_are_not_known() -> None:
    for authorization in (None, "Bearer x"):
        with pytest.raises(AuthenticationError):
            TenantTable.closed().authenticate(authorization)


def test_only_operators_see_the_cluster() -> None:
    table().check_operator("acme")
    with pytest.raises(PermissionDeniedError):
        table().check_operator("beta")


def test_prefixes_are_shared_inside_a_group_only() -> None:
    tenants = table()
    assert tenants.prefix_salt("beta", "") == tenants.prefix_salt("gamma", "")
    assert tenants.prefix_salt("acme", "") != tenants.prefix_salt("beta", "")
    assert tenants.prefix_salt("beta", "x") != tenants.prefix_salt("beta", "")


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_salt_of_a_client_reaches_another_tenants_prefixes(first: str, second: str) -> None:
    tenants = table()
    assert tenants.prefix_salt("acme", first) != tenants.prefix_salt("beta", second)
    same = tenants.prefix_salt("acme", first) == tenants.prefix_salt("acme", second)
    assert same == (first == second)


@given(st.integers(-(2**31), 2**31), st.integers(-(2**31), 2**31))
def test_no_request_gets_past_a_tenant_of_higher_priority(first: int, second: int) -> None:
    assert Tenant(priority=-1).engine_priority(first) < Tenant(priority=0).engine_priority(second)


def test_a_policy_that_is_not_allowed_is_refused_by_name() -> None:
    tenant = Tenant(allowed_policies=("full", "h2o"))
    tenant.check_policy("h2o:recent=0.1")
    with pytest.raises(PermissionDeniedError, match=r"kvorum\.policy"):
        tenant.check_policy("sinks")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"floor": -1}, "floor"),
        ({"floor": 1.5}, "floor"),
        ({"ceiling": True}, "ceiling"),
        ({"weight": 0}, "weight"),
        ({"max_running": 0}, "max_running"),
        ({"allowed_policies": ["h2o"]}, "default_policy"),
        ({"allowed_policies": ["nonsense"]}, "nonsense"),
        ({"default_policy": "full", "default_kv_budget": 5}, "kv_budget"),
        ({"api_key_sha256": ["kv-plain"]}, "api_key_sha256"),
        ({"prefix_group": "a/b"}, "prefix_group"),
        ({"spelt_wrong": 1}, "spelt_wrong"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        Tenant.model_validate(settings)


def test_the_cluster_refuses_tenants_that_cannot_be_told_apart_or_limited() -> None:
    key = {"api_key_sha256": [hash_key(ACME_KEY)]}
    with pytest.raises(ValidationError, match="same API key"):
        ClusterConfig.model_validate({"tenants": {"acme": key, "beta": key}})
    with pytest.raises(ValidationError, match="api_key"):
        ClusterConfig.model_validate({"tenants": {"acme": key}, "api_key": "x"})
    with pytest.raises(ValidationError, match="api_key_file"):
        ClusterConfig.model_validate({"tenants": {"acme": key}, "api_key_file": "x"})
    with pytest.raises(ValidationError, match="cache_manager"):
        ClusterConfig.model_validate({"tenants": {"acme": key}, "cache_manager": False})


def test_new_keys_differ_and_are_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(map(len, keys)) > 40
