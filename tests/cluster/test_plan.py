"""`kvorum plan`: the arithmetic, what people read and what programs read."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvorum.cluster.config import ConfigError
from kvorum.cluster.plan import (
    WELL_KNOWN,
    PlanReport,
    VariantPlan,
    add_arguments,
    parse_bytes,
    plan,
    render,
    run,
)
from kvorum.kernels.sharding import plan_shards
from kvorum.kernels.spec import DecoderSpec
from kvorum.workers.checkpoint.resolve import read_spec

GIB = 1024**3


def plan_of(spec: DecoderSpec, **changes: int | None) -> PlanReport:
    question: dict[str, int | None] = {
        "tensor_parallel_size": 1,
        "pool_bytes": GIB,
        "context_tokens": 4096,
        "budget_tokens": None,
        "block_size": 16,
        "kv_element_bytes": 2,
    }
    return plan(spec, **{**question, **changes})  # type: ignore[arg-type]  # only budget_tokens may be None


def own(report: PlanReport) -> VariantPlan:
    (variant,) = (variant for variant in report.variants if variant.is_model)
    return variant


class TestArithmetic:
    @pytest.mark.parametrize(
        ("name", "kib_per_token"),
        [
            ("Llama-2-7B", 512),
            ("Llama-3-8B", 128),
            ("Llama-3-70B", 320),
            ("Llama-3.1-405B", 504),
            ("Mistral-7B", 128),
            ("Qwen2.5-7B", 56),
            ("Qwen3-32B", 256),
            ("Gemma-3-27B", 496),
            ("SmolLM2-135M", 22.5),
        ],
    )
    def test_well_known_models_take_what_is_known_of_them(self, name: str, kib_per_token: float) -> None:
        spec = WELL_KNOWN[name]
        assert own(plan_of(spec)).kv_bytes_per_token == kib_per_token * 1024 == spec.kv_bytes_per_token(2)

    def test_a_model_is_compared_with_as_many_kv_heads_as_query_heads_and_with_one(self) -> None:
        variants = plan_of(WELL_KNOWN["Llama-3-8B"]).variants
        assert [(v.attention, v.num_kv_heads, v.is_model) for v in variants] == [
            ("MHA", 32, False),
            ("GQA", 8, True),
            ("MQA", 1, False),
        ]
        assert [v.kv_bytes_per_token // variants[2].kv_bytes_per_token for v in variants] == [32, 8, 1]

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("Llama-2-7B", [("MHA", True), ("MQA", False)]), ("Gemma-3-1B", [("MHA", False), ("MQA", True)])],
    )
    def test_a_model_at_one_end_is_that_end(self, name: str, expected: list[tuple[str, bool]]) -> None:
        assert [(v.attention, v.is_model) for v in plan_of(WELL_KNOWN[name]).variants] == expected

    def test_heads_are_those_that_ranks_will_load(self) -> None:
        spec = WELL_KNOWN["SmolLM2-135M"]
        for num_ranks in (1, 2, 4):
            found = own(plan_of(spec, tensor_parallel_size=num_ranks))
            assert found.shards == plan_shards(spec, num_ranks)
            assert found.kv_heads_per_rank == tuple(shard.num_kv_heads for shard in found.shards)

    def test_the_fullest_rank_decides(self) -> None:
        alone, shared = (own(plan_of(WELL_KNOWN["SmolLM2-135M"], tensor_parallel_size=n)) for n in (1, 2))
        assert shared.kv_heads_per_rank == (2, 1)
        assert (alone.rank_bytes_per_token, shared.rank_bytes_per_token) == (3 * 7680, 2 * 7680)
        assert alone.block_bytes * 2 == shared.block_bytes * 3

    def test_replicating_heads_makes_no_more_room(self) -> None:
        spec = WELL_KNOWN["Llama-3-8B"]
        assert (
            own(plan_of(spec, tensor_parallel_size=8)).num_blocks
            == own(plan_of(spec, tensor_parallel_size=16)).num_blocks
        )

    def test_a_block_holds_scores_and_positions_too(self) -> None:
        spec = WELL_KNOWN["SmolLM2-135M"]
        assert own(plan_of(spec)).block_bytes == 16 * spec.num_layers * 3 * (2 * 64 * 2 + 8)

    def test_a_budget_holds_one_token_more_than_it_keeps(self) -> None:
        spec = WELL_KNOWN["SmolLM2-135M"]
        blocks = own(plan_of(spec)).num_blocks
        assert own(plan_of(spec, budget_tokens=511)).sequences_at_budget == blocks // 32
        assert own(plan_of(spec, budget_tokens=512)).sequences_at_budget == blocks // 33
        assert own(plan_of(spec)).sequences_at_budget is None

    def test_a_budget_beyond_the_context_is_no_budget(self) -> None:
        variant = own(plan_of(WELL_KNOWN["SmolLM2-135M"], budget_tokens=10_000))
        assert variant.sequences_at_budget == variant.sequences

    def test_a_pool_too_small_for_one_sequence_fits_none(self) -> None:
        assert own(plan_of(WELL_KNOWN["Llama-2-7B"], pool_bytes=1000)).sequences == 0

    def test_more_ranks_than_query_heads_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="tensor_parallel_size: 10 ranks cannot share 9 query heads"):
            plan_of(WELL_KNOWN["SmolLM2-135M"], tensor_parallel_size=10)

    @given(
        num_kv_heads=st.integers(1, 6),
        group_size=st.integers(1, 4),
        num_ranks=st.integers(1, 24),
        pool_bytes=st.integers(1, 10**7),
        context_tokens=st.integers(1, 300),
        budget_tokens=st.none() | st.integers(1, 300),
        block_size=st.sampled_from([1, 7, 16]),
    )
    def test_what_fits_is_what_filling_block_after_block_finds(
        self,
        num_kv_heads: int,
        group_size: int,
        num_ranks: int,
        pool_bytes: int,
        context_tokens: int,
        budget_tokens: int | None,
        block_size: int,
    ) -> None:
        spec = replace(WELL_KNOWN["SmolLM2-135M"], num_heads=num_kv_heads * group_size, num_kv_heads=num_kv_heads)
        num_ranks = min(num_ranks, spec.num_heads)
        variant = own(
            plan_of(
                spec,
                tensor_parallel_size=num_ranks,
                pool_bytes=pool_bytes,
                context_tokens=context_tokens,
                budget_tokens=budget_tokens,
                block_size=block_size,
            )
        )
        held = max(dealt_one_by_one(num_kv_heads, num_ranks))
        blocks = pool_bytes // (spec.num_layers * held * (2 * 64 * 2 + 8) * block_size)
        assert variant.num_blocks == blocks
        kept = context_tokens if budget_tokens is None else min(context_tokens, budget_tokens + 1)
        found = variant.sequences if budget_tokens is None else variant.sequences_at_budget
        assert found == how_many_fit(blocks, kept, block_size)


def dealt_one_by_one(num_kv_heads: int, num_ranks: int) -> list[int]:
    held = [0] * num_ranks
    for turn in range(max(num_kv_heads, num_ranks)):
        held[turn % num_ranks] += 1
    return held


def how_many_fit(num_blocks: int, tokens: int, block_size: int) -> int:
    sequences = 0
    while True:
        for _ in range(0, tokens, block_size):
            num_blocks -= 1
        if num_blocks < 0:
            return sequences
        sequences += 1


class TestOutput:
    def text(self, report: PlanReport) -> str:
        console = Console(width=80)
        with console.capture() as capture:
            console.print(render(report))
        return capture.get()

    def test_people_read_a_table_that_fits_a_terminal(self) -> None:
        report = plan_of(WELL_KNOWN["SmolLM2-135M"], tensor_parallel_size=2, budget_tokens=512)
        rows = {
            line.split("│")[1].strip(): line.split("│")[2:5] for line in self.text(report).splitlines() if "│" in line
        }
        assert [cell.strip() for cell in rows["KV heads on the ranks"]] == ["5 + 4", "2 + 1", "2 x 1"]
        assert [cell.strip() for cell in rows["KV of one token"]] == ["67.5 KiB", "22.5 KiB", "7.5 KiB"]
        assert [cell.strip() for cell in rows["Sequences of 4,096 tokens"]] == ["6", "16", "33"]
        assert [cell.strip() for cell in rows["... held to 512 tokens"]] == ["51", "128", "256"]

    def test_they_see_what_each_rank_holds(self) -> None:
        text = self.text(plan_of(WELL_KNOWN["SmolLM2-135M"], tensor_parallel_size=4))
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "■" in line]
        assert rows[0] == ["0", "■·· 0*", "■■······· 0-1", "0-383", "0-12,287"]
        assert rows[3][:3] == ["3", "··■ 2", "······■■■ 6-8"]

    def test_many_heads_are_named_and_not_drawn(self) -> None:
        text = self.text(plan_of(WELL_KNOWN["Llama-3-70B"], tensor_parallel_size=8))
        assert "■······· 0" in text
        assert "0-7 " in text
        assert "■" * 2 not in text

    def test_what_was_not_asked_for_is_not_shown(self) -> None:
        text = self.text(plan_of(WELL_KNOWN["SmolLM2-135M"]))
        assert "GQA (this model)" in text
        assert "ranks" not in text
        assert "held to" not in text

    def test_large_numbers_have_units(self) -> None:
        report = plan_of(WELL_KNOWN["Llama-3.1-405B"], context_tokens=131_072, pool_bytes=2000 * GIB)
        assert "1.953 TiB" in self.text(report)


def run_with(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="kvorum plan")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


class TestCommand:
    def test_a_well_known_name_needs_no_files(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_with("llama-3-8b") == 0
        assert capsys.readouterr().out.startswith("Llama-3-8B\n32 layers, 32 query heads of 128")

    def test_programs_read_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["--json", "--kv-budget", "0.25", "--max-model-len", "4096", "--kv-cache-dtype", "float32"]
        assert run_with("SmolLM2-135M", *arguments, "--kv-cache-memory-bytes", "1GiB", "--block-size", "32") == 0
        printed = json.loads(capsys.readouterr().out)
        report = plan_of(WELL_KNOWN["SmolLM2-135M"], budget_tokens=1024, kv_element_bytes=4, block_size=32)
        assert printed["model"] == "SmolLM2-135M"
        assert printed["variants"][1]["sequences_at_budget"] == own(report).sequences_at_budget
        assert (printed["budget_tokens"], printed["pool_bytes"]) == (1024, GIB)

    def test_a_config_file_will_do(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
        }
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        for model in (path, tmp_path):
            assert run_with(str(model), "--json") == 0
            printed = json.loads(capsys.readouterr().out)
            assert (printed["context_tokens"], printed["num_layers"], printed["head_dim"]) == (512, 2, 16)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["./nowhere"], "./nowhere: there is no such file or folder"),
            (["SmolLM2-135M", "--tensor-parallel-size", "10"], "10 ranks cannot share 9 query heads"),
            (["SmolLM2-135M", "--kv-budget", "3"], "kv_budget must be at least 16 tokens, got 3"),
            (["SmolLM2-135M", "--kv-budget", "20.5"], "fraction up to 1 or a whole number of tokens, got 20.5"),
            (["SmolLM2-135M", "--kv-budget", "nan"], "whole number of tokens, got nan"),
        ],
    )
    def test_what_cannot_be_planned_is_said_on_one_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_with(*arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("kvorum plan: ")
        assert message in printed.err
        assert printed.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--kv-cache-memory-bytes", "16Gi"], "'16Gi' is not a number of bytes such as 16GiB"),
            (["--kv-cache-memory-bytes", "0"], "'0' must be at least one byte"),
            (["--block-size", "0"], "'0' is not a whole number of at least 1"),
            (["--max-model-len", "-5"], "'-5' is not a whole number of at least 1"),
        ],
    )
    def test_an_argument_that_makes_no_sense_is_named(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            run_with("SmolLM2-135M", *arguments)
        assert caught.value.code == 2
        assert f"argument {arguments[0]}: {message}" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("1000", 1000),
            ("7B", 7),
            ("16GiB", 16 * GIB),
            ("1.5 GB", 1_500_000_000),
            ("512MiB", 512 * 1024**2),
            ("2KB", 2000),
            ("0.5TiB", 512 * GIB),
        ],
    )
    def test_bytes_may_have_units(self, text: str, expected: int) -> None:
        assert parse_bytes(text) == expected

    def test_planning_needs_no_torch(self) -> None:
        script = "import sys, kvorum.cluster.plan; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"


@pytest.mark.model
def test_the_shape_of_the_embedded_model_is_the_one_in_its_file() -> None:
    known, found = WELL_KNOWN["SmolLM2-135M"], read_spec("smollm2-135m")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(known, name) == getattr(found, name)
    assert (known.num_layers, known.max_position) == (found.num_layers, found.max_position)
