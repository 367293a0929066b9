"""The PromQL of dashboards and alerts, and a real Prometheus to ask."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

ROOT = Path(__file__).parents[3]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
WINDOW_S = 30

_THRESHOLD = re.compile(r"\s*(?<![=!~\"])[<>]=?\s*[\d.]+")
_RANGE = re.compile(r"\[(?:\d+m|\$__rate_interval)(:\d+s)?\]")
_READY_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Expression:
    """One query. where: panel or alert."""

    where: str
    text: str

    @property
    def runnable(self) -> str:
        """The query with everything that Grafana fills in, over a window as short as a test."""
        text = _RANGE.sub(lambda found: f"[{WINDOW_S}s{':1s' if found[1] else ''}]", self.text)
        return re.sub(r"\$\w+", ".*", text)

    @property
    def without_threshold(self) -> str:
        """What an alert looks at, whether or not it is too much."""
        return _THRESHOLD.sub("", self.runnable)


def panels_of(dashboard: Path) -> list[dict[str, Any]]:
    """Return a dashboard's panels."""
    panels: list[dict[str, Any]] = json.loads(dashboard.read_text())["panels"]
    return panels


def dashboard_expressions() -> list[Expression]:
    """Return the queries of all panels."""
    return [
        Expression(f"{dashboard.name}: {panel['title']}", target["expr"])
        for dashboard in DASHBOARDS
        for panel in panels_of(dashboard)
        for target in panel.get("targets", ())
    ]


def alert_expressions() -> list[Expression]:
    """Return the queries of all alerts."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [Expression(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


def has_prometheus() -> bool:
    """Say whether there is a Prometheus to ask."""
    return all(shutil.which(name) for name in ("prometheus", "promtool"))


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    return subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, check=False, timeout=60)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=10)

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **params: str) -> Any:  # noqa: ANN401  # JSON
        """Return an answer's data."""
        answer = self._http.get(f"/api/v1/{path}", params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """Return the numbers that a query has now."""
        result = self.get("query", query=query)["result"]
        return [value for each in result if not math.isnan(value := float(each["value"][1]))]

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextlib.contextmanager
def running_prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes target (host:port) every half second and evaluates the alerts."""
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "kvorum", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    prometheus = Prometheus(f"http://{address}")
    try:
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while not prometheus.is_ready():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s, (folder / "log").read_text()
            time.sleep(0.05)
        yield prometheus
    finally:
        prometheus.close()
        process.terminate()
        process.wait(timeout=30)
