"""How a comparison's measurements become what is quoted; the comparison itself is never part of the tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest

# A script's module, which no package holds and no type checker sees.
Unchecked: TypeAlias = Any


@pytest.fixture(scope="module")
def ratios() -> Unchecked:
    path = Path(__file__).parents[2] / "bench" / "peers" / "ratios.py"
    spec = importlib.util.spec_from_file_location("bench_peers_ratios", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def measured(ratios: Unchecked, index: int, peer: str, speed: float | None, workload: str = "w1") -> Unchecked:
    summary = None if speed is None else {"output_tokens_per_s": speed, "ttft_ms": {"p50": 2 * speed}, "itl_ms": None}
    return ratios.Measurement(index, peer, workload, summary=summary)


def test_a_ratio_is_taken_within_a_round(ratios: Unchecked) -> None:
    speeds = {"kvorum": (10.0, 20.0, 60.0), "other": (10.0, 10.0, 20.0)}
    measurements = [measured(ratios, i, peer, speed) for peer, each in speeds.items() for i, speed in enumerate(each)]
    ratio = ratios.ratio_of(measurements, "w1", "output_tokens_per_s", first="kvorum", second="other")
    assert ratio == ratios.Ratio(median=2.0, low=1.0, high=3.0, rounds=3)


def test_rounds_that_have_only_one_of_the_two_do_not_count(ratios: Unchecked) -> None:
    measurements = [
        measured(ratios, 0, "kvorum", 10.0),
        measured(ratios, 0, "other", None),
        measured(ratios, 1, "kvorum", 30.0),
        measured(ratios, 1, "other", 10.0),
        measured(ratios, 2, "kvorum", 30.0),
        measured(ratios, 2, "other", 0.0),
        measured(ratios, 2, "kvorum", 99.0, workload="w2"),
    ]
    ratio = ratios.ratio_of(measurements, "w1", "output_tokens_per_s", first="kvorum", second="other")
    assert ratio == ratios.Ratio(median=3.0, low=3.0, high=3.0, rounds=1)
    assert ratios.ratio_of(measurements, "w2", "output_tokens_per_s", first="kvorum", second="other") is None


def test_medians_are_over_the_rounds_that_were_measured(ratios: Unchecked) -> None:
    measurements = [measured(ratios, i, "p", speed) for i, speed in enumerate((10.0, None, 30.0, 20.0))]
    assert ratios.median_of(measurements, "w1", "output_tokens_per_s", peer="p") == 20.0
    assert ratios.median_of(measurements, "w1", "ttft_ms.p50", peer="p") == 40.0
    assert ratios.median_of(measurements, "w1", "itl_ms.p50", peer="p") is None
    assert ratios.median_of(measurements, "w1", "output_tokens_per_s", peer="nobody") is None
