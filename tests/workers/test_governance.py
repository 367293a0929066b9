"""What an engine tells of its pool: reports, and what changed between two."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvorum.workers.governance import EngineReport, TenantUse

WORTHS = st.sampled_from([TenantUse().worths, (1, *TenantUse().worths[1:])])
USES = st.builds(TenantUse, st.integers(0, 2), st.integers(0, 1), st.just(0), st.just(0), WORTHS).filter(
    lambda use: use != TenantUse()
)
REPORTS = st.builds(
    EngineReport,
    st.just(40),
    st.integers(0, 40),
    st.just(0),
    price=st.sampled_from([0.0, 0.5]),
    tenants=st.dictionaries(st.sampled_from("abc"), USES),
)


@given(REPORTS, REPORTS)
def test_what_changed_since_a_report_leads_from_it_to_the_next(before: EngineReport, after: EngineReport) -> None:
    assert after.since(before).onto(before) == after


@given(REPORTS)
def test_a_report_that_is_the_same_names_no_tenant(report: EngineReport) -> None:
    assert not report.since(report).tenants
