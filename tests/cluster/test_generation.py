"""Whatever ends a request, its lease is given back and its blocks are freed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvorum.cluster.admission import Demand, Lease
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.errors import AbortedError
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.generation import Delta
from kvorum.cluster.planning import GenerationRequest, Prompting
from kvorum.cluster.sampling_fields import SamplingFields
from kvorum.cluster.tenants import DEFAULT_TENANT
from kvorum.kvstore.errors import CapacityError, DeadlineError, EngineLostError, InvalidRequestError
from kvorum.workers.request import FinishReason, RequestId, RequestOutput
from kvtest.stack import Stack, running_stack
from kvtest.waiting import eventually


def run(
    scenario: Callable[[Stack], Awaitable[None]],
    *,
    step_delay_s: float = 0.005,
    timeout_s: float = 60.0,
    **options: float,
) -> None:
    async def main() -> None:
        config = ClusterConfig(request_timeout_s=timeout_s, drain_timeout_s=1.0, **options)  # type: ignore[arg-type]
        async with running_stack(config, step_delay_s=step_delay_s) as stack:
            await scenario(stack)
            await stack.wait_until_idle()

    asyncio.run(main())


def plan(
    frontend: Frontend, name: str = "r", *, text: str = "abcdef", max_tokens: int = 400, **fields: object
) -> GenerationRequest:
    prompting = Prompting(RequestId(name), (tuple(text.encode()),), "prompt", max_tokens=max_tokens)
    return frontend.plan(SamplingFields.model_validate(fields), prompting, tenant=DEFAULT_TENANT)


async def read_all(frontend: Frontend, request: GenerationRequest) -> list[Delta]:
    async with frontend.generate(request) as deltas:
        return [delta async for delta in deltas]


def test_leaving_early_aborts_in_the_engine() -> None:
    async def scenario(stack: Stack) -> None:
        async with stack.frontend.generate(plan(stack.frontend)) as deltas:
            await anext(deltas)
            assert stack.host.engine.stats().num_running == 1
        await eventually(lambda: stack.host.engine.stats().num_running == 0)

    run(scenario)


def test_a_stop_string_ends_the_sequence_in_the_engine_too() -> None:
    async def scenario(stack: Stack) -> None:
        deltas = await read_all(stack.frontend, plan(stack.frontend, stop=["de"]))
        assert "".join(delta.text for delta in deltas) == "abc"
        ending = deltas[-1].ending
        assert ending
        assert (ending.reason, ending.completion_tokens) == (FinishReason.STOP, 5)
        assert sum(len(delta.token_ids) for delta in deltas) == 5

    run(scenario)


def test_what_was_held_for_a_stop_string_is_sent_when_none_comes() -> None:
    async def scenario(stack: Stack) -> None:
        deltas = await read_all(stack.frontend, plan(stack.frontend, max_tokens=5, stop=["dex"]))
        assert "".join(delta.text for delta in deltas) == "abcde"
        assert deltas[-1].ending
        assert deltas[-1].ending.reason is FinishReason.LENGTH

    run(scenario)


def test_the_engines_deadline_is_an_error() -> None:
    async def scenario(stack: Stack) -> None:
        with pytest.raises(DeadlineError, match=r"0\.1 s"):
            await read_all(stack.frontend, plan(stack.frontend))

    run(scenario, timeout_s=0.1)


def test_a_stuck_engine_cannot_outlast_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvorum.cluster.generation._DEADLINE_GRACE_S", 0.1)

    async def main() -> None:
        async with running_stack(ClusterConfig(request_timeout_s=0.1), step_delay_s=100) as stack:
            with pytest.raises(DeadlineError):
                await read_all(stack.frontend, plan(stack.frontend))

    asyncio.run(main())


def test_an_abort_from_elsewhere_is_an_error_to_the_caller() -> None:
    async def scenario(stack: Stack) -> None:
        async with stack.frontend.generate(plan(stack.frontend)) as deltas:
            await anext(deltas)
            assert stack.frontend.abort(RequestId("r"), tenant=DEFAULT_TENANT)
            with pytest.raises(AbortedError):
                async for _ in deltas:
                    pass
        assert not stack.frontend.abort(RequestId("r"), tenant=DEFAULT_TENANT)

    run(scenario)


def test_an_engines_failure_is_an_error_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stack: Stack) -> None:
        request = plan(stack.frontend)
        async with stack.frontend.generate(request) as deltas:
            await anext(deltas)
            failed = RequestOutput(
                request.sequences[0].request_id, finish_reason=FinishReason.ERROR, error="out of luck"
            )
            stack.client._streams[failed.request_id].deliver(failed.request_id, failed)
            with pytest.raises(EngineLostError, match="out of luck"):
                async for _ in deltas:
                    pass
        stack.client._streams.clear()
        stack.host.engine.end(failed.request_id, FinishReason.ABORT)

    run(scenario, max_resumes=0)


def test_two_requests_cannot_have_one_id() -> None:
    async def scenario(stack: Stack) -> None:
        async with stack.frontend.generate(plan(stack.frontend)) as deltas:
            await anext(deltas)
            with pytest.raises(InvalidRequestError, match="is running"):
                await read_all(stack.frontend, plan(stack.frontend))
            assert (await anext(deltas)).text

    run(scenario)


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def scenario(stack: Stack) -> None:
        reading = asyncio.create_task(read_all(stack.frontend, plan(stack.frontend, max_tokens=30)))
        await eventually(lambda: stack.host.engine.stats().num_running == 1)
        draining = asyncio.create_task(stack.frontend.drain(5.0))
        await asyncio.sleep(0)
        assert not stack.frontend.is_ready
        with pytest.raises(CapacityError, match="shutting down"):
            await read_all(stack.frontend, plan(stack.frontend, "late"))
        await draining
        assert len(await reading) == 31 or (await reading)[-1].ending

    run(scenario)


def test_draining_does_not_wait_for_ever() -> None:
    async def scenario(stack: Stack) -> None:
        async with stack.frontend.generate(plan(stack.frontend)) as deltas:
            await anext(deltas)
            await stack.frontend.drain(0.05)
            assert stack.frontend.num_running

    run(scenario)


def test_an_engine_lost_between_lease_and_request_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(stack: Stack) -> None:
        async def admit(demand: Demand) -> Lease:
            return Lease(demand.lease_id, "engine-9", (1,))

        monkeypatch.setattr(stack.frontend._generator.admission, "admit", admit)
        with pytest.raises(EngineLostError, match="engine-9"):
            await read_all(stack.frontend, plan(stack.frontend))

    run(scenario, resume_timeout_s=0.2)
