"""An engine without a model: answer token i is prompt token i modulo the prompt's length.

It keeps the engine's contract (queue, slots, blocks, stops, abort) with the simplest bookkeeping that is right, so that
tests of what stands in front of an engine know each token and each block in advance. Nothing is cached or evicted.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace

from kvorum.kvstore.errors import CapacityError, NeverFitsError
from kvorum.workers.request import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    Receipt,
    RequestId,
    RequestOutput,
    TokenLogprobs,
)

DEFAULT_INFO = EngineInfo(
    engine_id="echo",
    model_name="echo",
    max_model_len=512,
    vocab_size=1000,
    num_blocks=64,
    block_size=16,
    max_num_seqs=4,
    max_num_waiting=4,
)


@dataclass(eq=False)
class _Sequence:
    session: EchoSession
    request: EngineRequest
    arrived_s: float
    answer: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


class EchoSession:
    def __init__(self, engine: EchoEngine) -> None:
        self._engine = engine
        self._outputs: list[RequestOutput] = []
        self._has_outputs = asyncio.Event()

    def submit(self, request: EngineRequest) -> None:
        self._engine.queue(self, request)

    def abort(self, request_id: RequestId) -> None:
        self._engine.end(self, request_id, reason=FinishReason.ABORT)

    def finish(self, request_id: RequestId) -> None:
        self._engine.end(self, request_id, reason=FinishReason.STOP)

    async def outputs(self) -> list[RequestOutput]:
        await self._has_outputs.wait()
        self._has_outputs.clear()
        outputs, self._outputs = self._outputs, []
        return outputs

    def close(self) -> None:
        self._engine.end_all(self)

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)

    def end_step(self) -> None:
        if self._outputs:
            self._has_outputs.set()


class EchoEngine:
    def __init__(self, info: EngineInfo = DEFAULT_INFO, *, step_s: float = 0.001) -> None:
        self.info = info
        self.step_s = step_s
        self.is_healthy = True
        self.steps = 0
        self._totals = {"prompt": 0, "generation": 0}
        self._running: list[_Sequence] = []
        self._waiting: list[_Sequence] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        assert self._task
        self._task.cancel()

    async def check_health(self) -> None:
        if not self.is_healthy:
            raise RuntimeError("rank 0 is dead")

    def open_session(self) -> EchoSession:
        return EchoSession(self)

    def stats(self) -> EngineStats:
        held = sum(self._blocks(len(seq.request.prompt_token_ids) + len(seq.answer)) for seq in self._running)
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            blocks_free=self.info.num_blocks - held,
            blocks_held=held,
            blocks_cached=0,
            steps_total=self.steps,
            prompt_tokens_total=self._totals["prompt"],
            generation_tokens_total=self._totals["generation"],
            prefix_cache_queries_total=0,
            prefix_cache_hits_total=0,
            preemptions_total=0,
        )

    def queue(self, session: EchoSession, request: EngineRequest) -> None:
        if self._blocks(len(request.prompt_token_ids) + request.sampling.max_tokens) > self.info.num_blocks:
            raise NeverFitsError("the request never fits", param="prompt")
        if len(self._waiting) >= self.info.max_num_waiting:
            raise CapacityError("the queue is full", retry_after_s=1.5)
        self._waiting.append(_Sequence(session, request, asyncio.get_running_loop().time()))

    def end(self, session: EchoSession, request_id: RequestId, *, reason: FinishReason) -> None:
        for sequence in self._running + self._waiting:
            if sequence.session is session and sequence.request.request_id == request_id:
                sequence.reason = reason

    def end_all(self, session: EchoSession) -> None:
        for sequence in self._running + self._waiting:
            if sequence.session is session:
                sequence.reason = FinishReason.ABORT

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            self._step()

    def _step(self) -> None:
        self.steps += bool(self._running or self._waiting)
        for sequence in [seq for seq in self._waiting if seq.reason]:
            self._waiting.remove(sequence)
            self._end(sequence)
        while self._waiting and len(self._running) < self.info.max_num_seqs:
            self._running.append(self._waiting.pop(0))
            self._totals["prompt"] += len(self._running[-1].request.prompt_token_ids)
        for sequence in list(self._running):
            self._advance(sequence)
        for session in {id(seq.session): seq.session for seq in self._running}.values():
            session.end_step()

    def _advance(self, sequence: _Sequence) -> None:
        request = sequence.request
        now_s = asyncio.get_running_loop().time()
        if request.timeout_s is not None and now_s - sequence.arrived_s > request.timeout_s:
            sequence.reason = sequence.reason or FinishReason.TIMEOUT
        if sequence.reason is None:
            self._generate(sequence)
        if sequence.reason:
            self._running.remove(sequence)
            self._end(sequence)

    def _generate(self, sequence: _Sequence) -> None:
        prompt, sampling = sequence.request.prompt_token_ids, sequence.request.sampling
        token_id = prompt[len(sequence.answer) % len(prompt)]
        sequence.answer.append(token_id)
        self._totals["generation"] += 1
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
        if token_id in stops and len(sequence.answer) > sampling.min_tokens:
            sequence.reason = FinishReason.STOP
        elif len(sequence.answer) >= sampling.max_tokens:
            sequence.reason = FinishReason.LENGTH
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            top = tuple((token_id + i, -float(i)) for i in range(sampling.logprobs))
            logprobs = (TokenLogprobs(0.0, top),)
        output = RequestOutput(sequence.request.request_id, (token_id,), logprobs, sequence.reason)
        if sequence.reason:
            output = replace(output, receipt=self._receipt(sequence))
            sequence.session.put(output)
            sequence.session.end_step()
            self._running.remove(sequence)
            sequence.reason = None
        else:
            sequence.session.put(output)

    def _end(self, sequence: _Sequence) -> None:
        output = RequestOutput(
            sequence.request.request_id, finish_reason=sequence.reason, receipt=self._receipt(sequence)
        )
        sequence.session.put(output)
        sequence.session.end_step()

    def _receipt(self, sequence: _Sequence) -> Receipt:
        prompt_tokens, completion_tokens = len(sequence.request.prompt_token_ids), len(sequence.answer)
        return Receipt(
            policy=sequence.request.kv.policy,
            kv_budget=None,
            prompt_tokens=prompt_tokens,
            prompt_tokens_cached=0,
            completion_tokens=completion_tokens,
            kv_tokens_held=prompt_tokens + max(0, completion_tokens - 1),
            kv_tokens_evicted=0,
            retained_mass=1.0,
            kv_page_seconds=0.0,
            queued_ms=0.0,
            preemptions=0,
            evicted_in_prefill=False,
        )

    def _blocks(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.info.block_size)
