"""Admission within one router: never what cannot fit, never more than the engines take, the best engine first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.admission import Demand, LocalAdmission
from kvorum.cluster.engine_status import EngineStatus
from kvorum.kvstore.errors import CapacityError, EngineLostError, NeverFitsError
from kvorum.workers.request import KVParams
from kvtest.stack import DEFAULT_INFO, IDLE_STATS


def status(engine_id: str, *, num_blocks: int = 64, held: int = 0) -> EngineStatus:
    info = replace(DEFAULT_INFO, engine_id=engine_id, num_blocks=num_blocks)
    stats = replace(IDLE_STATS, blocks_free=num_blocks - held, blocks_held=held)
    return EngineStatus(info, stats)


def admission_of(*statuses: EngineStatus) -> LocalAdmission:
    engines = {each.info.engine_id: each for each in statuses}
    return LocalAdmission(lambda: engines)


def demand(name: str = "r", *, tokens: int = 100, sequences: int = 1, kv: KVParams | None = None) -> Demand:
    return Demand(name, "tenant", (tokens,) * sequences, (tokens,) * sequences, kv or KVParams())


def admit(admission: LocalAdmission, *demands: Demand) -> list[str]:
    async def scenario() -> list[str]:
        return [(await admission.admit(each)).engine_id for each in demands]

    return asyncio.run(scenario())


def release(admission: LocalAdmission, *names: str) -> None:
    async def scenario() -> None:
        for name in names:
            await admission.release(name, has_ended=True)

    asyncio.run(scenario())


def test_the_engine_with_most_room_gets_the_request() -> None:
    assert admit(admission_of(status("a", held=10), status("b", held=5)), demand()) == ["b"]


def test_the_engine_that_has_the_prompt_cached_gets_it_unless_it_is_much_fuller() -> None:
    statuses = {"a": status("a", held=6), "b": status("b")}
    admission = LocalAdmission(lambda: statuses)
    prompt = tuple(range(400))

    def ask(name: str, *, salt: str = "") -> str:
        found = admit(admission, replace(demand(name), prompt=prompt, cache_salt=salt))[0]
        release(admission, name)
        return found

    assert ask("first") == "b"
    statuses["b"] = status("b", held=40)
    assert ask("again") == "b"
    assert ask("another tenant", salt="x") == "a"
    full = status("b", held=64)
    statuses["b"] = replace(full, stats=replace(full.stats, num_running=4))
    assert ask("too full") == "a"


def test_requests_in_line_count_against_an_engine() -> None:
    idle, busy = status("a", held=8), status("b")
    busy = replace(busy, stats=replace(busy.stats, num_running=2, num_waiting=2))
    assert admit(admission_of(idle, busy), demand()) == ["a"]


def test_a_burst_is_spread_before_any_engine_reports_it() -> None:
    admission = admission_of(status("a"), status("b"))
    assert sorted(admit(admission, *(demand(f"r{i}") for i in range(4)))) == ["a", "a", "b", "b"]


def test_what_fits_no_engine_even_alone_is_refused_for_good() -> None:
    admission = admission_of(status("a", num_blocks=4), status("b", num_blocks=5))
    assert admit(admission, demand(tokens=80)) == ["b"]
    with pytest.raises(NeverFitsError, match="5"):
        admit(admission, demand("s", tokens=81))


def test_a_budget_makes_it_fit_but_not_with_a_floor_on_quality() -> None:
    admission = admission_of(status("a", num_blocks=4))
    kv = KVParams("h2o", 32)
    assert admit(admission, demand(tokens=5000, kv=kv)) == ["a"]
    with pytest.raises(NeverFitsError):
        admit(admission, demand("s", tokens=5000, kv=replace(kv, min_retained_mass=0.9)))


def test_no_more_are_in_flight_than_run_and_wait() -> None:
    admission = admission_of(status("a"))
    admit(admission, *(demand(f"r{i}", sequences=2) for i in range(4)))
    with pytest.raises(CapacityError) as caught:
        admit(admission, demand("more"))
    assert caught.value.retry_after_s > 0
    release(admission, "r0")
    assert admit(admission, demand("more")) == ["a"]


def test_without_an_engine_there_is_an_error_that_says_so() -> None:
    with pytest.raises(EngineLostError):
        admit(admission_of(), demand())


def test_admitting_and_releasing_are_idempotent() -> None:
    admission = admission_of(status("a"))
    admit(admission, *(demand("same", sequences=8) for _ in range(5)))
    assert admission.num_leases == 1
    release(admission, "same", "same", "other")
    assert admission.num_leases == 0


def test_an_elastic_request_reserves_its_least_and_one_with_a_floor_must_fit_whole() -> None:
    elastic = demand(tokens=1600, kv=KVParams("h2o"))
    assert elastic.sequence_blocks(16) == (9,)
    assert elastic.blocks_alone(16) == 9
    with_floor = demand(tokens=1600, kv=KVParams("h2o", min_retained_mass=0.9))
    assert with_floor.sequence_blocks(16) == (9,)
    assert with_floor.blocks_alone(16) == 100
    assert demand(tokens=1600).sequence_blocks(16) == (100,)
    assert replace(demand(tokens=1600, kv=KVParams("h2o")), least_tokens=16).sequence_blocks(16) == (2,)


def test_an_answer_of_open_length_reserves_what_is_expected_but_must_fit_whole() -> None:
    open_ended = replace(demand(tokens=1600), expected_tokens=(160,))
    assert open_ended.sequence_blocks(16) == (10,)
    assert open_ended.blocks_alone(16) == 100


@given(st.lists(st.tuples(st.sampled_from(["admit", "release"]), st.integers(0, 9), st.integers(1, 4)), max_size=40))
def test_the_limit_holds_whatever_comes_and_goes(steps: list[tuple[str, int, int]]) -> None:
    admission = admission_of(status("a"), status("b"))
    in_flight: dict[str, int] = {}
    for action, number, sequences in steps:
        name = f"r{number}"
        if action == "release":
            release(admission, name)
            in_flight.pop(name, None)
        elif name in in_flight or sum(in_flight.values()) + sequences <= 16:
            admit(admission, demand(name, sequences=sequences))
            in_flight.setdefault(name, sequences)
        else:
            with pytest.raises(CapacityError):
                admit(admission, demand(name, sequences=sequences))
        assert admission.num_leases == len(in_flight)
