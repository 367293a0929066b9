"""The simulator: hand-computed times, and what holds for any trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvorum.cluster.bench_trace import TraceEntry
from kvorum.cluster.cli import main
from kvorum.cluster.manager.types import TenantLimits
from kvorum.cluster.sim.engine_model import EngineSpec, retained_mass
from kvorum.cluster.sim.simulator import Mode, Outcomes, Setup, SimTenant, default_tenants, simulate
from kvorum.cluster.sim.summary import jain, percentile, summarise

SPEC = EngineSpec(num_blocks=100, max_sequences=4, prefill_tokens_per_s=1000.0, step_s=0.01, sequence_s=0.002)
FULL = (SimTenant(TenantLimits("full"), 1.0),)
ELASTIC = (SimTenant(TenantLimits("elastic"), 1.0, least_tokens=64),)
MIXED = default_tenants(64)


def replay(
    *requests: tuple[float, int, int],
    mode: Mode = Mode.MANAGED,
    tenants: tuple[SimTenant, ...] = FULL,
    engines: int = 1,
    block_ids: tuple[int, ...] = (),
) -> Outcomes:
    entries = [TraceEntry(at_s, prompt, answer, block_ids) for at_s, prompt, answer in requests]
    return simulate(entries, Setup(engines, SPEC, tenants), mode)


@pytest.mark.parametrize("mode", [*Mode])
def test_one_request_takes_its_prompt_and_its_steps(mode: Mode) -> None:
    (sequence,) = replay((0.0, 500, 50), mode=mode).sequences
    assert sequence.first_token_s == pytest.approx(0.5)
    assert sequence.done_s == pytest.approx(0.5 + 50 * 0.012)
    assert sequence.retained_mass == 1.0


def test_prompts_are_read_one_after_the_other_and_slow_answers_down() -> None:
    first, second = replay((0.0, 500, 50), (0.0, 200, 10)).sequences
    assert second.first_token_s == pytest.approx(0.7)
    # Half speed while the second prompt is read, then two side by side.
    read = 0.2 / 0.024
    assert second.done_s == pytest.approx(0.7 + 10 * 0.014)
    assert first.done_s == pytest.approx(0.7 + 10 * 0.014 + (50 - read - 10) * 0.012)


def test_a_prompt_that_is_cached_is_not_read_again() -> None:
    _, again = replay((0.0, 600, 5), (5.0, 600, 5), block_ids=(1,)).sequences
    assert again.first_token_s == pytest.approx(5.0 + (600 - 512) / 1000)


def test_what_fits_no_engine_is_refused() -> None:
    outcomes = replay((0.0, 1600, 50), (0.0, 100, 5))
    assert [sequence.is_refused for sequence in outcomes.sequences] == [True, False]
    assert outcomes.refusals == {"never_fits": 1}


PRESSURE = ((0.0, 700, 200), (0.1, 700, 200), (0.2, 100, 100))


def test_elastic_requests_shrink_where_others_are_dropped() -> None:
    shrunk = replay(*PRESSURE, tenants=ELASTIC)
    assert sum(engine.counts.shrinks for engine in shrunk.engines) > 0
    assert sum(engine.counts.preemptions for engine in shrunk.engines) == 0
    assert min(sequence.retained_mass for sequence in shrunk.sequences) < 1.0
    dropped = replay(*PRESSURE, tenants=ELASTIC, mode=Mode.PREEMPT)
    assert sum(engine.counts.preemptions for engine in dropped.engines) > 0
    assert all(sequence.retained_mass == 1.0 for sequence in dropped.sequences)


def test_requests_that_are_not_elastic_wait_and_keep_everything() -> None:
    outcomes = replay(*PRESSURE, tenants=FULL)
    assert sum(engine.counts.preemptions for engine in outcomes.engines) == 0
    assert all(sequence.retained_mass == 1.0 and sequence.done_s for sequence in outcomes.sequences)


def test_without_a_line_requests_are_refused() -> None:
    outcomes = replay(*PRESSURE, mode=Mode.REJECT)
    assert outcomes.refusals == {"capacity": 1}


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=25),
    st.sampled_from([*Mode]),
    st.integers(1, 3),
)
def test_every_request_ends_and_every_block_comes_back(
    requests: list[tuple[float, int, int]], mode: Mode, engines: int
) -> None:
    outcomes = replay(*sorted(requests), mode=mode, tenants=MIXED, engines=engines)
    assert all(sequence.is_refused != (sequence.done_s is not None) for sequence in outcomes.sequences)
    assert all(abs(engine.held_blocks) < 1e-6 and not engine.num_sequences for engine in outcomes.engines)
    full = [sequence for sequence in outcomes.sequences if sequence.least is None]
    assert all(sequence.retained_mass == 1.0 for sequence in full)
    if mode is not Mode.REJECT:
        assert not outcomes.refusals


def test_the_same_trace_gives_the_same_result() -> None:
    runs = [replay(*PRESSURE, tenants=MIXED, engines=2) for _ in range(2)]
    assert [each.done_s for each in runs[0].sequences] == [each.done_s for each in runs[1].sequences]


def test_the_curve_of_retained_mass_goes_through_what_was_measured() -> None:
    assert retained_mass(1, 8) == pytest.approx(0.8, abs=0.03)
    assert retained_mass(1, 16) == pytest.approx(0.7, abs=0.03)
    assert retained_mass(5, 5) == 1.0


def test_numbers_are_added_up() -> None:
    outcomes = replay((0.0, 500, 50), (0.0, 1600, 50))
    summary = summarise(outcomes, Setup(1, SPEC, FULL), ttft_slo_s=1.0, least_mass=0.7)
    assert (summary.requests, summary.done, summary.refused, summary.good_share) == (2, 1, 1, 0.5)
    assert summary.goodput_per_s == pytest.approx(1 / (0.5 + 0.6))
    assert summary.ttft_p99_s == pytest.approx(0.5)
    assert jain([1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0]) == 0.5
    assert percentile([], 0.5) == 0.0


def test_the_command_prints_each_mode_and_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [1]}\n')
    assert main(["sim", str(trace), "--engines", "2", "--json"]) == 0
    assert [json.loads(line)["mode"] for line in capsys.readouterr().out.splitlines()] == [*Mode]
    assert main(["sim", str(trace), "--engines", "0"]) == 2
    assert "--engines" in capsys.readouterr().err
    trace.write_text('{"timestamp": 0, "input_length": "many", "output_length": 10}\n')
    assert main(["sim", str(trace)]) == 2
    assert "line 1: column input_length" in capsys.readouterr().err
