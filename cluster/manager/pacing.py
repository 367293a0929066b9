"""How often engines and the manager speak: the more engines there are, the less often each. Pure.

Otherwise a thousand engines with a report every 0.2 s would leave a manager no time to admit anyone. It need not wait
for them to give room again: routers say which leases have ended. But it would have an engine make room for leases that
have arrived there already, so one whose pool is almost full tells of leases that come and go at once; that is no more
than what is admitted.
"""

from __future__ import annotations

import math

from kvorum.workers.governance import EngineReport

# What one manager reads beside some hundred admissions a second.
REPORTS_PER_S = 250
# How often the manager looks what is due, and how many engines it tells of new allowances then, unless these are in a
# request's way: a directive to each of a thousand, and the answers, take half a second. Orders to reclaim are not held
# up.
TICK_S = 0.05
DIRECTIVES_PER_TICK = 4
# An engine says something at least this often, or with each report where those are rarer. It is answered at least every
# other time. Either end takes silence of the other for its loss, after the time of so many reports at least.
HEARTBEAT_S = 1.0
SILENCE_S = 3.0
_SILENT_REPORTS = 4
# An engine of which this part of the pool is reserved or held has little room left.
_FULL_PART = 7 / 8
_SHARE_PERIOD_S = 1.0


def report_period_s(num_engines: int) -> float:
    """Return how long each engine may take from report to report."""
    return num_engines / REPORTS_PER_S


def share_period_s(num_engines: int) -> float:
    """Return how often a tenant's allowances are set anew: not before all engines were told of the last ones."""
    return max(_SHARE_PERIOD_S, num_engines / DIRECTIVES_PER_TICK * TICK_S)


def next_turn_s(now_s: float, report_period_s: float, phase: float) -> float:
    """Return when an engine reports next; phase: its own, of [0, 1), so that engines do not report all together."""
    if not report_period_s:
        return now_s
    return (math.floor(now_s / report_period_s - phase) + 1 + phase) * report_period_s


def silence_s(report_period_s: float) -> float:
    """Return after how long a silence the other end is lost."""
    return max(SILENCE_S, _SILENT_REPORTS * report_period_s)


def speak_period_s(report_period_s: float) -> float:
    """Return after how long an engine says something although there is nothing new."""
    return max(HEARTBEAT_S, report_period_s)


def answer_period_s(report_period_s: float) -> float:
    """Return for how long an engine that speaks need not be answered."""
    return max(HEARTBEAT_S / 4, 1.5 * report_period_s)


def is_pressed(report: EngineReport, reclaim_blocks: int) -> bool:
    """Say whether leases that come and go on an engine matter at once: it has little room, or was told to make some."""
    reserved = sum(use.reserved for use in report.tenants.values())
    return reclaim_blocks > 0 or max(reserved, report.held_blocks) > _FULL_PART * report.total_blocks
