"""What is asked and what is answered, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

FinishReason: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Options:
    """What may be said about an answer; None leaves it to the server.

    kv_budget: tokens kept per KV head; a number up to 1 is a share of the context. logprobs: how many alternatives to
    report beside each token. json_schema (as text), regex, choices: what the answer must look like; one of them.
    """

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: str | None = None
    regex: str | None = None
    choices: Sequence[str] = ()
    policy: str | None = None
    kv_budget: float | None = None
    min_retained_mass: float | None = None
    priority: int = 0
    cache_salt: str = ""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token, and those of the likeliest at its place, by token id."""

    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What happened to a request's KV cache.

    kv_budget: None when nothing limited it. retained_mass: 1 when nothing was evicted. Counts of tokens are per KV
    head, at the end. resumes: how often the cluster moved the request to another engine.
    """

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
    resumes: int
    shrinks: int
    offloads: int


@dataclass(frozen=True, slots=True)
class Completion:
    """How an answer ended.

    reconnects: how often its stream broke and this client went on with another; the receipt is then that of the last.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    receipt: Receipt
    reconnects: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of an answer; only the last one has a completion. Text may lag behind tokens."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    completion: Completion | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    completion: Completion
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    id: str
    max_model_len: int
