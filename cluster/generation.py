"""A request from its plan to its text, whatever protocol it came by.

A request's way through it:
 1. `open` asks admission for a lease and sends the request's sequences to the leased engine.
 2. Each output's tokens become text (detokenizer.py); what is safe to send leaves as a Delta.
 3. When the engine is lost, what is not over goes to another one as prompt + answer so far; the client sees a pause.
    A token depends on what came before it and on (seed, index) alone, so the answer goes on as it would have.
 4. A stop string ends the sequence: the engine is told, and the last Delta waits for its receipt.
 5. When the caller leaves `open`, for whatever reason, what still runs is aborted and the lease given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from kvorum.cluster.admission import Admission, Demand, Lease
from kvorum.cluster.detokenizer import IncrementalDetokenizer, StopFilter
from kvorum.cluster.engine_client import EngineClient, RequestStream
from kvorum.cluster.errors import AbortedError
from kvorum.cluster.model import ServedModel
from kvorum.cluster.planning import GenerationRequest
from kvorum.kvstore.errors import CapacityError, DeadlineError, EngineLostError, InvalidRequestError
from kvorum.workers.request import EngineRequest, FinishReason, Receipt, RequestId, RequestOutput, TokenLogprobs

# An engine ends a request at its deadline by itself; a stuck one gets this much longer.
_DEADLINE_GRACE_S = 2.0
_RESUME_PERIOD_S = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended.

    engine_id, receipt: of the engine that ended it; resumes: how many were lost before. admission_s: how long it waited
    for its leases, before it stood in any engine's queue. ended_s: when, in monotonic seconds. stop_string: that ended
    it, if one did.
    """

    reason: FinishReason
    engine_id: str
    receipt: Receipt
    completion_tokens: int
    resumes: int = 0
    admission_s: float = 0.0
    ended_s: float = 0.0
    stop_string: str | None = None

    @property
    def queued_ms(self) -> float:
        """How long it waited, for leases and in the engine."""
        return 1e3 * self.admission_s + self.receipt.queued_ms


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one sequence; the last one of a sequence has an ending.

    Text may lag behind tokens. logprobs has an entry for each token when asked for, else it is empty.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    ending: Ending | None = None


@dataclass(slots=True)
class Attempt:
    """One try to have a request served, in monotonic seconds; None for what it did not come to.

    asked_s: for a lease. first_token_s: the engine's first one, which need not be the answer's.
    """

    asked_s: float
    engine_id: str = ""
    leased_s: float | None = None
    first_token_s: float | None = None


@dataclass(slots=True)
class Trail:
    """Where a request has been, for those who want to tell of it."""

    attempts: list[Attempt] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How a request goes on when its engine is lost.

    max_resumes: how often. timeout_s: how long it may wait each time for an engine that has room; and at its beginning,
    while no engine is alive.
    """

    max_resumes: int = 3
    timeout_s: float = 30.0


class Generator:
    """Runs requests on the engines of one router."""

    def __init__(
        self,
        model: ServedModel,
        engines: Callable[[], Collection[EngineClient]],
        admission: Admission,
        *,
        resume: ResumePolicy,
        on_resume: Callable[[], None],
    ) -> None:
        """Serve `model` on the engines that there are; on_resume hears of requests that go on after a loss."""
        self.model = model
        self.admission = admission
        self.resume = resume
        self.on_resume = on_resume
        self._engines = engines
        self._running: dict[tuple[str, RequestId], _Run] = {}

    @property
    def num_running(self) -> int:
        """Requests that are not over."""
        return len(self._running)

    @contextlib.asynccontextmanager
    async def open(
        self, request: GenerationRequest, *, trail: Trail | None = None
    ) -> AsyncIterator[AsyncIterator[Delta]]:
        """Start a request; leaving the context ends whatever of it still runs. Where it goes is noted in trail."""
        key = (request.tenant, request.request_id)
        if key in self._running:
            raise InvalidRequestError(
                f"request_id: a request with id {request.request_id!r} is running", param="request_id"
            )
        run = _Run(self, request, trail or Trail())
        self._running[key] = run
        try:
            await run.start()
            yield run.deltas()
        finally:
            del self._running[key]
            await run.close()

    def abort(self, request_id: RequestId, *, tenant: str) -> bool:
        """End a tenant's running request, whose caller then sees AbortedError; return whether there was one."""
        run = self._running.get((tenant, request_id))
        if run:
            run.abort()
        return run is not None

    def engine(self, engine_id: str) -> EngineClient:
        """Return a connected engine; raises EngineLostError."""
        for client in self._engines():
            if client.status and client.status.info.engine_id == engine_id:
                return client
        raise EngineLostError(f"engine {engine_id} was lost before the request reached it")


class _Run:
    """One request on its way over one engine, or over several, one after the other."""

    def __init__(self, generator: Generator, request: GenerationRequest, trail: Trail) -> None:
        self._generator = generator
        self._request = request
        self._trail = trail
        self._deadline_s = _now_s() + request.timeout_s
        self._open = [
            _Sequence(index, sequence, request, generator.model) for index, sequence in enumerate(request.sequences)
        ]
        self._attempts: dict[RequestId, _Sequence] = {}
        self._stream: RequestStream | None = None
        self._lease: Lease | None = None
        self._engine_id = ""
        self._num_attempts = 0
        self._admission_s = 0.0
        self._resumes = 0
        self._lost: EngineLostError | None = None
        self._give_up_s = self._deadline_s
        self._is_aborted = False

    async def start(self) -> None:
        """Send the request to an engine; while there is none, wait as long as for one to resume on."""
        for sequence in self._open:
            if sequence.planned.answer_token_ids:
                await asyncio.to_thread(sequence.take_over)
        give_up_s = min(_now_s() + self._generator.resume.timeout_s, self._deadline_s)
        while True:
            try:
                await self._submit()
            except EngineLostError:
                await self.close()
                self._raise_if_aborted()
                if _now_s() > give_up_s:
                    raise
                await asyncio.sleep(_RESUME_PERIOD_S)
            else:
                return

    async def _submit(self) -> None:
        """Get a lease and send what is not over to the leased engine."""
        attempts = self._trail.attempts
        if not attempts or attempts[-1].engine_id:  # else the last one still waits
            attempts.append(Attempt(_now_s()))
        attempt = attempts[-1]
        lease = await self._generator.admission.admit(self._demand())
        attempt.engine_id, attempt.leased_s = lease.engine_id, _now_s()
        self._admission_s += attempt.leased_s - attempt.asked_s
        self._lease, self._engine_id = lease, lease.engine_id
        self._raise_if_aborted()
        remaining_s = max(0.0, self._deadline_s - _now_s())
        sent = [
            sequence.attempt(self._num_attempts, lease, blocks, timeout_s=remaining_s)
            for sequence, blocks in zip(self._open, lease.sequence_blocks, strict=True)
        ]
        self._num_attempts += 1
        self._attempts = {each.request_id: sequence for each, sequence in zip(sent, self._open, strict=True)}
        self._stream = self._generator.engine(lease.engine_id).submit(sent)

    def _demand(self) -> Demand:
        """Return what the sequences that are not over ask for; each attempt is a lease of its own."""
        request, first = self._request, self._open[0].planned
        return Demand(
            lease_id=f"{request.tenant}/{request.request_id}~{self._num_attempts}",
            tenant=request.tenant,
            context_tokens=tuple(sequence.context_tokens() for sequence in self._open),
            expected_tokens=tuple(sequence.context_tokens(request.expected_answer_tokens) for sequence in self._open),
            kv=first.kv,
            least_tokens=first.terms.least_tokens,
            priority=first.priority,
            max_wait_s=max(0.0, self._deadline_s - _now_s()),
            prompt=first.prompt_token_ids,
            cache_salt=first.cache_salt,
        )

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield what is new until all sequences are over."""
        while self._open:
            try:
                output = await self._next()
            except EngineLostError as lost:
                self._resumes += 1
                await self._resume(lost)
            except CapacityError:
                if self._lost is None:
                    raise
                await asyncio.sleep(_RESUME_PERIOD_S)
                await self._resume(self._lost)
            except InvalidRequestError as error:
                # An engine that can hold less than the one that was lost.
                if self._lost is None:
                    raise
                raise self._lost from error
            else:
                if self._lost is not None:
                    self._note_resumed()
                if delta := self._take(output):
                    yield delta

    def abort(self) -> None:
        """End the request wherever it is."""
        self._is_aborted = True
        if self._stream:
            self._stream.abort()

    def _raise_if_aborted(self) -> None:
        if self._is_aborted:
            raise AbortedError("the request was aborted")

    async def close(self) -> None:
        """Let go of engine and lease."""
        has_ended = self._stream is not None and self._stream.has_ended
        if self._stream:
            self._stream.close()
            self._stream = None
        if self._lease:
            lease, self._lease = self._lease, None
            await self._generator.admission.release(lease.lease_id, has_ended=has_ended)

    async def _next(self) -> RequestOutput:
        assert self._stream, "a run that goes on has an engine"
        try:
            async with asyncio.timeout_at(self._deadline_s + _DEADLINE_GRACE_S):
                output = await self._stream.next()
        except TimeoutError:
            raise _deadline_error(self._request) from None
        _raise_failure(output, self._request)
        return output

    def _take(self, output: RequestOutput) -> Delta | None:
        attempt = self._trail.attempts[-1]
        if attempt.first_token_s is None:
            attempt.first_token_s = _now_s()
        sequence = self._attempts[output.request_id]
        delta = sequence.take(output, self)
        if sequence.needs_finish:
            assert self._stream
            self._stream.finish(output.request_id)
            sequence.needs_finish = False
        if delta.ending:
            self._open.remove(sequence)
        return delta if delta != Delta(delta.index) else None

    def ending(self, reason: FinishReason, receipt: Receipt, *, completion_tokens: int) -> Ending:
        """Return how a sequence of this run ended."""
        return Ending(reason, self._engine_id, receipt, completion_tokens, self._resumes, self._admission_s, _now_s())

    async def _resume(self, lost: EngineLostError) -> None:
        """Go on with another engine, as soon as one has room; raise what was lost when none has in time."""
        policy = self._generator.resume
        if self._lost is None:
            self._lost, self._give_up_s = lost, min(_now_s() + policy.timeout_s, self._deadline_s)
        while True:
            await self.close()
            self._raise_if_aborted()
            if self._resumes > policy.max_resumes or _now_s() > self._give_up_s:
                raise lost
            try:
                await self._submit()
            except (EngineLostError, CapacityError):
                await asyncio.sleep(_RESUME_PERIOD_S)
            except InvalidRequestError as error:
                raise lost from error
            else:
                return

    def _note_resumed(self) -> None:
        logger.info("request %s goes on with engine %s", self._request.request_id, self._engine_id)
        self._lost = None
        self._generator.on_resume()


class _Sequence:
    """The text of one sequence so far."""

    def __init__(self, index: int, sequence: EngineRequest, request: GenerationRequest, model: ServedModel) -> None:
        self._index = index
        self.planned = sequence
        self._token_ids: list[int] = []
        self._stop = StopFilter(request.stop)
        self.needs_finish = False

        def decode(token_ids: Sequence[int]) -> str:
            return model.tokenizer.decode(token_ids, skip_special_tokens=request.skip_special_tokens)

        self._detokenizer = IncrementalDetokenizer(decode, context=sequence.prompt_token_ids)

    def take_over(self) -> None:
        """Read the part of the answer that the client has already."""
        self._read(self.planned.answer_token_ids)

    def context_tokens(self, expected_answer_tokens: int | None = None) -> int:
        """Return the tokens of prompt and answer, the latter as long as it may get or as is expected."""
        answer = self.planned.sampling.max_tokens
        if expected_answer_tokens is not None:
            answer = min(answer, expected_answer_tokens + len(self._token_ids))
        return len(self.planned.prompt_token_ids) + answer

    def attempt(self, number: int, lease: Lease, reserved_blocks: int, *, timeout_s: float) -> EngineRequest:
        """Return what to send to an engine: the sequence, as far as it has come, under an id of this attempt's own."""
        request_id = self.planned.request_id
        self.needs_finish = self._stop.is_stopped  # the engine that was told is gone
        return replace(
            self.planned,
            request_id=RequestId(f"{request_id}~{number}") if number else request_id,
            timeout_s=timeout_s,
            answer_token_ids=tuple(self._token_ids),
            terms=replace(self.planned.terms, lease_id=lease.lease_id, reserved_blocks=reserved_blocks),
        )

    def take(self, output: RequestOutput, run: _Run) -> Delta:
        """Turn one output of a run into what is new for the client."""
        text, count = self._read(output.token_ids)
        if output.finish_reason is None:
            self.needs_finish |= self._stop.is_stopped and count > 0
            return Delta(self._index, text, output.token_ids[:count], output.logprobs[:count])
        assert output.receipt, "an engine's final output has a receipt"
        text += self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        reason = FinishReason.STOP if self._stop.is_stopped else output.finish_reason
        ending = replace(
            run.ending(reason, output.receipt, completion_tokens=len(self._token_ids)), stop_string=self._stop.matched
        )
        return Delta(self._index, text, output.token_ids[:count], output.logprobs[:count], ending)

    def _read(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the new text and how many of the tokens belong to the answer: none after a stop string."""
        text = ""
        for count, token_id in enumerate(token_ids):
            if self._stop.is_stopped:
                return text, count
            text += self._stop.push(self._detokenizer.push((token_id,)))
            self._token_ids.append(token_id)
        return text, len(token_ids)


def _raise_failure(output: RequestOutput, request: GenerationRequest) -> None:
    match output.finish_reason:
        case FinishReason.TIMEOUT:
            raise _deadline_error(request)
        case FinishReason.ABORT:
            raise AbortedError("the request was aborted")
        case FinishReason.ERROR:
            raise EngineLostError(output.error or "the engine failed")


def _deadline_error(request: GenerationRequest) -> DeadlineError:
    return DeadlineError(f"the request took longer than {request.timeout_s:g} s")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
