"""From measurements to what is quoted: medians over rounds, and the ratio of one peer to another in the same round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Measurement:
    """One peer at one workload in one round. summary: as bench_summary.Summary.as_json; error: why there is none.

    foreign_cores: how many cores others kept busy meanwhile. paused_s: how long the client could not run.
    """

    round: int
    peer: str
    workload: str
    summary: dict[str, Any] | None = None
    error: str | None = None
    start_s: float = 0.0
    memory_bytes: int = 0
    foreign_cores: float = 0.0
    paused_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times a number of the first peer is of the second's, over the rounds that have both."""

    median: float
    low: float
    high: float
    rounds: int


def ratio_of(
    measurements: Sequence[Measurement], workload: str, field: str, *, first: str, second: str
) -> Ratio | None:
    """Compare a field of the summaries, round by round; None when no round has both."""
    ours, theirs = _by_round(measurements, workload, field, first), _by_round(measurements, workload, field, second)
    ratios = [ours[index] / theirs[index] for index in sorted(ours.keys() & theirs.keys()) if theirs[index]]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios)) if ratios else None


def median_of(measurements: Sequence[Measurement], workload: str, field: str, *, peer: str) -> float | None:
    """Return the median of a field over the rounds."""
    values = list(_by_round(measurements, workload, field, peer).values())
    return statistics.median(values) if values else None


def _by_round(measurements: Sequence[Measurement], workload: str, field: str, peer: str) -> dict[int, float]:
    """Return a field, such as `output_tokens_per_s` or `ttft_ms.p50`, of each round in which it was measured."""
    found = {}
    for measurement in measurements:
        value: Any = measurement.summary if (measurement.peer, measurement.workload) == (peer, workload) else None
        for name in field.split("."):
            value = value.get(name) if value else None
        if value is not None:
            found[measurement.round] = float(value)
    return found
