"""The router-engine stream's messages as live dataclasses, and back.

Protobuf types go no further than this module and the two ends of the stream (`engine_server.py` and
`cluster/engine_client.py`), which move them without looking inside. The public API has messages of its own, turned in
`cluster/grpc_messages.py`: the two wire formats change for different reasons.

A number that protobuf cannot hold (a negative count, an id above 2**32) is a bug here and raises ValueError: requests
are checked at the edge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from kvorum.kvstore.errors import (
    CapacityError,
    ContextLengthError,
    EngineLostError,
    InvalidRequestError,
    KvorumError,
    NeverFitsError,
)
from kvorum.protos.engine.v1 import engine_pb2 as pb
from kvorum.workers.governance import LeaseTerms
from kvorum.workers.request import (
    EngineInfo,
    EngineRequest,
    EngineStats,
    EventKind,
    FinishReason,
    KVParams,
    Receipt,
    RequestId,
    RequestOutput,
    SamplingParams,
    SequenceEvent,
    TokenLogprobs,
)

_EVENT_KINDS = frozenset(kind.value for kind in EventKind)


@dataclass(frozen=True, slots=True)
class Submit:
    """Start a request."""

    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """The client of a request went away."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Finish:
    """The router saw a stop string in a request's text."""

    request_id: RequestId


Command = Submit | Abort | Finish


@dataclass(frozen=True, slots=True)
class Hello:
    """The first event of a session."""

    info: EngineInfo
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Everything that one step brought for this session."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Rejection:
    """The engine did not take a request."""

    request_id: RequestId
    error: KvorumError


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The engine's loop is alive; healthy says whether its ranks are."""

    stats: EngineStats
    healthy: bool


Event = Hello | StepOutputs | Rejection | Heartbeat

_FINISH_REASON_TO_PB = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.TIMEOUT: pb.FINISH_REASON_TIMEOUT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH_REASON_FROM_PB = {value: key for key, value in _FINISH_REASON_TO_PB.items()}

_REJECTION_CODES: dict[type[KvorumError], pb.RejectionCode] = {
    InvalidRequestError: pb.REJECTION_CODE_INVALID_REQUEST,
    ContextLengthError: pb.REJECTION_CODE_CONTEXT_LENGTH,
    NeverFitsError: pb.REJECTION_CODE_NEVER_FITS,
    CapacityError: pb.REJECTION_CODE_CAPACITY,
    EngineLostError: pb.REJECTION_CODE_ENGINE_LOST,
}


def command_to_pb(command: Command) -> pb.SessionRequest:
    """Encode what a router says to an engine."""
    match command:
        case Submit(request):
            return pb.SessionRequest(submit=_request_to_pb(request))
        case Abort(request_id):
            return pb.SessionRequest(abort=pb.AbortCommand(request_id=request_id))
        case Finish(request_id):
            return pb.SessionRequest(finish=pb.FinishCommand(request_id=request_id))


def command_from_pb(message: pb.SessionRequest) -> Command | None:
    """Decode what a router says to an engine; None for a command that only a newer router knows."""
    match message.WhichOneof("command"):
        case "submit":
            return Submit(_request_from_pb(message.submit))
        case "abort":
            return Abort(RequestId(message.abort.request_id))
        case "finish":
            return Finish(RequestId(message.finish.request_id))
        case _:
            return None


def event_to_pb(event: Event) -> pb.SessionResponse:
    """Encode what an engine says to a router."""
    match event:
        case Hello(info, stats):
            return pb.SessionResponse(hello=pb.Hello(info=pb.EngineInfo(**asdict(info)), stats=_stats_to_pb(stats)))
        case StepOutputs(outputs, stats):
            step = pb.StepOutputs(outputs=[_output_to_pb(output) for output in outputs], stats=_stats_to_pb(stats))
            return pb.SessionResponse(step=step)
        case Rejection():
            return pb.SessionResponse(rejection=_rejection_to_pb(event))
        case Heartbeat(stats, healthy):
            return pb.SessionResponse(heartbeat=pb.Heartbeat(stats=_stats_to_pb(stats), healthy=healthy))


def event_from_pb(message: pb.SessionResponse) -> Event | None:
    """Decode what an engine says to a router; None for an event that only a newer engine knows."""
    match message.WhichOneof("event"):
        case "hello":
            return Hello(_info_from_pb(message.hello.info), _stats_from_pb(message.hello.stats))
        case "step":
            outputs = tuple(_output_from_pb(output) for output in message.step.outputs)
            return StepOutputs(outputs, _stats_from_pb(message.step.stats))
        case "rejection":
            return _rejection_from_pb(message.rejection)
        case "heartbeat":
            return Heartbeat(_stats_from_pb(message.heartbeat.stats), message.heartbeat.healthy)
        case _:
            return None


def _request_to_pb(request: EngineRequest) -> pb.SubmitCommand:
    return pb.SubmitCommand(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling=pb.SamplingParams(**asdict(request.sampling)),
        kv=_kv_to_pb(request.kv),
        priority=request.priority,
        timeout_s=request.timeout_s,
        cache_salt=request.cache_salt,
        answer_token_ids=request.answer_token_ids,
        terms=pb.LeaseTerms(**asdict(request.terms)),
    )


def _request_from_pb(message: pb.SubmitCommand) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(message.request_id),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=_sampling_from_pb(message.sampling),
        kv=_kv_from_pb(message.kv),
        priority=message.priority,
        timeout_s=message.timeout_s if message.HasField("timeout_s") else None,
        cache_salt=message.cache_salt,
        answer_token_ids=tuple(message.answer_token_ids),
        terms=_terms_from_pb(message.terms) if message.HasField("terms") else LeaseTerms(),
    )


def _terms_from_pb(message: pb.LeaseTerms) -> LeaseTerms:
    return LeaseTerms(
        lease_id=message.lease_id,
        tenant=message.tenant,
        reserved_blocks=message.reserved_blocks,
        weight=message.weight,
        least_tokens=message.least_tokens,
    )


def _sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        ignore_eos=message.ignore_eos,
        grammar=message.grammar,
    )


def _kv_to_pb(kv: KVParams) -> pb.KVParams:
    budget = kv.kv_budget
    return pb.KVParams(
        policy=kv.policy,
        kv_budget_tokens=budget if isinstance(budget, int) else None,
        kv_budget_fraction=budget if isinstance(budget, float) else None,
        min_retained_mass=kv.min_retained_mass,
    )


def _kv_from_pb(message: pb.KVParams) -> KVParams:
    field = message.WhichOneof("kv_budget")
    budget: int | float | None = getattr(message, field) if field else None
    return KVParams(policy=message.policy, kv_budget=budget, min_retained_mass=message.min_retained_mass)


def _output_to_pb(output: RequestOutput) -> pb.RequestOutput:
    return pb.RequestOutput(
        request_id=output.request_id,
        token_ids=output.token_ids,
        logprobs=[_logprobs_to_pb(entry) for entry in output.logprobs],
        finish_reason=_FINISH_REASON_TO_PB[output.finish_reason],
        receipt=pb.Receipt(**asdict(output.receipt)) if output.receipt else None,
        error=output.error,
    )


def _output_from_pb(message: pb.RequestOutput) -> RequestOutput:
    return RequestOutput(
        request_id=RequestId(message.request_id),
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_logprobs_from_pb(entry) for entry in message.logprobs),
        finish_reason=_FINISH_REASON_FROM_PB[message.finish_reason],
        receipt=_receipt_from_pb(message.receipt) if message.HasField("receipt") else None,
        error=message.error if message.HasField("error") else None,
    )


def _logprobs_to_pb(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.Alternative(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return pb.TokenLogprobs(logprob=entry.logprob, top=top)


def _logprobs_from_pb(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple((entry.token_id, entry.logprob) for entry in message.top))


def _receipt_from_pb(message: pb.Receipt) -> Receipt:
    return Receipt(
        policy=message.policy,
        kv_budget=message.kv_budget if message.HasField("kv_budget") else None,
        prompt_tokens=message.prompt_tokens,
        prompt_tokens_cached=message.prompt_tokens_cached,
        completion_tokens=message.completion_tokens,
        kv_tokens_held=message.kv_tokens_held,
        kv_tokens_evicted=message.kv_tokens_evicted,
        retained_mass=message.retained_mass,
        kv_page_seconds=message.kv_page_seconds,
        queued_ms=message.queued_ms,
        preemptions=message.preemptions,
        evicted_in_prefill=message.evicted_in_prefill,
        shrinks=message.shrinks,
        offloads=message.offloads,
        events=tuple(events_from_pb(message.events)),
    )


def events_from_pb(messages: Iterable[pb.SequenceEvent]) -> Iterator[SequenceEvent]:
    """Read a sequence's events; those of kinds that are not known here are left out."""
    for message in messages:
        if message.kind in _EVENT_KINDS:
            yield SequenceEvent(EventKind(message.kind), message.at_s, message.tokens)


def _rejection_to_pb(rejection: Rejection) -> pb.Rejection:
    error = rejection.error
    return pb.Rejection(
        request_id=rejection.request_id,
        code=_REJECTION_CODES[type(error)],
        message=str(error),
        param=error.param if isinstance(error, InvalidRequestError) else None,
        retry_after_s=error.retry_after_s if isinstance(error, CapacityError) else 0.0,
    )


def _rejection_from_pb(message: pb.Rejection) -> Rejection:
    param = message.param if message.HasField("param") else None
    error: KvorumError
    match message.code:
        case pb.REJECTION_CODE_CAPACITY:
            error = CapacityError(message.message, retry_after_s=message.retry_after_s)
        case pb.REJECTION_CODE_ENGINE_LOST:
            error = EngineLostError(message.message)
        case pb.REJECTION_CODE_CONTEXT_LENGTH:
            error = ContextLengthError(message.message, param=param)
        case pb.REJECTION_CODE_NEVER_FITS:
            error = NeverFitsError(message.message, param=param)
        case _:
            error = InvalidRequestError(message.message, param=param)
    return Rejection(RequestId(message.request_id), error)


def _info_from_pb(message: pb.EngineInfo) -> EngineInfo:
    return EngineInfo(
        engine_id=message.engine_id,
        model_name=message.model_name,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        num_blocks=message.num_blocks,
        block_size=message.block_size,
        max_num_seqs=message.max_num_seqs,
        max_num_waiting=message.max_num_waiting,
        tensor_parallel_size=message.tensor_parallel_size,
    )


def _stats_to_pb(stats: EngineStats) -> pb.EngineStats:
    return pb.EngineStats(**asdict(stats))


def _stats_from_pb(message: pb.EngineStats) -> EngineStats:
    return EngineStats(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        blocks_free=message.blocks_free,
        blocks_held=message.blocks_held,
        blocks_cached=message.blocks_cached,
        steps_total=message.steps_total,
        prompt_tokens_total=message.prompt_tokens_total,
        generation_tokens_total=message.generation_tokens_total,
        prefix_cache_queries_total=message.prefix_cache_queries_total,
        prefix_cache_hits_total=message.prefix_cache_hits_total,
        preemptions_total=message.preemptions_total,
        evicted_tokens_total=dict(message.evicted_tokens_total),
    )
