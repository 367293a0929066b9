"""One schema for file and flags, and mistakes that are reported where they stand."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.config import (
    ONLY_ENGINES,
    ONLY_ROUTERS,
    ClusterConfig,
    ConfigError,
    budget_from_number,
    read_api_key,
)
from kvorum.cluster.config_flags import add_config_arguments, flags_of, load_config
from kvorum.cluster.launcher import running_cluster
from kvorum.kvstore.errors import InvalidRequestError


def parse_flags(*arguments: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return flags_of(parser.parse_args(arguments))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def mistake(path: Path | None, flags: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags)
    return str(caught.value)


def test_without_file_and_flags_everything_has_its_default() -> None:
    assert load_config(None, {}) == ClusterConfig()


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "kvorum.yaml", "max-num-seqs: 3\nport: 1234\nmodel: /models/a\n")
    config = load_config(path, parse_flags("--port", "4321"))
    assert (config.max_num_seqs, config.port, config.model) == (3, 4321, "/models/a")


def test_keys_may_have_dashes_or_underscores_but_not_both(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "a", "max_num_seqs: 3"), {}).max_num_seqs == 3
    assert load_config(write(tmp_path / "b", "max-num-seqs: 3"), {}).max_num_seqs == 3
    path = write(tmp_path / "c", "max-num-seqs: 3\nmax_num_seqs: 4")
    assert mistake(path, {}) == f"{path}: max_num_seqs: given twice"


def test_each_field_has_a_flag() -> None:
    flags = parse_flags(
        *("--max-model-len", "100"),
        *("--dtype", "bfloat16"),
        "--no-enable-prefix-caching",
        *("--gpu-memory-utilization", "0.5"),
        *("--chat-template", "t.jinja"),
    )
    config = load_config(None, flags)
    assert config.max_model_len == 100
    assert config.dtype == "bfloat16"
    assert not config.enable_prefix_caching
    assert config.gpu_memory_utilization == 0.5
    assert config.chat_template == Path("t.jinja")


def test_a_wrong_value_is_named_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "kvorum.yaml", "max-num-seqs: 0\ndtype: fp8\n")
    lines = mistake(path, parse_flags("--port", "many")).splitlines()
    assert f"{path}: max-num-seqs: should be greater than or equal to 1, got 0" in lines
    assert f"{path}: dtype: should be 'auto', 'float32', 'bfloat16' or 'float16', got 'fp8'" in lines
    assert "--port: should be a valid integer, unable to parse string as an integer, got 'many'" in lines


def test_a_misspelt_key_is_answered_with_the_likely_one(tmp_path: Path) -> None:
    path = write(tmp_path / "kvorum.yaml", "max_model_length: 5\n")
    assert mistake(path, {}) == f"{path}: max_model_length: unknown setting; did you mean max_model_len?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "expected `name: value` lines, found a list"),
        ("a: [", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in mistake(write(tmp_path / "kvorum.yaml", text), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "cannot be read" in mistake(tmp_path / "absent.yaml", {})


def test_an_empty_file_is_no_mistake(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "kvorum.yaml", "# nothing\n"), {}) == ClusterConfig()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size: should be greater than or equal to 1"),
        ({"default_policy": "lru"}, "--default-policy: unknown policy 'lru'"),
        ({"default_kv_budget": 0.5}, "--default-kv-budget: kv_budget needs a policy that evicts"),
        ({"default_kv_budget": 2.5, "default_policy": "h2o"}, "--default-kv-budget: kv_budget is a fraction up to 1"),
        ({"default_kv_budget": float("nan"), "default_policy": "h2o"}, "--default-kv-budget: kv_budget is a fraction"),
        ({"max_num_batched_tokens": 8}, "--max-num-batched-tokens: 8 is less than block_size 16"),
        ({"api_key": "k", "api_key_file": "f"}, "--api-key-file: api_key is given too"),
        ({"port": 9000}, "--grpc-port: 9000 collides with port 9000"),
        ({"port": 8999, "grpc_port": 9000, "num_routers": 2}, "--grpc-port: 9000 collides with port 8999"),
    ],
)
def test_rules_that_types_cannot_say(flags: dict[str, object], expected: str) -> None:
    assert expected in mistake(None, {"grpc_port": 9000} | flags)


def test_the_key_may_lie_in_a_file(tmp_path: Path) -> None:
    assert read_api_key(ClusterConfig()) is None
    assert read_api_key(ClusterConfig(api_key="k")) == "k"
    assert read_api_key(ClusterConfig(api_key_file=write(tmp_path / "key", "s3cret\n"))) == "s3cret"


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "cannot be read"), (b"\xff", "cannot be read"), (b" ", "is empty")]
)
def test_a_key_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes | None, expected: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"api_key_file: {path}: {expected}"):
        read_api_key(ClusterConfig(api_key_file=path))


def test_a_cluster_whose_key_file_is_missing_is_not_started(tmp_path: Path) -> None:
    config = ClusterConfig(executor="fake", api_key_file=tmp_path / "key")
    starting = running_cluster(config, address=None, on_phase=lambda _: None, on_progress=lambda _, __: None)
    with pytest.raises(ConfigError, match="api_key_file"):
        starting.__enter__()


@given(st.integers(2, 2**40))
def test_whole_numbers_above_one_are_tokens(number: int) -> None:
    for budget in (budget_from_number(number), budget_from_number(float(number))):
        assert budget == number
        assert isinstance(budget, int)


@given(st.floats(max_value=1, allow_nan=False))
def test_numbers_up_to_one_are_fractions(number: float) -> None:
    assert isinstance(budget_from_number(number), float)


def test_one_is_the_whole_context_and_absent_is_no_limit() -> None:
    assert isinstance(budget_from_number(1), float)
    assert budget_from_number(None) is None


@pytest.mark.parametrize("number", [1.5, float("inf"), float("nan")])
def test_other_numbers_are_refused(number: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        budget_from_number(number)
    assert caught.value.param == "kvorum.kv_budget"


def test_settings_of_one_kind_of_process_do_not_change_the_others() -> None:
    assert ClusterConfig.model_fields.keys() >= ONLY_ENGINES | ONLY_ROUTERS
    assert not ONLY_ENGINES & ONLY_ROUTERS
    config = ClusterConfig(max_num_seqs=3, request_timeout_s=7.0, served_model_name="mine")
    assert config.for_engines() == ClusterConfig(max_num_seqs=3, served_model_name="mine")
    assert config.for_routers() == ClusterConfig(request_timeout_s=7.0, served_model_name="mine")
