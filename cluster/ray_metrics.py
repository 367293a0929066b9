"""A router's registry on the port where Ray's node exports metrics, for clusters that scrape Ray and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from prometheus_client import CollectorRegistry
from ray.util.metrics import Gauge

# Ray's own metrics reach its exporter every ten seconds.
logger = logging.getLogger(__name__)

_PERIOD_S = 10.0


class Gauges(Protocol):
    """How a value reaches Ray."""

    def set(self, value: float, tags: dict[str, str]) -> None:
        """Set the value under its labels."""


_Key = tuple[str, tuple[tuple[str, str], ...]]
MakeGauge = Callable[[str, str, tuple[str, ...]], Gauges]


def make_ray_gauge(name: str, help_text: str, labels: tuple[str, ...]) -> Gauges:
    """Return a gauge of this process in Ray's exporter, where its name gets the prefix ray_."""
    return Gauge(name, description=help_text, tag_keys=labels)


class RayExport:
    """Copies every sample of a registry into Ray's metrics, under the same names and labels.

    Ray's counters and histograms take only what is new; samples that are kept already are set, whatever their kind.
    Ray shows the last value of a gauge for ever, so a sample that is gone, with its engine, is set to 0.
    """

    def __init__(self, registry: CollectorRegistry, *, make_gauge: MakeGauge = make_ray_gauge) -> None:
        self._registry = registry
        self._make_gauge = make_gauge
        self._gauges: dict[str, Gauges] = {}
        self._shown: set[_Key] = set()

    async def run(self, refresh: Callable[[], Awaitable[None]]) -> None:
        """Copy until cancelled; refresh brings what the registry shows up to date."""
        has_failed = False
        while True:
            try:
                await refresh()
                self.copy()
            except Exception:  # whatever it was, the next copy may succeed; routers serve on without
                if not has_failed:
                    logger.exception("metrics are not copied to Ray")
                has_failed = True
            await asyncio.sleep(_PERIOD_S)

    def copy(self) -> None:
        """Copy what the registry shows now."""
        shown: set[_Key] = set()
        for family in self._registry.collect():
            for name, labels, value, *_ in family.samples:
                if name not in self._gauges:
                    self._gauges[name] = self._make_gauge(name, family.documentation, tuple(labels))
                self._gauges[name].set(value, labels)
                shown.add((name, tuple(labels.items())))
        for name, gone in self._shown - shown:
            self._gauges[name].set(0.0, dict(gone))
        self._shown = shown
