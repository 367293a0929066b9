"""Dashboards and alerts: well-formed, and about metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from kvtest.promql import (
    DASHBOARDS,
    RULES,
    alert_expressions,
    dashboard_expressions,
    has_prometheus,
    panels_of,
    promtool,
)
from kvtest.registry import metrics_of_everything

needs_promtool = pytest.mark.skipif(not has_prometheus(), reason="there is no promtool (Debian: prometheus)")


def known_names() -> set[str]:
    """Return the names of all series that a router can show."""
    names = set()
    for family in metrics_of_everything().registry.collect():
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def test_every_expression_names_metrics_that_exist() -> None:
    expressions = dashboard_expressions() + alert_expressions()
    assert len(expressions) > 40
    for expression in expressions:
        names = set(re.findall(r"kvorum_\w+", expression.text))
        assert names, expression
        assert names <= known_names(), expression


def test_every_metric_is_looked_at() -> None:
    everything = " ".join(expression.text for expression in dashboard_expressions() + alert_expressions())
    families = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in known_names()}
    assert {family for family in families if family not in everything} == set()


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: Path) -> None:
    panels = panels_of(dashboard)
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own
        assert panel["type"] == "row" or (panel["description"] and panel["targets"]), panel["title"]


def test_dashboards_can_be_provisioned_together() -> None:
    boards = [json.loads(dashboard.read_text()) for dashboard in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len({board["title"] for board in boards}) == 3
    for board in boards:
        variables = {variable["name"] for variable in board["templating"]["list"]}
        assert set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(board))) <= variables


def test_alerts_say_what_is_wrong_and_how_bad_it_is() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            assert set(rule["annotations"]) == {"summary", "description"}
            assert rule["labels"]["severity"] in ("critical", "warning")


@needs_promtool
def test_every_expression_parses(tmp_path: Path) -> None:
    records = [
        {"record": f"kvorum:panel_{number}", "expr": expression.runnable}
        for number, expression in enumerate(dashboard_expressions())
    ]
    panels = tmp_path / "panels.yaml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    checked = promtool("check", "rules", str(panels), str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_each_alert_fires_when_it_should_and_none_else(tmp_path: Path) -> None:
    for file in (RULES, Path(__file__).with_name("alerts.yaml")):
        shutil.copy(file, tmp_path)
    tested = promtool("test", "rules", str(tmp_path / "alerts.yaml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
def test_metrics_pass_prometheus_own_lint() -> None:
    checked = promtool("check", "metrics", text=metrics_of_everything().render().decode())
    assert checked.returncode == 0, checked.stdout + checked.stderr
