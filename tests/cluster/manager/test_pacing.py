"""How often engines and the manager speak."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.engine_agent import LOOK_PERIOD_S
from kvorum.cluster.manager import pacing
from kvorum.workers.governance import EngineReport, TenantUse

PERIODS = st.floats(0.001, 100.0)


@given(st.integers(1, 100_000))
def test_a_manager_reads_as_many_reports_however_many_engines_there_are(num_engines: int) -> None:
    reports_per_s = num_engines / pacing.report_period_s(num_engines)
    assert abs(reports_per_s - pacing.REPORTS_PER_S) < 1e-6


@given(PERIODS, st.floats(0.0, 1.0, exclude_max=True), st.floats(0.0, 1e6))
def test_an_engine_reports_once_in_each_period_at_its_own_time(period_s: float, phase: float, now_s: float) -> None:
    first = pacing.next_turn_s(now_s, period_s, phase)
    assert now_s - 1e-6 <= first <= now_s + period_s + 1e-6
    second = pacing.next_turn_s(first + period_s / 2, period_s, phase)
    assert abs(second - first - period_s) < 1e-6
    assert abs((first / period_s - phase) - round(first / period_s - phase)) < 1e-3


def test_engines_that_connect_together_do_not_report_together() -> None:
    turns = sorted(pacing.next_turn_s(50.0, 4.0, index / 8) for index in range(8))
    assert [later - earlier for earlier, later in itertools.pairwise(turns)] == [0.5] * 7


def test_before_the_manager_has_said_anything_every_look_is_a_report() -> None:
    assert pacing.next_turn_s(7.0, 0.0, 0.5) == 7.0


@given(PERIODS)
def test_nobody_takes_who_speaks_and_answers_in_time_for_lost(period_s: float) -> None:
    speaks_s = pacing.speak_period_s(period_s) + LOOK_PERIOD_S
    # The message that is not answered is followed by one that is.
    answered_s = pacing.answer_period_s(period_s) + speaks_s
    assert answered_s < pacing.silence_s(period_s)
    assert 2 * speaks_s < pacing.silence_s(period_s)


@given(st.integers(1, 100_000))
def test_allowances_are_not_set_anew_before_all_engines_were_told_of_the_last(num_engines: int) -> None:
    ticks = pacing.share_period_s(num_engines) / pacing.TICK_S
    assert ticks * pacing.DIRECTIVES_PER_TICK >= num_engines - 1e-6


def test_an_engine_is_pressed_that_must_make_room_or_has_little() -> None:
    def report(reserved: int) -> EngineReport:
        return EngineReport(80, 80, 0, tenants={"t": TenantUse(reserved=reserved - 5), "u": TenantUse(reserved=5)})

    assert not pacing.is_pressed(report(70), 0)
    assert pacing.is_pressed(report(71), 0)
    assert pacing.is_pressed(report(5), 1)
    # Elastic sequences fill a pool with little reserved.
    assert pacing.is_pressed(EngineReport(80, 5, 4, tenants={"t": TenantUse(held=71, reserved=10, elastic=61)}), 0)
