"""Deltas and whole answers in the two shapes of the OpenAI API: chat and completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvorum.cluster.generation import Delta, Ending
from kvorum.cluster.model import ServedModel
from kvorum.cluster.openai import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    KvorumReceipt,
    MessageDelta,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)
from kvorum.cluster.planning import GenerationRequest
from kvorum.workers.request import TokenLogprobs

Json = dict[str, object]

# JSON has no infinity; this is what OpenAI writes for a token that could not have been chosen.
_LOWEST_LOGPROB = -9999.0


@dataclass(slots=True)
class Answer:
    """A choice, gathered from its deltas."""

    ending: Ending
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class AnswerFormat(Protocol):
    """How one of the two endpoints writes what was generated."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def opening(self, index: int) -> list[Json]:
        """Return the choices to send before the first delta of a choice."""
        ...

    def chunk(self, delta: Delta) -> Json | None:
        """Return the choice for what a delta brings, if it brings anything to show."""
        ...

    def closing(self, index: int, ending: Ending) -> Json:
        """Return the last choice of an answer."""
        ...

    def choice(self, index: int, answer: Answer) -> Json:
        """Return a whole answer."""
        ...


class ChatFormat:
    """Answers of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, model: ServedModel) -> None:
        """Spell tokens as `model` does."""
        self._model = model

    def opening(self, index: int) -> list[Json]:
        """The first delta has the role."""
        return [_dump(ChatChunkChoice(index=index, delta=MessageDelta(role="assistant", content="")))]

    def chunk(self, delta: Delta) -> Json | None:
        """Return the new text and its log-probabilities."""
        if not delta.text and not delta.logprobs:
            return None
        logprobs = self._logprobs(delta.token_ids, delta.logprobs) if delta.logprobs else None
        return _dump(ChatChunkChoice(index=delta.index, delta=MessageDelta(content=delta.text), logprobs=logprobs))

    def closing(self, index: int, ending: Ending) -> Json:
        """Return an empty delta with the reason."""
        return _dump(ChatChunkChoice(index=index, delta=MessageDelta(), finish_reason=ending.reason.value))

    def choice(self, index: int, answer: Answer) -> Json:
        """Return a whole message."""
        logprobs = self._logprobs(answer.token_ids, answer.logprobs) if answer.logprobs else None
        message = AnswerMessage(content=answer.text)
        reason = answer.ending.reason.value
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=reason).model_dump()

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        content = [
            ChatTokenLogprob(
                **dict(self._token(token_id, entry.logprob)),
                top_logprobs=[self._token(other, logprob) for other, logprob in entry.top],
            )
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
        return ChatLogprobs(content=content)

    def _token(self, token_id: int, logprob: float) -> TopLogprob:
        text = _spell(self._model, token_id)
        return TopLogprob(token=text, logprob=_finite(logprob), bytes=list(text.encode()))


class CompletionFormat:
    """Answers of /v1/completions."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, model: ServedModel, *, echo: Sequence[str]) -> None:
        """Spell tokens as `model` does; `echo` holds what stands before each choice's text."""
        self._model = model
        self._echo = echo
        self._num_chars = [0] * len(echo)

    def opening(self, index: int) -> list[Json]:
        """An echoed prompt comes first."""
        return [_dump(CompletionChoice(index=index, text=self._echo[index]))] if self._echo[index] else []

    def chunk(self, delta: Delta) -> Json | None:
        """Return the new text and its log-probabilities."""
        if not delta.text and not delta.logprobs:
            return None
        logprobs = self._logprobs(delta.index, delta.token_ids, delta.logprobs) if delta.logprobs else None
        return _dump(CompletionChoice(index=delta.index, text=delta.text, logprobs=logprobs))

    def closing(self, index: int, ending: Ending) -> Json:
        """Return an empty text with the reason."""
        return _dump(CompletionChoice(index=index, text="", finish_reason=ending.reason.value))

    def choice(self, index: int, answer: Answer) -> Json:
        """Return a whole text."""
        logprobs = self._logprobs(index, answer.token_ids, answer.logprobs) if answer.logprobs else None
        text = self._echo[index] + answer.text
        return _dump(
            CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=answer.ending.reason.value)
        )

    def _logprobs(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        tokens = [_spell(self._model, token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._num_chars[index])
            self._num_chars[index] += len(token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[_finite(entry.logprob) for entry in logprobs],
            top_logprobs=[
                {_spell(self._model, other): _finite(logprob) for other, logprob in entry.top} for entry in logprobs
            ],
            text_offset=offsets,
        )


async def gather_answers(deltas: AsyncIterator[Delta], num_choices: int) -> list[Answer]:
    """Read all deltas and return the choices in order."""
    gathered: list[list[Delta]] = [[] for _ in range(num_choices)]
    async for delta in deltas:
        gathered[delta.index].append(delta)
    return [_join(choice) for choice in gathered]


def usage_of(endings: Mapping[int, Ending], request: GenerationRequest) -> Usage:
    """Add up the tokens of a request from its choices' endings; a prompt counts once however many choices it has."""
    choices = len(request.sequences) // request.num_prompts
    cached = [0] * request.num_prompts
    for index, ending in endings.items():
        prompt = index // choices
        cached[prompt] = max(cached[prompt], ending.receipt.prompt_tokens_cached)
    completion_tokens = sum(ending.completion_tokens for ending in endings.values())
    return Usage(
        prompt_tokens=request.prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=request.prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(cached)),
    )


def receipt_of(endings: Iterable[Ending]) -> KvorumReceipt:
    """Write the receipt of one sequence, or of several as one: amounts are sums, quality and waiting the worst."""
    endings = list(endings)
    receipts = [ending.receipt for ending in endings]
    return KvorumReceipt(
        engine=endings[0].engine_id,
        policy=receipts[0].policy,
        kv_budget=receipts[0].kv_budget,
        prompt_tokens_cached=sum(receipt.prompt_tokens_cached for receipt in receipts),
        kv_tokens_held=sum(receipt.kv_tokens_held for receipt in receipts),
        kv_tokens_evicted=sum(receipt.kv_tokens_evicted for receipt in receipts),
        retained_mass=min(receipt.retained_mass for receipt in receipts),
        kv_page_seconds=sum(receipt.kv_page_seconds for receipt in receipts),
        queued_ms=max(ending.queued_ms for ending in endings),
        preemptions=sum(receipt.preemptions for receipt in receipts),
        evicted_in_prefill=any(receipt.evicted_in_prefill for receipt in receipts),
        shrinks=sum(receipt.shrinks for receipt in receipts),
        offloads=sum(receipt.offloads for receipt in receipts),
        resumes=max(ending.resumes for ending in endings),
    )


def _join(deltas: Sequence[Delta]) -> Answer:
    ending = deltas[-1].ending
    assert ending, "deltas end with an ending or an exception"
    return Answer(
        ending=ending,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
    )


def _spell(model: ServedModel, token_id: int) -> str:
    return model.tokenizer.decode((token_id,), skip_special_tokens=False)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


def _dump(choice: ChatChunkChoice | CompletionChoice) -> Json:
    """Write a choice; an absent role or content is left out, an absent reason is null."""
    dumped = choice.model_dump()
    if isinstance(choice, ChatChunkChoice):
        dumped["delta"] = choice.delta.model_dump(exclude_none=True)
    return dumped
