"""The engine's loop over a fake that repeats its prompts: who gets what, when it ends, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import pytest

from kvorum.kvstore.errors import (
    CapacityError,
    ContextLengthError,
    EngineLostError,
    InvalidRequestError,
    NeverFitsError,
)
from kvorum.kvstore.types import SeqId
from kvorum.workers.engine import Engine, EngineOptions, EngineSession
from kvorum.workers.fake_engine import FakeExecutor
from kvorum.workers.plan import StepPlan, StepResult
from kvorum.workers.request import (
    TENANT_PRIORITY_STEP,
    EngineInfo,
    EngineRequest,
    EventKind,
    FinishReason,
    KVParams,
    RequestId,
    RequestOutput,
    SamplingParams,
)
from kvtest.engines import Answer, request

T = TypeVar("T")

BLOCK_SIZE = 4
INFO = EngineInfo(
    engine_id="fake",
    model_name="fake",
    max_model_len=200,
    vocab_size=1000,
    num_blocks=40,
    block_size=BLOCK_SIZE,
    max_num_seqs=8,
    max_num_waiting=50,
)


GREEDY = SamplingParams(max_tokens=10, temperature=0.0)


class Steps(FakeExecutor):
    """A fake whose steps take a second of an invented clock, can be held up, and can fail."""

    def __init__(self) -> None:
        super().__init__(block_size=BLOCK_SIZE)
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self.fails_at: int | None = None
        self.stopped = False
        self.go = asyncio.Event()
        self.go.set()

    async def execute(self, plan: StepPlan) -> StepResult:
        if plan.rows:
            self.plans.append(plan)
        if len(self.plans) == self.fails_at:
            raise RuntimeError("a rank burned down")
        await self.go.wait()
        result = await super().execute(plan)
        if plan.rows:
            self.now_s += 1.0
        return result

    async def stop(self) -> None:
        self.stopped = True

    def rows_since(self, first: int) -> set[SeqId]:
        """Return the sequences that were computed in the plans from the first on."""
        return {row.seq_id for plan in self.plans[first:] for row in plan.rows}


class Rig:
    """A started engine, one session on it, and everything that came for it."""

    def __init__(self, engine: Engine, steps: Steps) -> None:
        self.engine = engine
        self.steps = steps
        self.session = engine.open_session()

    async def run(self, *items: EngineRequest) -> dict[str, Answer]:
        """Submit all at once and wait for all."""
        for item in items:
            self.session.submit(item)
        return await ended(self.session, *(item.request_id for item in items), engine=self.engine)

    async def steps_taken(self, count: int) -> None:
        """Wait until so many steps have begun."""
        while len(self.steps.plans) < count:
            await asyncio.sleep(0)

    async def idle(self) -> None:
        """Wait until the loop has nothing to do."""
        while self.engine.scheduler.has_work:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)


def take(answers: dict[str, Answer], batch: Sequence[RequestOutput]) -> None:
    for output in batch:
        answer = answers.setdefault(output.request_id, Answer())
        assert answer.finish_reason is None, "something came after the end"
        answer.token_ids += output.token_ids
        answer.logprobs += [entry.logprob for entry in output.logprobs]
        answer.finish_reason, answer.receipt = output.finish_reason, output.receipt


async def ended(session: EngineSession, *names: str, engine: Engine) -> dict[str, Answer]:
    """Wait until the named requests are over, with the accounting audited after each batch."""
    answers: dict[str, Answer] = {}
    while not all(name in answers and answers[name].finish_reason for name in names):
        take(answers, await session.outputs())
        engine.scheduler.audit()
    return answers


@asynccontextmanager
async def running(info: EngineInfo = INFO, *, max_num_batched_tokens: int = 64) -> AsyncIterator[Rig]:
    steps = Steps()
    engine = Engine(
        info,
        steps,
        EngineOptions(max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=True),
        clock=lambda: steps.now_s,
    )
    await engine.start()
    try:
        yield Rig(engine, steps)
    finally:
        steps.go.set()
        await engine.stop()


def in_loop(test: Callable[[], Coroutine[None, None, T]]) -> T:
    """Run a test, which must not hang."""

    async def limited() -> T:
        async with asyncio.timeout(20.0):
            return await test()

    return asyncio.run(limited())


def ask(
    name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, *, max_tokens: int | None = None
) -> EngineRequest:
    """Return a request for ten tokens, unless it says otherwise."""
    if max_tokens is not None:
        sampling = replace(sampling, max_tokens=max_tokens)
    return request(name, prompt, max_tokens=sampling.max_tokens, sampling=sampling)


def repeated(prompt: Sequence[int], count: int) -> list[int]:
    return [prompt[i % len(prompt)] for i in range(count)]


class TestStreams:
    def test_an_answer_is_exact_and_accounted_for(self) -> None:
        async def test() -> Answer:
            async with running() as rig:
                return (await rig.run(ask("a", [3, 1, 4], max_tokens=7)))["a"]

        answer = in_loop(test)
        receipt = answer.receipt
        assert answer.token_ids == [3, 1, 4, 3, 1, 4, 3]
        assert answer.finish_reason is FinishReason.LENGTH
        assert receipt is not None
        assert (receipt.prompt_tokens, receipt.completion_tokens, receipt.prompt_tokens_cached) == (3, 7, 0)
        assert (receipt.kv_tokens_held, receipt.kv_tokens_evicted, receipt.retained_mass) == (9, 0, 1.0)
        assert (receipt.policy, receipt.kv_budget, receipt.preemptions) == ("full", None, 0)

    def test_answers_in_one_batch_do_not_mix(self) -> None:
        prompts = {f"r{n}": [100 * n + i for i in range(n)] for n in range(1, 9)}

        async def test() -> dict[str, Answer]:
            async with running() as rig:
                return await rig.run(*(ask(name, prompt, max_tokens=20) for name, prompt in prompts.items()))

        answers = in_loop(test)
        assert {name: answer.token_ids for name, answer in answers.items()} == {
            name: repeated(prompt, 20) for name, prompt in prompts.items()
        }

    def test_a_step_comes_as_one_batch(self) -> None:
        async def test() -> list[list[RequestOutput]]:
            async with running() as rig:
                rig.session.submit(ask("a", [1], max_tokens=3))
                rig.session.submit(ask("b", [2], max_tokens=3))
                return [await rig.session.outputs() for _ in range(3)]

        batches = in_loop(test)
        tokens = [{output.request_id: output.token_ids for output in batch if output.token_ids} for batch in batches]
        assert tokens == [{"a": (1,), "b": (2,)}] * 3
        assert [output.request_id for output in batches[2] if output.finish_reason] == ["a", "b"]

    def test_log_probabilities_come_with_each_token_when_asked_for(self) -> None:
        async def test() -> dict[str, Answer]:
            async with running() as rig:
                return await rig.run(ask("with", [1, 2], replace(GREEDY, logprobs=1)), ask("without", [1, 2]))

        answers = in_loop(test)
        assert answers["with"].logprobs == [0.0] * 10
        assert answers["without"].logprobs == []

    def test_a_long_prompt_is_computed_in_chunks_within_the_steps_tokens(self) -> None:
        prompt = list(range(90))

        async def test() -> tuple[Answer, list[int]]:
            async with running(max_num_batched_tokens=32) as rig:
                answers = await rig.run(ask("a", prompt, max_tokens=5))
                return answers["a"], [plan.num_tokens for plan in rig.steps.plans]

        answer, sizes = in_loop(test)
        assert answer.token_ids == prompt[:5]
        assert sizes == [32, 32, 26, 1, 1, 1, 1]

    def test_a_cached_prefix_changes_no_token(self) -> None:
        async def test() -> Answer:
            async with running() as rig:
                await rig.run(ask("a", [*range(10), 77]))
                return (await rig.run(ask("b", [*range(10), 88])))["b"]

        second = in_loop(test)
        assert second.token_ids == list(range(10))
        assert second.receipt is not None
        assert second.receipt.prompt_tokens_cached == 8

    def test_an_evicted_token_is_answered_by_the_oldest_left(self) -> None:
        """Held to 16, the newest of 20 prompt tokens: after the first token the answer runs three ahead."""
        prompt = [100 + i for i in range(20)]

        async def test() -> Answer:
            async with running() as rig:
                item = request("a", prompt, max_tokens=20, kv=KVParams("sliding", 16))
                return (await rig.run(item))["a"]

        answer = in_loop(test)
        assert answer.token_ids == [100, *range(104, 120), 100, 104, 105]
        assert answer.receipt is not None
        assert (answer.receipt.kv_tokens_held, answer.receipt.kv_tokens_evicted) == (16, 20 + 19 - 16)
        assert answer.receipt.kv_budget == 16


class TestEnds:
    PROMPT = (5, 6, 7, 8)

    def answer(self, sampling: SamplingParams) -> Answer:
        async def test() -> Answer:
            async with running(replace(INFO, num_blocks=50)) as rig:
                return (await rig.run(ask("a", self.PROMPT, sampling)))["a"]

        return in_loop(test)

    def test_an_end_token_ends_it(self) -> None:
        answer = self.answer(replace(GREEDY, eos_token_ids=(7,)))
        assert (answer.token_ids, answer.finish_reason) == ([5, 6, 7], FinishReason.STOP)

    def test_so_does_a_stop_token(self) -> None:
        answer = self.answer(replace(GREEDY, stop_token_ids=(8, 6)))
        assert (answer.token_ids, answer.finish_reason) == ([5, 6], FinishReason.STOP)

    def test_ignored_end_tokens_do_not(self) -> None:
        answer = self.answer(replace(GREEDY, eos_token_ids=(7,), ignore_eos=True))
        assert (answer.token_ids, answer.finish_reason) == (repeated(self.PROMPT, 10), FinishReason.LENGTH)

    def test_ignoring_end_tokens_leaves_stop_tokens(self) -> None:
        answer = self.answer(replace(GREEDY, eos_token_ids=(6,), stop_token_ids=(7,), ignore_eos=True))
        assert (answer.token_ids, answer.finish_reason) == ([5, 6, 7], FinishReason.STOP)

    @pytest.mark.parametrize(("min_tokens", "length"), [(0, 3), (2, 3), (3, 7), (6, 7), (7, 10)])
    def test_neither_ends_it_among_the_first_min_tokens(self, min_tokens: int, length: int) -> None:
        sampling = replace(GREEDY, min_tokens=min_tokens)
        for ends in (replace(sampling, eos_token_ids=(7,)), replace(sampling, stop_token_ids=(7,))):
            assert len(self.answer(ends).token_ids) == length

    def test_a_stop_token_that_comes_last_is_a_stop(self) -> None:
        answer = self.answer(replace(GREEDY, max_tokens=3, stop_token_ids=(7,)))
        assert answer.finish_reason is FinishReason.STOP

    def test_it_may_fill_the_models_context(self) -> None:
        answer = self.answer(replace(GREEDY, max_tokens=196))
        assert (len(answer.token_ids), answer.finish_reason) == (196, FinishReason.LENGTH)


class TestSessions:
    def test_each_gets_its_own_answers_only(self) -> None:
        async def test() -> tuple[dict[str, Answer], dict[str, Answer]]:
            async with running() as rig:
                other = rig.engine.open_session()
                rig.session.submit(ask("a", [1, 2], max_tokens=5))
                other.submit(ask("b", [3, 4], max_tokens=8))
                return (
                    await ended(rig.session, "a", engine=rig.engine),
                    await ended(other, "b", engine=rig.engine),
                )

        mine, others = in_loop(test)
        assert {name: answer.token_ids for name, answer in mine.items()} == {"a": repeated([1, 2], 5)}
        assert {name: answer.token_ids for name, answer in others.items()} == {"b": repeated([3, 4], 8)}

    def test_none_can_end_anothers_request(self) -> None:
        async def test() -> Answer:
            async with running() as rig:
                other = rig.engine.open_session()
                rig.session.submit(ask("a", [1, 2], max_tokens=20))
                await rig.steps_taken(3)
                other.abort(RequestId("a"))
                other.finish(RequestId("a"))
                other.close()
                return (await ended(rig.session, "a", engine=rig.engine))["a"]

        assert in_loop(test).finish_reason is FinishReason.LENGTH

    def test_an_id_in_use_is_refused_until_its_request_is_over(self) -> None:
        async def test() -> Answer:
            async with running() as rig:
                other = rig.engine.open_session()
                rig.session.submit(ask("a", [1, 2]))
                with pytest.raises(InvalidRequestError, match="'a' is in use") as refused:
                    other.submit(ask("a", [3, 4]))
                assert refused.value.param == "request_id"
                await ended(rig.session, "a", engine=rig.engine)
                other.submit(ask("a", [3, 4]))
                return (await ended(other, "a", engine=rig.engine))["a"]

        assert in_loop(test).token_ids == repeated([3, 4], 10)

    def test_closing_one_ends_all_its_requests(self) -> None:
        async def test() -> dict[str, Answer]:
            async with running() as rig:
                for name in "abc":
                    rig.session.submit(ask(name, [1, 2], max_tokens=100))
                await rig.steps_taken(3)
                rig.session.close()
                return await ended(rig.session, "a", "b", "c", engine=rig.engine)

        assert [answer.finish_reason for answer in in_loop(test).values()] == [FinishReason.ABORT] * 3

    def test_two_hundred_abandoned_ones_leave_nothing(self) -> None:
        async def test() -> None:
            async with running(replace(INFO, max_num_waiting=500)) as rig:
                abandoned = []
                for n in range(200):
                    session = rig.engine.open_session()
                    for name in ("x", "y"):
                        session.submit(ask(f"{name}{n}", [n, n + 1, n + 2], max_tokens=50))
                    if n % 3 == 0:
                        await rig.steps_taken(len(rig.steps.plans) + n % 4)
                    session.close()
                    abandoned.append(weakref.ref(session))
                    del session
                await rig.idle()
                rig.engine.scheduler.audit()
                stats = rig.engine.stats()
                assert (stats.num_running, stats.num_waiting, stats.blocks_held) == (0, 0, 0)
                gc.collect()
                assert [ref() for ref in abandoned if ref() is not None] == []
                assert (await rig.run(ask("after", [1, 2])))["after"].token_ids == repeated([1, 2], 10)

        in_loop(test)


class TestEndingEarly:
    def test_after_an_abort_no_step_computes_it_and_its_blocks_are_soon_free(self) -> None:
        async def test() -> tuple[Answer, set[SeqId], int]:
            async with running() as rig:
                rig.session.submit(ask("gone", [1, 2, 3], max_tokens=100))
                rig.session.submit(ask("stays", [7, 8], max_tokens=40))
                await rig.steps_taken(5)
                begun = len(rig.steps.plans)  # the last of them is under way
                rig.session.abort(RequestId("gone"))
                await rig.steps_taken(begun + 2)
                held = rig.engine.stats().blocks_held
                answers = await ended(rig.session, "gone", "stays", engine=rig.engine)
                return answers["gone"], rig.steps.rows_since(begun), held

        answer, computed, held = in_loop(test)
        assert answer.finish_reason is FinishReason.ABORT
        assert answer.receipt is not None
        assert answer.receipt.completion_tokens == len(answer.token_ids) == 5
        assert computed == {SeqId(1)}
        assert held == 2

    def test_an_aborted_request_that_waited_never_runs(self) -> None:
        async def test() -> tuple[Answer, Steps]:
            async with running(replace(INFO, max_num_seqs=1)) as rig:
                rig.session.submit(ask("first", [1, 2], max_tokens=20))
                rig.session.submit(ask("waits", [3, 4]))
                await rig.steps_taken(3)
                rig.session.abort(RequestId("waits"))
                answers = await ended(rig.session, "first", "waits", engine=rig.engine)
                return answers["waits"], rig.steps

        answer, steps = in_loop(test)
        assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.ABORT)
        assert answer.receipt is not None
        assert (answer.receipt.kv_tokens_held, answer.receipt.prompt_tokens) == (0, 2)
        assert steps.rows_since(0) == {SeqId(0)}

    def test_finishing_at_a_stop_string_is_a_stop_with_a_receipt(self) -> None:
        async def test() -> Answer:
            async with running() as rig:
                rig.session.submit(ask("a", [1, 2, 3], max_tokens=100))
                await rig.steps_taken(4)
                rig.session.finish(RequestId("a"))
                return (await ended(rig.session, "a", engine=rig.engine))["a"]

        answer = in_loop(test)
        assert answer.finish_reason is FinishReason.STOP
        assert answer.receipt is not None
        assert (answer.receipt.completion_tokens, answer.receipt.kv_tokens_held) == (4, 3 + 3)

    def test_ending_what_is_over_or_was_never_there_does_nothing(self) -> None:
        async def test() -> tuple[Answer, int]:
            async with running() as rig:
                await rig.run(ask("a", [1, 2]))
                rig.session.abort(RequestId("a"))
                rig.session.finish(RequestId("never"))
                answers = await rig.run(ask("a", [3, 4]))
                await rig.idle()
                return answers["a"], rig.session._batches.qsize()

        answer, left = in_loop(test)
        assert (answer.token_ids, answer.finish_reason) == (repeated([3, 4], 10), FinishReason.LENGTH)
        assert left == 0

    def test_an_end_that_comes_too_late_does_not_hit_the_next_request_of_that_name(self) -> None:
        async def test() -> tuple[Answer, Answer]:
            async with running() as rig:
                rig.steps.go.clear()
                rig.session.submit(ask("a", [1, 2], max_tokens=1))
                await rig.steps_taken(1)
                rig.session.abort(RequestId("a"))  # its last step is under way
                rig.steps.go.set()
                first = await ended(rig.session, "a", engine=rig.engine)
                await rig.idle()
                return first["a"], (await rig.run(ask("a", [3, 4])))["a"]

        first, second = in_loop(test)
        assert (first.token_ids, first.finish_reason) == ([1], FinishReason.LENGTH)
        assert (second.token_ids, second.finish_reason) == (repeated([3, 4], 10), FinishReason.LENGTH)

    def test_a_refused_request_cannot_be_ended(self) -> None:
        async def test() -> None:
            async with running() as rig:
                with pytest.raises(InvalidRequestError):
                    rig.session.submit(ask("a", []))
                rig.session.abort(RequestId("a"))
                assert not rig.engine._ends

        in_loop(test)


class TestTimeouts:
    def test_a_running_request_ends_at_its_deadline(self) -> None:
        async def test() -> Answer:
            async with running() as rig:
                item = replace(ask("a", [1, 2], max_tokens=50), timeout_s=3.0)
                return (await rig.run(item))["a"]

        answer = in_loop(test)
        assert answer.finish_reason is FinishReason.TIMEOUT
        assert answer.token_ids == [1, 2, 1]  # steps began at seconds 0, 1 and 2
        assert answer.receipt is not None
        assert answer.receipt.completion_tokens == 3

    def test_a_waiting_request_does_too(self) -> None:
        async def test() -> dict[str, Answer]:
            async with running(replace(INFO, max_num_seqs=1)) as rig:
                return await rig.run(ask("first", [1, 2]), replace(ask("waits", [3, 4]), timeout_s=4.0))

        answers = in_loop(test)
        waited = answers["waits"]
        assert answers["first"].finish_reason is FinishReason.LENGTH
        assert (waited.token_ids, waited.finish_reason) == ([], FinishReason.TIMEOUT)
        assert waited.receipt is not None
        assert 4000.0 <= waited.receipt.queued_ms <= 5000.0

    def test_a_deadline_counts_from_the_arrival(self) -> None:
        async def test() -> Answer:
            async with running() as rig:
                await rig.run(ask("before", [1, 2]))
                return (await rig.run(replace(ask("a", [1, 2], max_tokens=5), timeout_s=5.0)))["a"]

        assert in_loop(test).finish_reason is FinishReason.LENGTH


BAD_REQUESTS: dict[str, tuple[EngineRequest, str]] = {
    "no prompt": (ask("a", []), "prompt"),
    "a token below the vocabulary": (ask("a", [1, -1]), "prompt"),
    "a token above the vocabulary": (ask("a", [1, 1000]), "prompt"),
    "a bias outside the vocabulary": (ask("a", [1], replace(GREEDY, logit_bias={1000: 1.0})), "logit_bias"),
    "a stop token outside the vocabulary": (ask("a", [1], replace(GREEDY, stop_token_ids=(-1,))), "stop_token_ids"),
    "a floor below zero": (request("a", [1], max_tokens=1, kv=KVParams("h2o", 16, -0.1)), "kvorum.min_retained_mass"),
    "a floor above one": (request("a", [1], max_tokens=1, kv=KVParams("h2o", 16, 1.1)), "kvorum.min_retained_mass"),
    "nothing to generate": (ask("a", [1], max_tokens=0), "max_tokens"),
    "an answer beyond the context": (ask("a", [1] * 100, max_tokens=101), "max_tokens"),
    "a prompt beyond the context": (ask("a", [1] * 200, max_tokens=1), "prompt"),
    "an unknown policy": (request("a", [1], max_tokens=1, kv=KVParams("lru")), "kvorum.policy"),
    "a bad option": (request("a", [1], max_tokens=1, kv=KVParams("h2o:sinks=99")), "kvorum.policy"),
    "a tiny budget": (request("a", [1], max_tokens=1, kv=KVParams("h2o", 15)), "kvorum.kv_budget"),
    "a budget without a policy": (request("a", [1], max_tokens=1, kv=KVParams("full", 16)), "kvorum.kv_budget"),
    "more than the pool": (ask("a", [1] * 100, max_tokens=61), "prompt"),
    "a floor that needs more than the pool": (
        request("a", [1] * 100, max_tokens=61, kv=KVParams("h2o", 16, 0.5)),
        "prompt",
    ),
}


class TestRefusals:
    @pytest.mark.parametrize("name", BAD_REQUESTS)
    def test_what_can_never_be_served_is_refused_by_its_field(self, name: str) -> None:
        item, param = BAD_REQUESTS[name]

        async def test() -> InvalidRequestError:
            async with running() as rig:
                with pytest.raises(InvalidRequestError) as refused:
                    rig.session.submit(item)
                assert not rig.engine.scheduler.has_work
                return refused.value

        assert in_loop(test).param == param

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("an answer beyond the context", ContextLengthError),
            ("a prompt beyond the context", ContextLengthError),
            ("more than the pool", NeverFitsError),
            ("a floor that needs more than the pool", NeverFitsError),
        ],
    )
    def test_length_and_memory_have_errors_of_their_own(self, name: str, kind: type[InvalidRequestError]) -> None:
        async def test() -> None:
            async with running() as rig:
                with pytest.raises(kind):
                    rig.session.submit(BAD_REQUESTS[name][0])

        in_loop(test)

    @pytest.mark.parametrize(
        "item",
        [
            ask("a", [0, 999], max_tokens=198),
            ask("a", [1] * 100, max_tokens=60),
            request("a", [1] * 100, max_tokens=100, kv=KVParams("h2o", 16)),
        ],
        ids=["just within the vocabulary", "just within the pool", "longer than the pool, with a budget"],
    )
    def test_what_just_fits_is_served(self, item: EngineRequest) -> None:
        async def test() -> Answer:
            info = INFO if len(item.prompt_token_ids) == 100 else replace(INFO, num_blocks=50)
            async with running(info) as rig:
                return (await rig.run(item))["a"]

        answer = in_loop(test)
        assert len(answer.token_ids) == item.sampling.max_tokens

    def test_a_full_engine_says_when_to_come_back(self) -> None:
        async def test() -> tuple[CapacityError, dict[str, Answer]]:
            async with running(replace(INFO, max_num_seqs=1, max_num_waiting=3)) as rig:
                for name in "abcd":
                    rig.session.submit(ask(name, [1, 2]))
                with pytest.raises(CapacityError, match="4 sequences") as refused:
                    rig.session.submit(ask("e", [1, 2]))
                answers = await ended(rig.session, "a", engine=rig.engine)
                rig.session.submit(ask("e", [1, 2]))
                return refused.value, answers | await ended(rig.session, *"bcde", engine=rig.engine)

        error, answers = in_loop(test)
        assert error.retry_after_s > 0.0
        assert [answer.finish_reason for answer in answers.values()] == [FinishReason.LENGTH] * 5


class TestFailure:
    def test_everything_ends_with_an_error_and_the_engine_says_it_is_ill(self) -> None:
        async def test() -> tuple[dict[str, Answer], list[str | None]]:
            async with running(replace(INFO, max_num_seqs=2)) as rig:
                await rig.engine.check_health()
                rig.steps.fails_at = 4
                other = rig.engine.open_session()
                for name in "ab":
                    rig.session.submit(ask(name, [1, 2], max_tokens=50))
                other.submit(ask("waits", [1, 2]))
                answers = await ended(rig.session, "a", "b", engine=rig.engine)
                (last,) = await other.outputs()
                take(answers, [last])
                with pytest.raises(EngineLostError, match="a rank burned down"):
                    await rig.engine.check_health()
                with pytest.raises(EngineLostError):
                    rig.session.submit(ask("late", [1, 2]))
                return answers, [last.error]

        answers, errors = in_loop(test)
        assert {name: answer.finish_reason for name, answer in answers.items()} == dict.fromkeys(
            ("a", "b", "waits"), FinishReason.ERROR
        )
        assert answers["a"].token_ids == [1, 2, 1]
        assert errors == ["the engine failed while it served the request"]

    def test_the_executors_health_is_the_engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def ill(_: FakeExecutor) -> None:
            raise EngineLostError("rank 1 is gone")

        monkeypatch.setattr(FakeExecutor, "check_health", ill)

        async def test() -> None:
            async with running() as rig:
                with pytest.raises(EngineLostError, match="rank 1 is gone"):
                    await rig.engine.check_health()

        in_loop(test)


class TestStop:
    def test_what_runs_and_what_waits_ends_with_an_error(self) -> None:
        async def test() -> tuple[dict[str, Answer], Steps]:
            async with running(replace(INFO, max_num_seqs=1)) as rig:
                rig.session.submit(ask("runs", [1, 2], max_tokens=50))
                rig.session.submit(ask("waits", [1, 2]))
                await rig.steps_taken(3)
                await rig.engine.stop()
                answers: dict[str, Answer] = {}
                while not rig.session._batches.empty():
                    take(answers, await rig.session.outputs())
                return answers, rig.steps

        answers, steps = in_loop(test)
        assert {name: answer.finish_reason for name, answer in answers.items()} == dict.fromkeys(
            ("runs", "waits"), FinishReason.ERROR
        )
        assert steps.stopped

    def test_no_step_begins_afterwards(self) -> None:
        async def test() -> tuple[int, int]:
            async with running() as rig:
                rig.session.submit(ask("a", [1, 2], max_tokens=50))
                await rig.steps_taken(3)
                await rig.engine.stop()
                begun = len(rig.steps.plans)
                for _ in range(10):
                    await asyncio.sleep(0)
                return begun, len(rig.steps.plans)

        begun, later = in_loop(test)
        assert begun == later

    def test_an_engine_that_failed_can_be_stopped(self) -> None:
        async def test() -> bool:
            async with running() as rig:
                rig.steps.fails_at = 1
                await rig.run(ask("a", [1, 2]))
                await rig.engine.stop()
                return rig.steps.stopped

        assert in_loop(test)


class TestOrder:
    def started_in_order(self, *items: EngineRequest) -> list[str]:
        async def test() -> list[str]:
            async with running(replace(INFO, max_num_seqs=1)) as rig:
                await rig.run(*items)
                started = dict.fromkeys(row.seq_id for plan in rig.steps.plans for row in plan.rows)
                return [items[seq_id].request_id for seq_id in started]

        return in_loop(test)

    def test_a_lower_priority_number_runs_earlier_and_equals_in_order_of_arrival(self) -> None:
        items = [
            replace(ask(name, [1, 2], max_tokens=2), priority=priority)
            for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1), ("e", 1))
        ]
        assert self.started_in_order(*items) == ["d", "b", "c", "a", "e"]

    def test_a_request_that_comes_later_with_a_lower_number_overtakes(self) -> None:
        async def test() -> dict[str, Answer]:
            async with running(replace(INFO, max_num_seqs=1)) as rig:
                rig.session.submit(ask("runs", [1, 2], max_tokens=9))
                await rig.steps_taken(3)  # two seconds are over
                rig.session.submit(replace(ask("waits", [1, 2], max_tokens=4), priority=1))
                await rig.steps_taken(5)
                rig.session.submit(ask("overtakes", [1, 2], max_tokens=4))
                return await ended(rig.session, "runs", "waits", "overtakes", engine=rig.engine)

        queued = {name: answer.receipt and answer.receipt.queued_ms for name, answer in in_loop(test).items()}
        assert queued == {"runs": 0.0, "overtakes": 9000.0 - 4000.0, "waits": 13000.0 - 2000.0}

    def test_a_prompt_does_not_wait_for_the_rest_of_a_long_one_that_may_run_later(self) -> None:
        async def test() -> list[list[int]]:
            async with running(max_num_batched_tokens=8) as rig:
                rig.session.submit(ask("long", range(40), max_tokens=1))
                await rig.steps_taken(2)
                rig.session.submit(ask("equal", range(100, 108), max_tokens=1))
                rig.session.submit(replace(ask("urgent", range(200, 208), max_tokens=1), priority=-1))
                await ended(rig.session, "long", "equal", "urgent", engine=rig.engine)
                return [[row.seq_id for row in plan.rows] for plan in rig.steps.plans]

        long, equal, urgent = 0, 1, 2
        assert in_loop(test) == [[long], [long], [urgent], [long], [long], [long], [equal]]

    def test_prompts_of_lower_priority_get_a_quarter_of_a_step_beside_a_decode(self) -> None:
        async def test() -> list[dict[int, int]]:
            async with running(max_num_batched_tokens=32) as rig:
                rig.session.submit(replace(ask("answers", [1, 2], max_tokens=6), priority=-1))
                await rig.steps_taken(2)
                rig.session.submit(ask("later", range(40), max_tokens=1))
                rig.session.submit(replace(ask("equal", range(100, 124), max_tokens=1), priority=-1))
                await ended(rig.session, "answers", "later", "equal", engine=rig.engine)
                return [{row.seq_id: row.step.num_tokens for row in plan.rows} for plan in rig.steps.plans]

        answers, later, equal = 0, 1, 2
        assert in_loop(test) == [
            {answers: 2},
            {answers: 1},
            {answers: 1, equal: 24, later: 4},
            {answers: 1, later: 8},
            {answers: 1, later: 8},
            {answers: 1, later: 8},
            {later: 12},
        ]

    def test_prompts_stay_short_for_ten_seconds_after_a_tenant_of_a_higher_priority(self) -> None:
        async def test(first: int) -> list[int]:
            async with running(max_num_batched_tokens=32) as rig:
                await rig.run(replace(ask("first", [1, 2], max_tokens=1), priority=first))
                await rig.run(ask("later", range(120), max_tokens=1))
                return [row.step.num_tokens for plan in rig.steps.plans[1:] for row in plan.rows]

        assert in_loop(lambda: test(-TENANT_PRIORITY_STEP)) == [*[8] * 9, 32, 16]
        # A request's own priority counts as long as the request is there.
        assert in_loop(lambda: test(-1)) == [32, 32, 32, 24]

    def test_no_step_has_more_sequences_than_allowed(self) -> None:
        async def test() -> list[int]:
            async with running(replace(INFO, max_num_seqs=3)) as rig:
                await rig.run(*(ask(f"r{n}", [n, n], max_tokens=4 + n) for n in range(8)))
                return [len(plan.rows) for plan in rig.steps.plans]

        sizes = in_loop(test)
        assert max(sizes) == 3

    def test_when_blocks_run_out_the_last_in_order_makes_room_and_no_token_changes(self) -> None:
        async def test() -> dict[str, Answer]:
            async with running(replace(INFO, num_blocks=8)) as rig:
                first = replace(ask("first", [1, 2, 3], max_tokens=25), priority=0)
                last = replace(ask("last", [4, 5, 6, 7, 8], max_tokens=20), priority=1)
                return await rig.run(last, first)

        answers = in_loop(test)
        assert answers["first"].token_ids == repeated([1, 2, 3], 25)
        assert answers["last"].token_ids == repeated([4, 5, 6, 7, 8], 20)
        preemptions = {name: answer.receipt and answer.receipt.preemptions for name, answer in answers.items()}
        assert preemptions["first"] == 0
        assert preemptions["last"]
        receipt = answers["last"].receipt
        assert receipt is not None
        lost, resumed = receipt.events[1:3]
        assert (lost.kind, resumed.kind) == (EventKind.PREEMPTED, EventKind.RESUMED)
        assert 0.0 < lost.at_s < resumed.at_s


class TestAccounts:
    def test_stats_count_what_happened(self) -> None:
        async def test() -> None:
            async with running() as rig:
                prompt = list(range(20))
                await rig.run(ask("a", prompt, max_tokens=5))
                await rig.run(ask("b", prompt, max_tokens=5))
                await rig.run(request("c", [*range(500, 520)], max_tokens=10, kv=KVParams("sliding", 16)))
                stats = rig.engine.stats()
                assert stats.steps_total == len(rig.steps.plans) == 5 + 5 + 11  # the last prompt stops to save scores
                assert stats.prompt_tokens_total == 20 + 4 + 20
                assert stats.generation_tokens_total == 20
                assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (60, 16)
                assert stats.evicted_tokens_total == {"full": 0, "sliding": 20 + 9 - 16}
                assert (stats.num_running, stats.num_waiting, stats.preemptions_total) == (0, 0, 0)
                assert stats.blocks_held == 0
                assert stats.blocks_free + stats.blocks_cached == 40

        in_loop(test)

    def test_stats_in_the_middle_see_who_runs_and_who_waits(self) -> None:
        async def test() -> None:
            async with running(replace(INFO, max_num_seqs=2)) as rig:
                for n in range(5):
                    rig.session.submit(ask(f"r{n}", [1, 2, 3, 4, 5], max_tokens=20))
                await rig.steps_taken(2)
                stats = rig.engine.stats()
                assert (stats.num_running, stats.num_waiting, stats.blocks_held) == (2, 3, 4)

        in_loop(test)

    def test_time_in_the_queue_is_in_the_receipt(self) -> None:
        async def test() -> dict[str, Answer]:
            async with running(replace(INFO, max_num_seqs=1)) as rig:
                return await rig.run(ask("a", [1, 2], max_tokens=6), ask("b", [1, 2]))

        queued = {name: answer.receipt and answer.receipt.queued_ms for name, answer in in_loop(test).items()}
        assert queued == {"a": 0.0, "b": 6000.0}

    def test_an_idle_engine_takes_no_steps_and_wakes_for_a_request(self) -> None:
        async def test() -> tuple[int, int]:
            async with running() as rig:
                await rig.run(ask("a", [1, 2]))
                await rig.idle()
                before = len(rig.steps.plans)
                for _ in range(50):
                    await asyncio.sleep(0)
                idle = len(rig.steps.plans) - before
                await rig.run(ask("b", [1, 2], max_tokens=3))
                return idle, len(rig.steps.plans) - before

        assert in_loop(test) == (0, 3)

    @pytest.mark.parametrize(("prompt_tokens", "blocks"), [(4, 2), (12, 4)])
    def test_a_second_more_costs_the_blocks_held_in_it(self, prompt_tokens: int, blocks: int) -> None:
        """The prompt fills its blocks; the next four tokens share one more."""

        async def test() -> list[float]:
            charged = []
            for max_tokens in range(2, 6):
                async with running() as rig:
                    answers = await rig.run(ask("a", range(prompt_tokens), max_tokens=max_tokens))
                    receipt = answers["a"].receipt
                    assert receipt is not None
                    charged.append(receipt.kv_page_seconds)
            return [later - sooner for sooner, later in pairwise(charged)]

        assert in_loop(test) == [float(blocks)] * 3


class TestAccountsAndEnds:
    def test_held_blocks_are_charged_by_the_second_until_the_end(self) -> None:
        """Four steps of a second: one block for the prompt's 4 tokens, 2 for the three that follow."""

        async def test() -> dict[str, Answer]:
            async with running() as rig:
                return await rig.run(ask("a", [1, 2, 3, 4], max_tokens=4), ask("b", [5], max_tokens=1))

        charged = {name: answer.receipt and answer.receipt.kv_page_seconds for name, answer in in_loop(test).items()}
        assert charged == {"a": 1.0 + 2.0 + 2.0 + 2.0, "b": 1.0}

    def test_an_abort_frees_the_blocks_before_the_next_step(self) -> None:
        async def test() -> int:
            async with running() as rig:
                rig.session.submit(ask("gone", [1, 2, 3], max_tokens=100))
                rig.session.submit(ask("stays", [7, 8], max_tokens=40))
                await rig.steps_taken(5)
                begun = len(rig.steps.plans)
                rig.session.abort(RequestId("gone"))
                await rig.steps_taken(begun + 1)
                return rig.engine.stats().blocks_held

        assert in_loop(test) == 2

    def test_a_swapped_sequence_goes_on_as_if_nothing_had_happened(self) -> None:
        prompt = [100 + i for i in range(20)]
        moved = replace(request("moved", prompt, max_tokens=60, kv=KVParams("sliding", 16)), priority=1)
        rival = ask("rival", [7, 8, 9], max_tokens=40)

        async def test(num_blocks: int, *items: EngineRequest) -> dict[str, Answer]:
            async with running(replace(INFO, num_blocks=num_blocks)) as rig:
                return await rig.run(*items)

        alone = asyncio.run(test(40, moved))["moved"]
        beside = asyncio.run(test(11, moved, rival))["moved"]
        assert beside.receipt is not None
        assert beside.receipt.preemptions > 0
        assert beside.token_ids == alone.token_ids

    def test_a_stopped_engine_takes_no_request(self) -> None:
        async def test() -> None:
            async with running() as rig:
                await rig.engine.stop()
                with pytest.raises(EngineLostError):
                    rig.session.submit(ask("late", [1, 2]))

        in_loop(test)

    def test_the_fakes_receipt_counts_what_is_held(self) -> None:
        async def test() -> Answer:
            async with running() as rig:
                item = request("a", [100 + i for i in range(20)], max_tokens=20, kv=KVParams("sliding", 16))
                return (await rig.run(item))["a"]

        receipt = in_loop(test).receipt
        assert receipt is not None
        assert receipt.retained_mass == 16 / 39
