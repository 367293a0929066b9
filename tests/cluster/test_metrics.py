"""The registry: what there is, what it is called, and that the documentation says so."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.core import Metric

from kvorum.cluster.manager.types import ClusterView, TenantView
from kvorum.cluster.metrics import RouterMetrics
from kvorum.cluster.metrics_views import manager_families
from kvorum.cluster.tenant_labels import TenantLabels
from kvtest.counting import samples_of
from kvtest.registry import metrics_of_everything

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(kvorum_\w+)` \| (\w+) \|(.*?)\| .+ \|$", re.MULTILINE)


def labels_of(family: Metric, metrics: RouterMetrics) -> set[str]:
    """Return a family's labels; those of one without samples from how it was declared."""
    declared = {
        name
        for counter in vars(metrics).values()
        if getattr(counter, "_name", None) == family.name
        for name in counter._labelnames
    }
    return declared | {name for sample in family.samples for name in sample.labels} - {"le"}


def test_the_documentation_lists_every_metric_with_its_type_and_labels() -> None:
    metrics = metrics_of_everything()
    registered = {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, labels_of(family, metrics))
        for family in metrics.registry.collect()
    }
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(DOCS.read_text())
    }
    assert documented == registered


def test_names_units_and_help_are_as_prometheus_wants_them() -> None:
    for family in metrics_of_everything().registry.collect():
        assert family.name.startswith("kvorum_")
        assert family.documentation.endswith("."), family.name


def test_what_the_manager_says_is_shown_by_engine_and_tenant() -> None:
    samples = samples_of(metrics_of_everything().render().decode())

    def value(name: str, **labels: str) -> float:
        return samples[f"kvorum_{name}", tuple(sorted(labels.items()))]

    assert value("manager_up") == 1
    assert value("page_price") == 0.5
    assert value("ledger_drift_pages") == 1
    assert value("lease_age_seconds") == 2.5
    assert value("reclaimed_pages_total", engine="engine-0", step="shrink") == 7
    kinds = {"held": 8, "reserved": 9, "cached": 4, "floor": 16, "ceiling": 32}
    assert {kind: value("tenant_kv_pages", tenant="acme", kind=kind) for kind in kinds} == kinds
    assert value("tenant_requests", tenant="acme", state="running") == 1
    assert value("tenant_requests", tenant="acme", state="waiting") == 2


def test_of_a_manager_that_is_lost_only_that_is_shown() -> None:
    metrics = metrics_of_everything()
    metrics.show_manager(None)
    text = metrics.render().decode()
    assert "kvorum_manager_up 0.0" in text
    assert "kvorum_tenant_kv_pages" not in text


def test_tenants_without_a_name_are_added_up_and_no_ceiling_is_no_sample() -> None:
    tenants = tuple(TenantView(name, held, 0, 0, 0, None, 0, 0, 0) for name, held in (("a", 1), ("b", 2), ("c", 3)))
    labels = TenantLabels(("a", "b", "c"), max_names=1)
    labels.count("b")
    labels.give_names()
    pages = next(
        family for family in manager_families(ClusterView((), tenants), labels) if family.name.endswith("_kv_pages")
    )
    held = {sample.labels["tenant"]: sample.value for sample in pages.samples if sample.labels["kind"] == "held"}
    assert held == {"b": 2, "other": 4}
    assert not any(sample.labels["kind"] == "ceiling" for sample in pages.samples)
