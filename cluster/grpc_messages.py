"""The public gRPC API's messages as checked fields, and answers as messages; protobuf types end here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, TypeVar

from google.protobuf.message import Message
from pydantic import Field, ValidationError

from kvorum.cluster.generation import Delta, Ending
from kvorum.cluster.openai import ChatMessage, MaxTokens
from kvorum.cluster.sampling_fields import MAX_LOGPROBS, RequestFields, SamplingFields, invalid_request
from kvorum.cluster.structured import StructuredOutputs
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.workers.request import FinishReason, RequestId, TokenLogprobs

_Fields = TypeVar("_Fields", bound=RequestFields)

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_OPTIONAL_SAMPLING = tuple(
    field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence and not field.message_type
)


class ConversationFields(RequestFields):
    """A conversation to answer."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]


class GenerateFields(SamplingFields):
    """What a GenerateRequest says, beside its text or token ids."""

    request_id: Annotated[str, Field(max_length=256)]
    max_tokens: MaxTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat: ConversationFields | None = None
    structured_outputs: StructuredOutputs | None = None


def generate_fields(message: pb.GenerateRequest) -> GenerateFields:
    """Check a request's fields; absent ones stay None."""
    values: dict[str, object] = present(message.sampling, _OPTIONAL_SAMPLING)
    values |= present(message, ("skip_special_tokens",))
    values |= {
        "model": message.model or None,
        "request_id": message.request_id,
        "stop": list(message.stop),
        "priority": message.priority,
        "cache_salt": message.cache_salt,
        "logit_bias": dict(message.sampling.logit_bias),
        "stop_token_ids": list(message.sampling.stop_token_ids),
        "kvorum": _kvorum_values(message.kvorum),
        "chat": conversation_values(message.chat) if message.HasField("chat") else None,
        "structured_outputs": _structured_values(message.structured_outputs),
    }
    return validated(GenerateFields, values)


def conversation_fields(message: pb.Conversation) -> ConversationFields:
    """Check a conversation."""
    return validated(ConversationFields, conversation_values(message))


def conversation_values(message: pb.Conversation) -> dict[str, object]:
    """Return a conversation unchecked."""
    return {"messages": [{"role": turn.role, "content": turn.content} for turn in message.messages]}


def delta_message(request_id: RequestId, delta: Delta, *, prompt_tokens: int) -> pb.GenerateResponse:
    """Write what is new of an answer."""
    return pb.GenerateResponse(
        request_id=request_id,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[_logprobs_message(entry) for entry in delta.logprobs],
        completion=_completion_message(delta.ending, prompt_tokens) if delta.ending else None,
    )


def present(message: Message, names: Sequence[str]) -> dict[str, object]:
    """Return those of the named fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _structured_values(message: pb.StructuredOutputs) -> dict[str, object] | None:
    match message.WhichOneof("kind"):
        case "json":
            return {"json": message.json}
        case "regex":
            return {"regex": message.regex}
        case "choice":
            return {"choice": list(message.choice.texts)}
    return None


def _kvorum_values(message: pb.KVParams) -> dict[str, object]:
    values = present(message, ("policy", "min_retained_mass"))
    match message.WhichOneof("kv_budget"):
        case "kv_budget_tokens":
            # The fields shared with HTTP read a number up to 1 as a fraction, which a count never is.
            if message.kv_budget_tokens <= 1:
                raise _bad_budget(f"kv_budget_tokens must be more than 1, got {message.kv_budget_tokens}")
            values["kv_budget"] = message.kv_budget_tokens
        case "kv_budget_fraction":
            if not 0 < message.kv_budget_fraction <= 1:
                raise _bad_budget(f"kv_budget_fraction must be in (0, 1], got {message.kv_budget_fraction}")
            values["kv_budget"] = message.kv_budget_fraction
    return values


def _bad_budget(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="kvorum.kv_budget")


def validated(kind: type[_Fields], values: dict[str, object]) -> _Fields:
    """Check fields; raises InvalidRequestError, which names the one that is wrong."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise invalid_request(error) from None


def _logprobs_message(entry: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.Alternative(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top]
    return pb.TokenLogprobs(logprob=entry.logprob, top=top)


def _completion_message(ending: Ending, prompt_tokens: int) -> pb.Completion:
    receipt = asdict(ending.receipt)
    del receipt["prompt_tokens"], receipt["completion_tokens"], receipt["events"]
    receipt["queued_ms"] = ending.queued_ms
    return pb.Completion(
        finish_reason=_FINISH_REASONS[ending.reason],
        usage=pb.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=ending.completion_tokens,
            prompt_tokens_cached=ending.receipt.prompt_tokens_cached,
        ),
        receipt=pb.Receipt(engine=ending.engine_id, resumes=ending.resumes, **receipt),
    )
