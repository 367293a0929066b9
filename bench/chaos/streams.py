"""Clients that stream seeded answers without end, and what became of each of their requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import grpc
import grpc.aio

from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc

# A client waits no longer than this between two messages; a server that is silent for so long hangs.
SILENCE_S = 90.0
_RETRY_S = 1.0


class Outcome(StrEnum):
    """What became of a request."""

    COMPLETE = "complete and correct"
    WRONG = "WRONG"
    HUNG = "HUNG"
    ENGINE_LOST = "typed error: engine lost"
    NO_ROOM = "typed error: no room"
    ROUTER_LOST = "router lost in mid-stream (UNAVAILABLE)"
    OTHER_ERROR = "OTHER ERROR"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and a seed; its answer never changes."""

    prompt: tuple[int, ...]
    seed: int
    max_tokens: int


def draw_questions(count: int, *, max_tokens: int, vocab_size: int, rng: random.Random) -> list[Question]:
    """Draw questions of 8 to 40 tokens."""

    def draw() -> Question:
        prompt = tuple(rng.randrange(5, vocab_size) for _ in range(rng.randrange(8, 40)))
        return Question(prompt, rng.getrandbits(31), max_tokens)

    return [draw() for _ in range(count)]


@dataclass
class Tally:
    """Counts of outcomes, how often requests went on with another engine, and what went wrong, word for word."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    resumes: int = 0
    retries: int = 0
    complaints: list[str] = field(default_factory=list)


class Clients:
    """Streams answers over whichever router answers."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = targets

    async def ask(self, question: Question) -> tuple[int, ...]:
        """Return an answer; for a cluster in which nothing breaks."""
        async with grpc.aio.insecure_channel(self._targets[0]) as channel:
            token_ids, _ = await self._read(channel, question)
            return token_ids

    async def ask_until(
        self, end_s: float, questions: Sequence[Question], answers: Sequence[tuple[int, ...]], tally: Tally
    ) -> None:
        """Ask questions one after the other until it is time, and compare."""
        rng = random.Random(questions[0].seed)
        while time.monotonic() < end_s:
            index = rng.randrange(len(questions))
            await self._ask_once(rng, questions[index], answers[index], tally)

    async def _ask_once(self, rng: random.Random, question: Question, answer: tuple[int, ...], tally: Tally) -> None:
        async with grpc.aio.insecure_channel(rng.choice(self._targets)) as channel:
            try:
                token_ids, resumes = await self._read(channel, question)
            except TimeoutError:
                tally.outcomes[Outcome.HUNG] += 1
            except grpc.aio.AioRpcError as error:
                outcome = _outcome_of(error)
                if outcome is None:
                    tally.retries += 1
                else:
                    self._note(tally, outcome, f"{error.code().name}: {error.details()}")
                await asyncio.sleep(_RETRY_S)
            else:
                tally.resumes += resumes
                if token_ids == answer:
                    tally.outcomes[Outcome.COMPLETE] += 1
                else:
                    self._note(tally, Outcome.WRONG, f"{question}: {token_ids} instead of {answer}, {resumes} resumes")

    @staticmethod
    def _note(tally: Tally, outcome: Outcome, complaint: str) -> None:
        tally.outcomes[outcome] += 1
        tally.complaints.append(f"{outcome}: {complaint}")

    @staticmethod
    async def _read(channel: grpc.aio.Channel, question: Question) -> tuple[tuple[int, ...], int]:
        """Return an answer's tokens, and how often it went on with another engine."""
        stub = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
        sampling = pb.SamplingParams(
            max_tokens=question.max_tokens, temperature=0.9, seed=question.seed, ignore_eos=True
        )
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=question.prompt), sampling=sampling)
        call = stub.Generate(request)
        token_ids: list[int] = []
        resumes: int | None = None
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = await call.read()
            if message is grpc.aio.EOF:
                assert resumes is not None, "the stream ended well without a completion"
                return tuple(token_ids), resumes
            token_ids += message.token_ids
            if message.HasField("completion"):
                resumes = message.completion.receipt.resumes


def _outcome_of(error: grpc.aio.AioRpcError) -> Outcome | None:
    """Return what an error means to a client; None when no router took the request, and it may ask again."""
    details = (error.details() or "").lower()
    reasons = str(error.trailing_metadata())
    if error.code() is grpc.StatusCode.UNAVAILABLE and "ENGINE_LOST" in reasons:
        return Outcome.ENGINE_LOST
    if "KV_CAPACITY_EXHAUSTED" in reasons:
        return Outcome.NO_ROOM
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return None if "failed to connect" in details or "refused" in details else Outcome.ROUTER_LOST
    return Outcome.OTHER_ERROR
