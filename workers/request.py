"""What a router asks of an engine and what comes back, as plain data.

This module imports no torch: routers use it too. `wire.py` turns it into protobuf and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from kvorum.workers.governance import LeaseTerms

RequestId = NewType("RequestId", str)


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence or stop token, or the router saw a stop string
    LENGTH = "length"  # max_tokens or the model's context is reached
    ABORT = "abort"  # the client went away
    TIMEOUT = "timeout"  # the deadline passed
    ERROR = "error"  # the engine failed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    temperature: 0 is greedy. top_k: 0 is off. seed: together with a token's index in the answer it determines the
    random draw, so an answer can be continued on another engine. logprobs: how many alternatives to report beside each
    chosen token (0 reports the chosen one only); None reports nothing. eos_token_ids end the answer unless ignore_eos;
    stop_token_ids always do. Neither may be drawn before min_tokens. grammar: of llguidance, which the answer follows
    to its end; empty for free text.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""

    @property
    def needs_history(self) -> bool:
        """Say whether a penalty looks at the tokens so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


@dataclass(frozen=True, slots=True)
class KVParams:
    """What may happen to a request's KV cache.

    policy: a name of the policy registry. kv_budget: tokens kept per KV head; an int is a count, a float in (0, 1] a
    fraction of the request's context (prompt + max_tokens); None is no limit for `full`, and for a policy that evicts
    what the pool can spare. min_retained_mass: 0..1, no eviction may take the sequence's retained mass below it.
    """

    policy: str = "full"
    kv_budget: int | float | None = None
    min_retained_mass: float = 0.0


# Engines order requests by one number: a tenant's priority times this, plus the request's own, less than half of it.
TENANT_PRIORITY_STEP = 1000


def tenant_priority(priority: int) -> int:
    """Return the tenant's part of a request's priority."""
    return (priority + TENANT_PRIORITY_STEP // 2) // TENANT_PRIORITY_STEP


def lowest_priority(tenant: int) -> int:
    """Return the largest number, which runs last, that a request of a tenant of this priority can have."""
    return tenant * TENANT_PRIORITY_STEP + TENANT_PRIORITY_STEP // 2 - 1


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate.

    timeout_s: seconds from its arrival at the engine after which it is ended with FinishReason.TIMEOUT.
    priority: lower runs earlier. cache_salt: prefix blocks are shared only between equal salts. answer_token_ids: the
    answer so far, which another engine generated: this one goes on after it, as if it had been its own. terms: of the
    lease that it runs under.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    kv: KVParams = KVParams()
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    answer_token_ids: tuple[int, ...] = ()
    terms: LeaseTerms = field(default_factory=LeaseTerms)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token's log-probability and the most likely alternatives, best first, as (token_id, logprob)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class EventKind(StrEnum):
    """What may happen to a sequence's KV on its way."""

    STARTED = "started"  # it got its first blocks; tokens: found in the prefix cache
    CUT = "cut"  # to its budget, when its prompt was done; tokens: dropped
    SHRUNK = "shrunk"  # for others; tokens: dropped, 0 when it was only held to what it had
    OFFLOADED = "offloaded"  # to host memory; tokens: moved
    PREEMPTED = "preempted"  # to be computed anew; tokens: lost
    RESUMED = "resumed"  # it got blocks again; tokens: that need not be computed anew


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """at_s: seconds since the sequence came to the engine. tokens: per KV head, as its kind says."""

    kind: EventKind
    at_s: float
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """What happened to a request's KV cache; sent with its last output.

    kv_budget: tokens per KV head the sequence was held to at its end, None when unlimited. kv_tokens_held and
    kv_tokens_evicted: per KV head, at the end; their sum is the tokens whose KV was ever written. retained_mass: 1.0
    when nothing was evicted. kv_page_seconds: blocks held, integrated over time. evicted_in_prefill: the pool was too
    short to keep the prompt whole until its end. preemptions: how often the sequence was moved out and back, or
    recomputed; offloads: the former alone. shrinks: how often it was cut, or held to what it had, for others. events:
    in order, the latest if there were very many.
    """

    policy: str
    kv_budget: int | None
    prompt_tokens: int
    prompt_tokens_cached: int
    completion_tokens: int
    kv_tokens_held: int
    kv_tokens_evicted: int
    retained_mass: float
    kv_page_seconds: float
    queued_ms: float
    preemptions: int
    evicted_in_prefill: bool
    shrinks: int = 0
    offloads: int = 0
    events: tuple[SequenceEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought for one request: new tokens, and at the end the reason and the receipt.

    logprobs has an entry for each of token_ids when asked for, else it is empty. error: text for users when
    finish_reason is ERROR.
    """

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a router must know of an engine before it sends requests."""

    engine_id: str
    model_name: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_waiting: int
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent look at an engine, taken between two steps. Totals count from the engine's start."""

    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_held: int
    blocks_cached: int
    steps_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    preemptions_total: int
    evicted_tokens_total: Mapping[str, int] = field(default_factory=dict)
