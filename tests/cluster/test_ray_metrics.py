"""A registry's samples as Ray's gauges."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from kvorum.cluster.ray_metrics import RayExport

disable_created_metrics()  # type: ignore[no-untyped-call]  # has no types


class FakeRay:
    """Remembers what would be exported, as Ray does."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.tag_keys: dict[str, tuple[str, ...]] = {}

    def make_gauge(self, name: str, help_text: str, labels: tuple[str, ...]) -> FakeGauge:
        assert help_text
        assert name not in self.tag_keys
        self.tag_keys[name] = labels
        return FakeGauge(self, name)


class FakeGauge:
    def __init__(self, ray: FakeRay, name: str) -> None:
        self._ray = ray
        self._name = name

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self._ray.tag_keys[self._name]
        self._ray.values[self._name, tuple(tags.items())] = value


def test_samples_of_all_kinds_are_copied_and_what_is_gone_becomes_zero() -> None:
    registry, ray = CollectorRegistry(), FakeRay()
    Counter("sent", "Sent.", ("to",), registry=registry).labels("a").inc(3)
    Histogram("took", "Took.", buckets=(1.0,), registry=registry).observe(0.5)
    up = Gauge("up", "Up.", ("engine",), registry=registry)
    up.labels("x").set(1)
    export = RayExport(registry, make_gauge=ray.make_gauge)
    export.copy()
    everything = {
        ("sent_total", (("to", "a"),)): 3.0,
        ("took_bucket", (("le", "1.0"),)): 1.0,
        ("took_bucket", (("le", "+Inf"),)): 1.0,
        ("took_count", ()): 1.0,
        ("took_sum", ()): 0.5,
        ("up", (("engine", "x"),)): 1.0,
    }
    assert ray.values == everything
    up.remove("x")
    up.labels("y").set(1)
    export.copy()
    assert ray.values == everything | {("up", (("engine", "x"),)): 0.0, ("up", (("engine", "y"),)): 1.0}


def test_each_copy_is_of_what_was_just_brought_up_to_date() -> None:
    async def main() -> None:
        registry, ray = CollectorRegistry(), FakeRay()
        looks = Gauge("looks", "Looks.", registry=registry)

        async def refresh() -> None:
            looks.inc()

        running = asyncio.create_task(RayExport(registry, make_gauge=ray.make_gauge).run(refresh))
        while not ray.values:
            await asyncio.sleep(0)
        running.cancel()
        assert ray.values == {("looks", ()): 1.0}

    asyncio.run(main())


def test_a_copy_that_fails_is_logged_once_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvorum.cluster.ray_metrics._PERIOD_S", 0.0)

    async def main() -> None:
        registry, ray = CollectorRegistry(), FakeRay()
        looks = Gauge("looks", "Looks.", registry=registry)

        async def refresh() -> None:
            looks.inc()
            if looks._value.get() < 4:
                raise RuntimeError("the manager said nonsense")

        running = asyncio.create_task(RayExport(registry, make_gauge=ray.make_gauge).run(refresh))
        while not ray.values:
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(main())
    assert [record.message for record in caplog.records] == ["metrics are not copied to Ray"]
