"""Plain values to protobuf messages and back; protobuf types end here and in `running.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeAlias

from kvorum.client.errors import invalid
from kvorum.client.types import Answer, Completion, FinishReason, Message, Options, Piece, Receipt, TokenLogprobs
from kvorum.protos.inference.v1 import inference_pb2 as pb

Prompt: TypeAlias = str | Sequence[int]
Messages: TypeAlias = str | Sequence[Message]

_FINISH_REASONS: dict[int, FinishReason] = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_RECEIPT_FIELDS = tuple(field.name for field in fields(Receipt) if field.name != "kv_budget")


def completion_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Write how a text, or token ids, go on."""
    request = _request(options)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def chat_request(messages: Messages, options: Options) -> pb.GenerateRequest:
    """Write a conversation to be answered."""
    request = _request(options)
    request.chat.CopyFrom(_conversation(messages))
    return request


def tokenize_request(prompt: Messages, *, model: str) -> pb.TokenizeRequest:
    """Write a text, or a conversation, to turn into token ids."""
    if isinstance(prompt, str):
        return pb.TokenizeRequest(model=model, text=prompt)
    return pb.TokenizeRequest(model=model, chat=_conversation(prompt))


def answer_of(pieces: Sequence[Piece]) -> Answer:
    """Put a whole answer together."""
    completion = pieces[-1].completion
    assert completion, "a stream that ends well has a last piece with a completion"
    return Answer(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        completion=completion,
        logprobs=tuple(entry for piece in pieces for entry in piece.logprobs),
    )


def piece_of(response: pb.GenerateResponse) -> Piece:
    """Read what is new of an answer."""
    logprobs = tuple(
        TokenLogprobs(entry.logprob, {each.token_id: each.logprob for each in entry.top}) for entry in response.logprobs
    )
    completion = _completion(response.completion) if response.HasField("completion") else None
    return Piece(response.request_id, response.text, tuple(response.token_ids), logprobs, completion)


def _conversation(messages: Messages) -> pb.Conversation:
    turns = [Message("user", messages)] if isinstance(messages, str) else messages
    return pb.Conversation(messages=[pb.Message(role=turn.role, content=turn.content) for turn in turns])


def _completion(message: pb.Completion) -> Completion:
    receipt = message.receipt
    return Completion(
        finish_reason=_FINISH_REASONS[message.finish_reason],
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        receipt=Receipt(
            kv_budget=receipt.kv_budget if receipt.HasField("kv_budget") else None,
            **{name: getattr(receipt, name) for name in _RECEIPT_FIELDS},
        ),
    )


def _request(options: Options) -> pb.GenerateRequest:
    try:
        return pb.GenerateRequest(
            model=options.model,
            request_id=options.request_id,
            sampling=_sampling(options),
            stop=options.stop,
            kvorum=_kv_params(options),
            priority=options.priority,
            cache_salt=options.cache_salt,
            skip_special_tokens=options.skip_special_tokens,
            structured_outputs=_structured_outputs(options),
        )
    except ValueError as error:
        raise invalid(f"a number is out of range: {error}") from error


def _sampling(options: Options) -> pb.SamplingParams:
    return pb.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        seed=options.seed,
        logprobs=options.logprobs,
        logit_bias=options.logit_bias,
        min_tokens=options.min_tokens,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )


def _structured_outputs(options: Options) -> pb.StructuredOutputs | None:
    kinds = (options.json_schema is not None, options.regex is not None, bool(options.choices))
    if sum(kinds) > 1:
        raise invalid("structured_outputs: give one of json_schema, regex and choices", param="structured_outputs")
    if not any(kinds):
        return None
    choice = pb.Choice(texts=options.choices) if options.choices else None
    return pb.StructuredOutputs(json=options.json_schema, regex=options.regex, choice=choice)


def _kv_params(options: Options) -> pb.KVParams:
    budget = options.kv_budget
    is_count = budget is not None and budget > 1
    if budget is not None and is_count and budget != int(budget):
        raise invalid(
            f"kv_budget is a fraction up to 1 or a whole number of tokens, got {budget}", param="kvorum.kv_budget"
        )
    return pb.KVParams(
        policy=options.policy,
        kv_budget_tokens=int(budget) if budget is not None and is_count else None,
        kv_budget_fraction=None if is_count else budget,
        min_retained_mass=options.min_retained_mass,
    )
