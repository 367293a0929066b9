"""A request inside the engine: its tokens, its place in the KV store and its account."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvorum.kvstore.policies import MIN_BUDGET_TOKENS, Policy
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.types import SeqId
from kvorum.workers.request import EngineRequest, EventKind, FinishReason, Receipt, SequenceEvent

# A sequence's latest events are remembered.
MAX_EVENTS = 64


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens.

    tokens: prompt and answer so far. kv: None while it waits with nothing kept. prompt_done: every token but the last
    has its KV written, so each step brings one token. budget: tokens per KV head, resolved from the request.

    For an elastic sequence: wanted_budget is a cut that waits until its floor was measured, granted_budget what the
    floor allows of it; floor_blocks is how many blocks it held when the floor gave nothing back; curve is its retained
    mass in 0, 1, 2 ... blocks, measured when it had written curve_tokens.
    """

    seq_id: SeqId
    request: EngineRequest
    policy: Policy
    budget: int | None
    arrival_s: float
    tokens: list[int]
    kv: SequenceKV | None = None
    prompt_done: bool = False
    finish_reason: FinishReason | None = None
    first_scheduled_s: float | None = None
    prompt_tokens_cached: int = 0
    evicted_in_prefill: bool = False
    page_seconds: float = 0.0
    preemptions: int = 0
    offloads: int = 0
    shrinks: int = 0
    wanted_budget: int | None = None
    granted_budget: int | None = None
    floor_blocks: int = 0
    curve: tuple[float, ...] = ()
    curve_tokens: int = 0
    events: deque[SequenceEvent] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))

    def note(self, kind: EventKind, now_s: float, tokens: int = 0) -> None:
        """Remember what happened to it."""
        self.events.append(SequenceEvent(kind, now_s - self.arrival_s, tokens))

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: what runs first."""
        return self.request.priority, self.arrival_s, self.seq_id

    @property
    def num_prompt(self) -> int:
        """Tokens of the client's prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_answer(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def deadline_s(self) -> float:
        """When the request's time is over."""
        timeout_s = self.request.timeout_s
        return float("inf") if timeout_s is None else self.arrival_s + timeout_s

    @property
    def keeps_floor(self) -> bool:
        """Say whether evictions are bounded by a retained mass."""
        return self.policy.evicts and self.request.kv.min_retained_mass > 0.0

    @property
    def is_elastic(self) -> bool:
        """Say whether it may be shrunk for others: its policy evicts and its owner set no budget."""
        return self.policy.evicts and self.budget is None

    @property
    def least_tokens(self) -> int:
        """The budget below which an elastic sequence is never held."""
        return max(MIN_BUDGET_TOKENS, self.request.terms.least_tokens)

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.request.terms.tenant

    def ends_with(self, token_id: int, *, max_model_len: int) -> FinishReason | None:
        """Say whether the answer is over now that token_id was appended."""
        params = self.request.sampling
        if self.num_answer > params.min_tokens:
            if token_id in params.stop_token_ids:
                return FinishReason.STOP
            if token_id in params.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
        if self.num_answer >= params.max_tokens or len(self.tokens) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def receipt(self, *, now_s: float, retained_mass: float) -> Receipt:
        """Account for the request at its end."""
        kv = self.kv
        queued_until_s = now_s if self.first_scheduled_s is None else self.first_scheduled_s
        return Receipt(
            policy=self.policy.name,
            kv_budget=self.budget if kv is None else kv.budget,
            prompt_tokens=self.num_prompt,
            prompt_tokens_cached=self.prompt_tokens_cached,
            completion_tokens=self.num_answer,
            kv_tokens_held=0 if kv is None else kv.alive_slots,
            kv_tokens_evicted=0 if kv is None else kv.num_evicted,
            retained_mass=retained_mass,
            kv_page_seconds=self.page_seconds,
            queued_ms=1000.0 * (queued_until_s - self.arrival_s),
            preemptions=self.preemptions,
            evicted_in_prefill=self.evicted_in_prefill,
            shrinks=self.shrinks,
            offloads=self.offloads,
            events=tuple(self.events),
        )
