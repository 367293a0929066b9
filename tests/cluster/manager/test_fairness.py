"""Lines keep their order, counters bring tenants their share by weight, and nobody saves up idle time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.manager.fairness import Line, ServiceCounters, Waiter
from kvorum.cluster.manager.types import AdmitRequest


def waiter(name: str, priority: int = 0) -> Waiter:
    return Waiter(AdmitRequest(name, "t", (2,), 32, 9.0, priority), 0.0, 9.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=30))
def test_a_line_is_sorted_by_priority_and_arrival_whoever_leaves(steps: list[tuple[bool, int]]) -> None:
    line, model = Line(), list[tuple[int, int, Waiter]]()
    for number, (joins, value) in enumerate(steps):
        if joins or not model:
            one = waiter(f"r{number}", value)
            line.join(one)
            model.append((value, number, one))
        else:
            _, _, gone = model.pop(value % len(model))
            assert line.leave(gone.request.lease_id) is gone
        model.sort(key=lambda each: each[:2])
        assert line.head is (model[0][2] if model else None)
        assert (len(line), line.blocks) == (len(model), 2 * len(model))


def test_tenants_that_always_ask_are_served_by_weight() -> None:
    counters, served = ServiceCounters(), Counter[str]()
    weights = {"a": 1.0, "b": 2.0}
    for tenant in weights:
        counters.enter(tenant, ())
    for _ in range(300):
        tenant = counters.next(weights)
        counters.charge(tenant, 10, weights[tenant])
        served[tenant] += 1
    assert served == {"a": 100, "b": 200}


def test_a_tenant_that_comes_back_gets_no_credit_for_its_absence() -> None:
    counters = ServiceCounters()
    counters.enter("busy", ())
    for _ in range(100):
        counters.charge("busy", 10, 1.0)
    counters.enter("back", ("busy",))
    turns = []
    for _ in range(4):
        turns.append(counters.next(("busy", "back")))
        counters.charge(turns[-1], 10, 1.0)
    assert turns == ["back", "busy", "back", "busy"]


def test_into_an_empty_line_one_comes_where_the_last_one_left() -> None:
    counters = ServiceCounters()
    counters.charge("busy", 1000, 1.0)
    counters.enter("new", ())
    counters.charge("new", 10, 1.0)
    assert counters.next(("busy", "new")) == "busy"
