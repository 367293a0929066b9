"""A request from its plan to its text, whatever protocol it came by.

A request's way through it:
 1. `open` asks admission for a lease and sends the request's sequences to the leased engine.
 2. Each output's tokens become text (detokenizer.py); what is safe to send leaves as a Delta.
 3. A stop string ends the sequence: the engine is told, and the last Delta waits for its receipt.
 4. When the caller leaves `open`, for whatever reason, what still runs is aborted and the lease given back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from kvorum.cluster.admission import Admission, Demand
from kvorum.cluster.detokenizer import IncrementalDetokenizer, StopFilter
from kvorum.cluster.engine_client import EngineClient, RequestStream
from kvorum.cluster.errors import AbortedError
from kvorum.cluster.model import ServedModel
from kvorum.cluster.planning import GenerationRequest
from kvorum.kvstore.errors import DeadlineError, EngineLostError, InvalidRequestError
from kvorum.workers.request import EngineRequest, FinishReason, Receipt, RequestId, RequestOutput, TokenLogprobs

# An engine ends a request at its deadline by itself; a stuck one gets this much longer.
_DEADLINE_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended."""

    reason: FinishReason
    engine_id: str
    receipt: Receipt
    completion_tokens: int


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


class Generator:
    """Runs requests on the engines of one router."""

    def __init__(
        self,
        model: ServedModel,
        engines: Sequence[EngineClient],
        admission: Admission,
        *,
        on_finish: Callable[[FinishReason], None],
    ) -> None:
        """Serve `model` on `engines`; on_finish hears how each sequence ended."""
        self._model = model
        self._engines = engines
        self._admission = admission
        self._on_finish = on_finish
        self._running: dict[RequestId, RequestStream] = {}

    @property
    def running(self) -> tuple[RequestId, ...]:
        """Requests that hold a lease."""
        return tuple(self._running)

    @contextlib.asynccontextmanager
    async def open(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Delta]]:
        """Start a request; leaving the context ends whatever of it still runs."""
        if request.request_id in self._running:
            raise InvalidRequestError(
                f"request_id: a request with id {request.request_id!r} is running", param="request_id"
            )
        lease = await self._admission.admit(_demand(request))
        try:
            stream = self._engine(lease.engine_id).submit(request.sequences)
            self._running[request.request_id] = stream
            try:
                yield self._deltas(request, stream, engine_id=lease.engine_id)
            finally:
                del self._running[request.request_id]
                stream.close()
        finally:
            await self._admission.release(request.request_id)

    def abort(self, request_id: RequestId) -> bool:
        """End a running request, whose caller then sees AbortedError; return whether there was one."""
        stream = self._running.get(request_id)
        if stream:
            stream.abort()
        return stream is not None

    def _engine(self, engine_id: str) -> EngineClient:
        for client in self._engines:
            if client.status and client.status.info.engine_id == engine_id:
                return client
        raise EngineLostError(f"engine {engine_id} was lost before the request reached it")

    async def _deltas(
        self, request: GenerationRequest, stream: RequestStream, *, engine_id: str
    ) -> AsyncIterator[Delta]:
        deadline_s = asyncio.get_running_loop().time() + request.timeout_s + _DEADLINE_GRACE_S
        sequences = {
            sequence.request_id: _Sequence(index, sequence, request, self._model)
            for index, sequence in enumerate(request.sequences)
        }
        while sequences:
            try:
                async with asyncio.timeout_at(deadline_s):
                    output = await stream.next()
            except TimeoutError:
                raise _deadline_error(request) from None
            _raise_failure(output, request)
            sequence = sequences[output.request_id]
            delta = sequence.take(output, engine_id=engine_id)
            if sequence.needs_finish:
                stream.finish(output.request_id)
                sequence.needs_finish = False
            if delta.ending:
                del sequences[output.request_id]
                self._on_finish(delta.ending.reason)
            if delta != Delta(delta.index):
                yield delta


class _Sequence:
    """The text of one sequence so far."""

    def __init__(self, index: int, sequence: EngineRequest, request: GenerationRequest, model: ServedModel) -> None:
        self._index = index
        self._num_tokens = 0
        self._stop = StopFilter(request.stop)
        self.needs_finish = False

        def decode(token_ids: Sequence[int]) -> str:
            return model.tokenizer.decode(token_ids, skip_special_tokens=request.skip_special_tokens)

        self._detokenizer = IncrementalDetokenizer(decode, context=sequence.prompt_token_ids)

    def take(self, output: RequestOutput, *, engine_id: str) -> Delta:
        """Turn one output into what is new for the client."""
        text, count = self._read(output.token_ids)
        if output.finish_reason is None:
            self.needs_finish = self._stop.is_stopped and count > 0
            return Delta(self._index, text, output.token_ids[:count], output.logprobs[:count])
        assert output.receipt, "an engine's final output has a receipt"
        text += self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        reason = FinishReason.STOP if self._stop.is_stopped else output.finish_reason
        ending = Ending(reason, engine_id, output.receipt, self._num_tokens)
        return Delta(self._index, text, output.token_ids[:count], output.logprobs[:count], ending)

    def _read(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the new text and how many of the tokens belong to the answer: none after a stop string."""
        text = ""
        for count, token_id in enumerate(token_ids):
            if self._stop.is_stopped:
                return text, count
            text += self._stop.push(self._detokenizer.push((token_id,)))
            self._num_tokens += 1
        return text, len(token_ids)


def _demand(request: GenerationRequest) -> Demand:
    context_tokens = tuple(
        len(sequence.prompt_token_ids) + sequence.sampling.max_tokens for sequence in request.sequences
    )
    return Demand(request.request_id, context_tokens, request.sequences[0].kv)


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
