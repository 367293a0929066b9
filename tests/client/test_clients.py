"""Both clients against a real server and an engine whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvorum.client import (
    AbortedError,
    AuthenticationError,
    ClientError,
    DeadlineError,
    InvalidRequestError,
    Message,
    Model,
    NotFoundError,
    Options,
    PermissionDeniedError,
    Piece,
    TokenLogprobs,
    UnavailableError,
)
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.tenants import Tenant, hash_key
from kvtest.asking import Asker, Connect, asynchronous, blocking
from kvtest.relay import Relay, relay
from kvtest.servers import grpc_server
from kvtest.stack import Stack, running_stack
from kvtest.waiting import eventually

Scenario = Callable[[Asker, Stack, Relay], Awaitable[None]]
GREEDY = Options(max_tokens=5, temperature=0.0)
LONG = Options(max_tokens=60, temperature=0.0)


@pytest.fixture(params=[asynchronous, blocking])
def connect(request: pytest.FixtureRequest) -> Connect:
    found: Connect = request.param
    return found


def run(
    connect: Connect,
    scenario: Scenario,
    config: ClusterConfig | None = None,
    *,
    step_delay_s: float = 0.0,
    api_key: str | None = None,
) -> None:
    async def main() -> None:
        async with (
            running_stack(config, step_delay_s=step_delay_s) as stack,
            grpc_server(stack) as target,
            relay(target) as way,
            connect(way.target, api_key=api_key) as client,
        ):
            await scenario(client, stack, way)
            await stack.wait_until_idle()

    asyncio.run(main())


async def ignore(_: Piece) -> None:
    """Want nothing of a piece."""


class After:
    """Does something once so many pieces have come."""

    def __init__(self, count: int, act: Callable[[], Awaitable[None]]) -> None:
        self._count = count
        self._act = act
        self.pieces: list[Piece] = []

    async def __call__(self, piece: Piece) -> None:
        self.pieces.append(piece)
        if len(self.pieces) == self._count:
            await self._act()


def test_whole_answers(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, __: Relay) -> None:
        answer = await client.complete("abc", GREEDY)
        assert (answer.text, answer.token_ids) == ("abcab", tuple(b"abcab"))
        ending = answer.completion
        assert (ending.finish_reason, ending.prompt_tokens, ending.completion_tokens) == ("length", 3, 5)
        receipt = ending.receipt
        assert (receipt.engine, receipt.policy, receipt.kv_budget, receipt.kv_tokens_held) == (
            "engine-0",
            "full",
            None,
            7,
        )
        assert (await client.complete(tuple(b"xy"), GREEDY)).text == "xyxyx"
        said = await client.chat("x", GREEDY)
        assert said.text == (await client.chat([Message("user", "x")], GREEDY)).text == "user:"

    run(connect, scenario)


def test_options_reach_the_engine(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, __: Relay) -> None:
        logged = await client.complete("ab", Options(max_tokens=2, temperature=0.0, logprobs=1))
        assert logged.logprobs == tuple(TokenLogprobs(0.0, {byte: 0.0}) for byte in b"ab")
        stopped = await client.complete("abc", Options(max_tokens=9, stop=("ca",)))
        assert (stopped.text, stopped.completion.finish_reason) == ("ab", "stop")
        for budget in (16, 0.4):
            held = (
                await client.complete("abc" * 10, Options(max_tokens=20, policy="h2o", kv_budget=budget))
            ).completion
            assert held.receipt.kv_tokens_evicted > 0, budget
            assert held.receipt.kv_budget == (16 if budget == 16 else 20)

    run(connect, scenario)


def test_a_stream_brings_pieces_and_at_last_the_completion(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, __: Relay) -> None:
        *pieces, last = await client.stream("abc", GREEDY, ignore)
        assert "".join(piece.text for piece in [*pieces, last]) == "abcab"
        assert not any(piece.completion for piece in pieces)
        assert last.completion
        assert len({piece.request_id for piece in [*pieces, last]}) == 1

    run(connect, scenario)


def test_tokens_and_models(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, __: Relay) -> None:
        assert bytes(await client.tokenize("hé")).decode() == "hé"
        assert bytes(await client.tokenize([Message("user", "x")])) == b"user: x\nassistant:"
        assert await client.models() == (Model("tiny", 512),)

    run(connect, scenario)


REFUSED = [
    (Options(temperature=3.0), InvalidRequestError, "invalid_value", "temperature"),
    (Options(max_tokens=600), InvalidRequestError, "context_length_exceeded", "max_tokens"),
    (Options(model="other"), NotFoundError, "model_not_found", None),
    (Options(kv_budget=2.5), InvalidRequestError, "invalid_value", "kvorum.kv_budget"),
    (Options(regex="(", max_tokens=5), InvalidRequestError, "invalid_value", "structured_outputs.regex"),
    (Options(regex="a", choices=("a",)), InvalidRequestError, "invalid_value", "structured_outputs"),
    (Options(max_tokens=-1), InvalidRequestError, "invalid_value", None),
]


@pytest.mark.parametrize(("options", "kind", "code", "param"), REFUSED)
def test_what_is_wrong_is_a_typed_error(
    connect: Connect, options: Options, kind: type[ClientError], code: str, param: str | None
) -> None:
    async def scenario(client: Asker, _: Stack, __: Relay) -> None:
        with pytest.raises(kind) as caught:
            await client.complete("abc", options)
        assert (caught.value.code, caught.value.param, caught.value.retry_after_s) == (code, param, None)

    run(connect, scenario)


def test_a_key_is_sent_and_a_wrong_one_refused(connect: Connect) -> None:
    async def served(client: Asker, _: Stack, __: Relay) -> None:
        assert (await client.complete("abc", GREEDY)).text == "abcab"

    async def refused(client: Asker, _: Stack, __: Relay) -> None:
        for call in (client.complete("abc", GREEDY), client.models()):
            with pytest.raises(AuthenticationError) as caught:
                await call
            assert caught.value.code == "invalid_api_key"

    run(connect, served, ClusterConfig(api_key="s3cret"), api_key="s3cret")
    run(connect, refused, ClusterConfig(api_key="s3cret"), api_key="wrong")
    run(connect, refused, ClusterConfig(api_key="s3cret"))


def test_a_full_cluster_is_asked_again_when_it_said(connect: Connect) -> None:
    async def scenario(client: Asker, stack: Stack, way: Relay) -> None:
        async with asynchronous(way.target) as others:
            busy = [asyncio.create_task(others.complete("abc", Options(max_tokens=300))) for _ in range(8)]
            await eventually(lambda: stack.frontend.num_running == 8)
            asked_s = asyncio.get_running_loop().time()
            late = asyncio.create_task(client.complete("abc", GREEDY))
            await eventually(lambda: bool(refusals(stack)))
            stack.host.engine._executor._step_delay_s = 0.0  # type: ignore[attr-defined]  # the fake's
            assert (await late).text == "abcab"
            assert asyncio.get_running_loop().time() - asked_s >= 1.0
            assert {len(answer.token_ids) for answer in await asyncio.gather(*busy)} == {300}

    def refusals(stack: Stack) -> float:
        return sum(
            sample.value
            for family in stack.frontend.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "kvorum_admission_rejections_total"
        )

    run(connect, scenario, step_delay_s=0.02)


def test_a_server_that_comes_back_is_found_again(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, way: Relay) -> None:
        assert (await client.complete("abc", GREEDY)).text == "abcab"
        await way.close()
        calls = [asyncio.create_task(client.complete("abc", GREEDY)), asyncio.create_task(client.models())]
        await asyncio.wait(calls, timeout=0.05)
        assert not any(call.done() for call in calls)
        await way.open()
        await asyncio.gather(*calls)

    run(connect, scenario)


def test_a_server_that_stays_away_is_named(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, way: Relay) -> None:
        await way.close()
        with pytest.raises(UnavailableError, match=f"no server answers at {way.target}") as caught:
            await client.complete("abc", GREEDY)
        assert caught.value.code == "unavailable"
        await way.open()

    run(connect, scenario)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ("aaa", LONG),
        (tuple(b"aaa"), LONG),
        ("aaa", Options(max_tokens=60)),
        ("aaa", Options(max_tokens=60, temperature=0.0, stop=("ab",))),
    ],
    ids=["text", "ids", "sampled", "stop string"],
)
def test_a_stream_that_breaks_goes_on(connect: Connect, prompt: str | tuple[int, ...], options: Options) -> None:
    async def scenario(client: Asker, _: Stack, way: Relay) -> None:
        pieces = await client.stream(prompt, options, After(10, way.cut))
        assert "".join(piece.text for piece in pieces) == "a" * 60
        assert sum(len(piece.token_ids) for piece in pieces) == 60
        ending = pieces[-1].completion
        assert ending
        assert (ending.reconnects, ending.prompt_tokens, ending.completion_tokens) == (1, 3, 60)

    run(connect, scenario, step_delay_s=0.01)


def test_a_deadline_ends_the_answer_and_frees_its_blocks(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, __: Relay) -> None:
        with pytest.raises(DeadlineError):
            await client.complete("abc", Options(max_tokens=400), timeout_s=0.2)

    run(connect, scenario, step_delay_s=0.02)


def test_leaving_a_stream_frees_its_blocks(connect: Connect) -> None:
    async def scenario(client: Asker, stack: Stack, _: Relay) -> None:
        class Left(Exception):
            pass

        async def leave() -> None:
            assert not stack.host.is_idle
            raise Left

        with pytest.raises(Left):
            await client.stream("abc", Options(max_tokens=400), After(3, leave))

    run(connect, scenario, step_delay_s=0.01)


def test_abort_ends_a_request_by_its_name(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, __: Relay) -> None:
        options = Options(max_tokens=400, request_id="mine")
        with pytest.raises(AbortedError):
            await client.stream("abc", options, After(3, lambda: client.abort("mine")))
        with pytest.raises(NotFoundError, match="no request 'mine' is running here"):
            await client.abort("mine")

    run(connect, scenario, step_delay_s=0.01)


def test_what_a_key_may_not_do_is_refused(connect: Connect) -> None:
    async def scenario(client: Asker, _: Stack, __: Relay) -> None:
        with pytest.raises(PermissionDeniedError) as caught:
            await client.complete("abc", Options(policy="h2o", kv_budget=16))
        assert caught.value.code == "permission_denied"

    tenant = Tenant(api_key_sha256=(hash_key("k"),), allowed_policies=("full",))
    run(connect, scenario, ClusterConfig(tenants={"strict": tenant}), api_key="k")
