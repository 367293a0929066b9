"""A request whose engine is lost goes on with another, and its client sees one answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.engine_directory import EngineDirectory
from kvorum.cluster.errors import AbortedError
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.generation import Delta, Trail
from kvorum.cluster.planning import GenerationRequest, Prompting
from kvorum.cluster.sampling_fields import SamplingFields
from kvorum.cluster.tenants import DEFAULT_TENANT
from kvorum.kvstore.errors import DeadlineError, EngineLostError
from kvorum.workers.request import FinishReason, RequestId
from kvtest.stack import DEFAULT_INFO, EngineHost
from kvtest.tiny_model import tiny_model
from kvtest.waiting import eventually

PROMPT = "abcdefg"


@dataclass
class Fleet:
    """A frontend and the engines that it finds, each of which can be lost or join."""

    frontend: Frontend
    hosts: dict[str, EngineHost]

    async def join(
        self, name: str, *, step_delay_s: float = 0.005, max_num_seqs: int = 4, num_blocks: int = 64
    ) -> None:
        info = replace(
            DEFAULT_INFO, engine_id=name, max_num_seqs=max_num_seqs, max_num_waiting=0, num_blocks=num_blocks
        )
        self.hosts[name] = await EngineHost.start(info, step_delay_s=step_delay_s)
        await eventually(lambda: name in self.frontend.live_engines())

    async def lose(self, name: str) -> None:
        """Lose an engine as by a killed process: its streams break."""
        await self.hosts.pop(name).stop()

    async def fail(self, name: str) -> None:
        """Have an engine's executor fail in the middle of a step."""

        async def execute(_: object) -> None:
            raise RuntimeError("a collective was aborted")

        self.hosts[name].engine._executor.execute = execute  # type: ignore[assignment,method-assign]

    def the_one_that_runs(self) -> str:
        (name,) = (name for name, host in self.hosts.items() if host.engine.stats().num_running)
        return name

    def plan(self, *, max_tokens: int = 60, **fields: object) -> GenerationRequest:
        prompting = Prompting(RequestId("r"), (tuple(PROMPT.encode()),), "prompt", max_tokens=max_tokens)
        return self.frontend.plan(SamplingFields.model_validate(fields), prompting, tenant=DEFAULT_TENANT)


@contextlib.asynccontextmanager
async def fleet(**options: float) -> AsyncIterator[Fleet]:
    hosts: dict[str, EngineHost] = {}

    async def discover() -> dict[str, str]:
        return {name: host.address for name, host in hosts.items()}

    directory = EngineDirectory(discover, period_s=0.01, retry_interval_s=0.01)
    config = ClusterConfig(**options)  # type: ignore[arg-type]
    frontend = Frontend(config, tiny_model(max_model_len=512), directory, rng=random.Random(0))
    frontend.start()
    it = Fleet(frontend, hosts)
    try:
        yield it
        alive = [host for host in hosts.values() if host.engine._failure is None]
        await eventually(lambda: all(host.is_idle for host in alive) and not frontend.num_running)
        assert not frontend._generator.admission.num_leases  # type: ignore[attr-defined]  # LocalAdmission's
    finally:
        await frontend.stop()
        for host in hosts.values():
            await host.stop()
        await asyncio.sleep(0.01)


async def read(deltas: AsyncIterator[Delta], into: list[Delta]) -> None:
    async for delta in deltas:
        into.append(delta)


def answer_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def expected(num_tokens: int) -> str:
    return (PROMPT * num_tokens)[:num_tokens]


Loss = Callable[[Fleet, str], Awaitable[None]]
LOSSES = pytest.mark.parametrize("loss", [Fleet.lose, Fleet.fail], ids=["killed", "failed"])


@LOSSES
def test_an_answer_goes_on_token_for_token(loss: Loss) -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            await it.join("second")
            deltas: list[Delta] = []
            async with it.frontend.generate(it.plan()) as stream:
                for _ in range(10):
                    deltas.append(await anext(stream))
                lost = it.the_one_that_runs()
                await loss(it, lost)
                await read(stream, deltas)
            assert answer_of(deltas) == expected(60)
            assert sum(len(delta.token_ids) for delta in deltas) == 60
            ending = deltas[-1].ending
            assert ending is not None
            assert ending.engine_id == ({"first", "second"} - {lost}).pop()
            assert (ending.resumes, ending.completion_tokens, ending.reason) == (1, 60, FinishReason.LENGTH)

    asyncio.run(scenario())


def test_all_choices_go_on() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            await it.join("second")
            deltas: list[Delta] = []
            async with it.frontend.generate(it.plan(n=3)) as stream:
                deltas.append(await anext(stream))
                await it.lose(it.the_one_that_runs())
                await read(stream, deltas)
            assert [answer_of(deltas, index) for index in range(3)] == [expected(60)] * 3

    asyncio.run(scenario())


def test_it_waits_for_an_engine_to_come_back() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            deltas: list[Delta] = []
            async with it.frontend.generate(it.plan()) as stream:
                deltas.append(await anext(stream))
                await it.lose("first")
                reading = asyncio.create_task(read(stream, deltas))
                await asyncio.sleep(0.1)
                await it.join("first")
                await reading
            assert answer_of(deltas) == expected(60)

    asyncio.run(scenario())


def test_it_waits_for_room_on_another_engine() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            deltas: list[Delta] = []
            async with it.frontend.generate(it.plan()) as stream:
                deltas.append(await anext(stream))
                await it.join("second", max_num_seqs=1)
                busy = replace(it.plan(max_tokens=100), request_id=RequestId("busy"))
                session = it.hosts["second"].engine.open_session()
                session.submit(replace(busy.sequences[0], request_id=RequestId("busy")))
                await it.lose("first")
                await read(stream, deltas)
            assert answer_of(deltas) == expected(60)

    asyncio.run(scenario())


def test_a_request_that_an_engine_takes_in_part_is_sent_anew_until_it_takes_all() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            deltas: list[Delta] = []
            async with it.frontend.generate(it.plan(n=3)) as stream:
                deltas.append(await anext(stream))
                await it.join("second", max_num_seqs=3)
                # Another router's request, of which this one has not heard.
                other = it.plan(max_tokens=100).sequences[0]
                session = it.hosts["second"].engine.open_session()
                await it.lose("first")
                session.submit(replace(other, request_id=RequestId("another router's")))
                await read(stream, deltas)
            assert [answer_of(deltas, index) for index in range(3)] == [expected(60)] * 3
            assert {delta.ending.resumes for delta in deltas if delta.ending} == {1}
            assert b"kvorum_request_resumes_total 1.0" in it.frontend.metrics.render()

    asyncio.run(scenario())


def test_an_engine_that_is_too_small_ends_it_with_the_loss() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            async with it.frontend.generate(it.plan(max_tokens=400)) as stream:
                await anext(stream)
                await it.join("second", num_blocks=4)
                await it.lose("first")
                with pytest.raises(EngineLostError, match="first was lost"):
                    await read(stream, [])

    asyncio.run(scenario())


def test_an_engine_that_failed_is_not_asked_again_before_it_is_back() -> None:
    async def scenario() -> None:
        async with fleet(max_resumes=1) as it:
            await it.join("first")
            await it.join("second")
            async with it.frontend.generate(it.plan()) as stream:
                await anext(stream)
                lost = it.the_one_that_runs()
                it.hosts[lost].server._heartbeat_interval_s = 0.001
                await it.fail(lost)
                deltas: list[Delta] = []
                await read(stream, deltas)
            assert deltas[-1].ending is not None
            assert deltas[-1].ending.resumes == 1

    asyncio.run(scenario())


def test_it_gives_up_in_time_when_no_engine_comes() -> None:
    async def scenario() -> None:
        async with fleet(resume_timeout_s=0.3) as it:
            await it.join("first")
            async with it.frontend.generate(it.plan()) as stream:
                await anext(stream)
                await it.lose("first")
                with pytest.raises(EngineLostError, match="first was lost"):
                    await read(stream, [])

    asyncio.run(scenario())


def test_it_goes_on_no_oftener_than_it_may() -> None:
    async def scenario() -> None:
        async with fleet(max_resumes=1) as it:
            for name in ("first", "second", "third"):
                await it.join(name)
            async with it.frontend.generate(it.plan(max_tokens=200)) as stream:
                await anext(stream)
                await it.lose(it.the_one_that_runs())
                for _ in range(3):
                    await anext(stream)
                await it.lose(it.the_one_that_runs())
                with pytest.raises(EngineLostError):
                    await read(stream, [])

    asyncio.run(scenario())


def test_a_deadline_holds_across_engines() -> None:
    async def scenario() -> None:
        async with fleet(request_timeout_s=0.5) as it:
            await it.join("first")
            await it.join("second", step_delay_s=0.05)
            async with it.frontend.generate(it.plan(max_tokens=400)) as stream:
                await anext(stream)
                await it.lose(it.the_one_that_runs())
                with pytest.raises((DeadlineError, EngineLostError)):
                    await read(stream, [])

    asyncio.run(scenario())


def test_a_request_that_waits_for_an_engine_can_be_aborted() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            async with it.frontend.generate(it.plan()) as stream:
                await anext(stream)
                await it.lose("first")
                reading = asyncio.create_task(read(stream, []))
                await asyncio.sleep(0.05)
                assert it.frontend.abort(RequestId("r"), tenant=DEFAULT_TENANT)
                with pytest.raises(AbortedError):
                    await reading

    asyncio.run(scenario())


def test_a_request_that_finds_no_engine_waits_for_one() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            deltas: list[Delta] = []
            trail = Trail()

            async def ask() -> None:
                async with it.frontend.generate(it.plan(), trail=trail) as stream:
                    await read(stream, deltas)

            asking = asyncio.create_task(ask())
            await eventually(lambda: bool(trail.attempts))
            await it.join("first")
            await asking
            assert answer_of(deltas) == expected(60)
            assert deltas[-1].ending is not None
            assert deltas[-1].ending.resumes == 0
            assert [attempt.engine_id for attempt in trail.attempts] == ["first"]

    asyncio.run(scenario())


def test_a_request_that_never_had_an_engine_gives_up_in_time() -> None:
    async def scenario() -> None:
        async with fleet(resume_timeout_s=0.3) as it:
            with pytest.raises(EngineLostError, match="no engine is alive"):
                async with it.frontend.generate(it.plan()):
                    pass

    asyncio.run(scenario())


def test_a_request_that_never_had_an_engine_can_be_aborted() -> None:
    async def scenario() -> None:
        async with fleet() as it:

            async def ask() -> None:
                async with it.frontend.generate(it.plan()):
                    pass

            asking = asyncio.create_task(ask())
            await eventually(lambda: it.frontend.abort(RequestId("r"), tenant=DEFAULT_TENANT))
            with pytest.raises(AbortedError):
                await asking

    asyncio.run(scenario())


def test_a_stop_string_that_was_seen_ends_the_answer_on_the_next_engine() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            await it.join("second")
            deltas: list[Delta] = []
            async with it.frontend.generate(it.plan(max_tokens=400, stop=["gab"])) as stream:
                deltas.append(await anext(stream))
                engine = it.hosts[it.the_one_that_runs()].engine
                engine.end = lambda *_: None  # type: ignore[method-assign]  # it never hears of the stop string
                reading = asyncio.create_task(read(stream, deltas))
                await asyncio.sleep(0.3)
                await it.lose(it.the_one_that_runs())
                await reading
            assert answer_of(deltas) == "abcdef"
            assert deltas[-1].ending is not None
            assert deltas[-1].ending.reason is FinishReason.STOP

    asyncio.run(scenario())


def test_engines_that_leave_are_forgotten() -> None:
    async def scenario() -> None:
        async with fleet() as it:
            await it.join("first")
            await it.join("second")
            await it.lose("first")
            await eventually(lambda: list(it.frontend.live_engines()) == ["second"])
            await eventually(lambda: len(it.frontend._engines.clients()) == 1)

    asyncio.run(scenario())
