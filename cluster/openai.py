"""Requests and responses of the OpenAI-compatible HTTP API, as clients write and read them.

Requests inherit the shared sampling fields; what OpenAI has and kvorum has not (tools) is refused by name. Fields that
nobody knows are let through and reported by `unknown_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvorum.cluster.sampling_fields import MAX_LOGPROBS, Count, RequestFields, SamplingFields, TokenId
from kvorum.cluster.structured import ResponseFormat, StructuredOutputs

MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]


def _refuse(value: object) -> None:
    if value is not None:
        raise ValueError("is not supported yet")


NotBuilt = Annotated[None, BeforeValidator(_refuse)]


class StreamOptions(RequestFields):
    """Options that only matter while streaming."""

    include_usage: bool | None = None


class ContentPart(RequestFields):
    """A piece of a message; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestFields):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart]
    name: str | None = None

    def for_template(self) -> dict[str, object]:
        """Return the message as chat templates expect it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class _TextRequest(SamplingFields):
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # What is not built must not be ignored: the answer would be another.
    best_of: NotBuilt = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed together with stream")
        return self


class ChatRequest(_TextRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: NotBuilt = None
    tool_choice: Literal["none"] | None = None
    functions: NotBuilt = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed together with logprobs")
        return self


class CompletionRequest(_TextRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: MaxTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: NotBuilt = None

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs: cannot be combined with echo yet")
        return self


class TokenizeRequest(RequestFields):
    """POST /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: give either prompt or messages")
        return self


class DetokenizeRequest(RequestFields):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class _Response(BaseModel):
    model_config = ConfigDict(frozen=True)


class PromptTokensDetails(_Response):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(_Response):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class KvorumReceipt(_Response):
    """What happened to the request's KV cache."""

    engine: str
    policy: str
    kv_budget: int | None
    prompt_tokens_cached: int
    kv_tokens_held: int
    kv_tokens_evicted: int
    retained_mass: float
    kv_page_seconds: float
    queued_ms: float
    preemptions: int
    evicted_in_prefill: bool
    shrinks: int
    offloads: int
    resumes: int


class TopLogprob(_Response):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A chosen token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Response):
    """Log-probabilities of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(_Response):
    """Log-probabilities of a completion choice."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class AnswerMessage(_Response):
    """The answer of a chat."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Response):
    """One answer of a chat."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class MessageDelta(_Response):
    """What is new of an answer; the role comes first, once."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Response):
    """What is new of one answer of a chat."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class CompletionChoice(_Response):
    """One completion, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class ModelCard(_Response):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kvorum"] = "kvorum"
    max_model_len: int


class ModelList(_Response):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(_Response):
    """Tokens of a text."""

    tokens: list[int]
    count: Count
    max_model_len: int


class DetokenizeResponse(_Response):
    """Text of tokens."""

    prompt: str


def unknown_fields(request: RequestFields) -> list[str]:
    """Name the fields of a request that nobody knows."""
    return sorted(request.model_extra or {})
