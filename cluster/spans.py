"""From what was noted of a call to the spans of its trace, as plain data.

    request  |---------------------------------------------------|
    admit    |---|                       a lease is asked for and waited for
    queue        |--|                    the engine has it and no blocks for it yet
    prefill         |------|             to the first token
    decode                 |-------------|

A request that lost its engine has the four once more for each further one. When blocks came is known only from a
sequence's receipt, so a request that was not ended well by its engine has no queue span: its prefill begins with the
lease.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from kvorum.cluster.calls import MAX_ID_CHARS, Call
from kvorum.cluster.generation import Attempt, Ending
from kvorum.workers.request import EventKind

Attributes = Mapping[str, str | int | float | bool]

_GRPC_SERVICES = {"grpc": "kvorum.inference.v1.InferenceService", "vllm": "vllm.grpc.engine.VllmEngine"}


@dataclass(frozen=True, slots=True)
class Event:
    """A moment in a span."""

    name: str
    at_s: float
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a call; times on the clock of the call."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    events: tuple[Event, ...] = ()


def request_span(call: Call) -> Span:
    """Return the span of a whole call."""
    attributes: dict[str, str | int | float | bool] = {
        "kvorum.request_id": call.request_id,
        "kvorum.tenant": call.tenant,
        "gen_ai.usage.output_tokens": call.num_tokens,
    }
    if call.plan:
        attributes["gen_ai.usage.input_tokens"] = call.plan.prompt_tokens
        attributes["kvorum.policy"] = call.plan.sequences[0].kv.policy
    if call.error_code:
        attributes["error.type"] = call.error_code
    if client_id := call.headers.get("x-request-id"):
        attributes["http.request.header.x-request-id"] = client_id[:MAX_ID_CHARS]
    name = f"POST {call.method}" if call.protocol == "http" else f"{_GRPC_SERVICES[call.protocol]}/{call.method}"
    losses = tuple(
        Event("engine_lost", after.asked_s, {"kvorum.engine": before.engine_id})
        for before, after in zip(call.trail.attempts, call.trail.attempts[1:], strict=False)
        if before.leased_s is not None
    )
    return Span(name, call.started_s, call.ended_s, attributes, losses)


def part_spans(call: Call) -> Iterator[Span]:
    """Yield the spans below the request's, in order."""
    attempts = call.trail.attempts
    for number, attempt in enumerate(attempts):
        end_s = attempts[number + 1].asked_s if number + 1 < len(attempts) else call.ended_s
        is_last_there = all(later.engine_id != attempt.engine_id for later in attempts[number + 1 :])
        endings = {
            index: ending
            for index, ending in call.endings.items()
            if is_last_there and ending.engine_id == attempt.engine_id
        }
        shared = {
            "kvorum.request_id": call.request_id,
            "kvorum.tenant": call.tenant,
            "kvorum.engine": attempt.engine_id,
        }
        events = sorted(_events(attempt, endings), key=lambda event: event.at_s)
        phases = _phases(attempt, endings, end_s)
        for phase, following in zip_longest(phases, phases[1:]):
            until_s = following.start_s if following else math.inf
            own = tuple(event for event in events if phase.start_s <= event.at_s < until_s)
            yield replace(phase, attributes=shared, events=own)


def _phases(attempt: Attempt, endings: Mapping[int, Ending], end_s: float) -> list[Span]:
    """Return how a request went with one engine, in order."""
    phases = [Span("admit", attempt.asked_s, end_s if attempt.leased_s is None else attempt.leased_s)]
    if attempt.leased_s is None:
        return phases
    begin_s = attempt.leased_s
    first_token_s = end_s if attempt.first_token_s is None else attempt.first_token_s
    if endings:
        queued_s = min(ending.receipt.queued_ms for ending in endings.values()) / 1e3
        blocks_s = min(begin_s + queued_s, first_token_s)
        phases.append(Span("queue", begin_s, blocks_s))
        begin_s = blocks_s
    phases.append(Span("prefill", begin_s, first_token_s))
    if attempt.first_token_s is not None:
        phases.append(Span("decode", first_token_s, end_s))
    return phases


def _events(attempt: Attempt, endings: Mapping[int, Ending]) -> Iterator[Event]:
    """Yield what happened to the KV of sequences that ended on an attempt's engine, and how they ended."""
    if attempt.leased_s is None:
        return
    for index, ending in endings.items():
        receipt = ending.receipt
        shared: Attributes = {"kvorum.sequence": index, "kvorum.policy": receipt.policy}
        for event in receipt.events:
            name = "kvorum.cache_hit" if event.kind is EventKind.STARTED else f"kvorum.{event.kind.value}"
            if event.tokens or event.kind is not EventKind.STARTED:
                yield Event(name, attempt.leased_s + event.at_s, {**shared, "kvorum.kv_tokens": event.tokens})
        yield Event(
            "kvorum.finished",
            ending.ended_s,
            {
                **shared,
                "kvorum.finish_reason": ending.reason.value,
                "kvorum.completion_tokens": ending.completion_tokens,
                "kvorum.kv_tokens_held": receipt.kv_tokens_held,
                "kvorum.kv_tokens_evicted": receipt.kv_tokens_evicted,
                "kvorum.retained_mass": receipt.retained_mass,
                "kvorum.kv_page_seconds": receipt.kv_page_seconds,
                "kvorum.prompt_tokens_cached": receipt.prompt_tokens_cached,
            },
        )
