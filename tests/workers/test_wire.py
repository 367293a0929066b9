"""Everything that crosses the router-engine stream arrives as it left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kvstore.errors import (
    CapacityError,
    ContextLengthError,
    EngineLostError,
    InvalidRequestError,
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
from kvorum.workers.wire import (
    Abort,
    Command,
    Event,
    Finish,
    Heartbeat,
    Hello,
    Rejection,
    StepOutputs,
    Submit,
    command_from_pb,
    command_to_pb,
    event_from_pb,
    event_to_pb,
)

counts = st.integers(0, 2**32 - 1)
totals = st.integers(0, 2**64 - 1)
numbers = st.floats(allow_nan=False)
texts = st.text(max_size=20)
request_ids = st.builds(RequestId, texts)
token_id_tuples = st.lists(counts, max_size=5).map(tuple)
budgets = st.one_of(st.none(), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_min=True))
samplings = st.builds(
    SamplingParams,
    max_tokens=counts,
    temperature=numbers,
    top_k=counts,
    top_p=numbers,
    min_p=numbers,
    repetition_penalty=numbers,
    frequency_penalty=numbers,
    presence_penalty=numbers,
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | counts,
    logit_bias=st.dictionaries(counts, numbers, max_size=3),
    min_tokens=counts,
    stop_token_ids=token_id_tuples,
    eos_token_ids=token_id_tuples,
    ignore_eos=st.booleans(),
)
requests = st.builds(
    EngineRequest,
    request_id=request_ids,
    prompt_token_ids=token_id_tuples,
    sampling=samplings,
    kv=st.builds(KVParams, policy=texts, kv_budget=budgets, min_retained_mass=numbers),
    priority=st.integers(-(2**31), 2**31 - 1),
    timeout_s=st.none() | numbers,
    cache_salt=texts,
    terms=st.builds(
        LeaseTerms,
        lease_id=texts,
        tenant=texts,
        reserved_blocks=counts,
        weight=numbers,
        least_tokens=counts,
    ),
)
receipts = st.builds(
    Receipt,
    policy=texts,
    kv_budget=st.none() | counts,
    prompt_tokens=counts,
    prompt_tokens_cached=counts,
    completion_tokens=counts,
    kv_tokens_held=counts,
    kv_tokens_evicted=counts,
    retained_mass=numbers,
    kv_page_seconds=numbers,
    queued_ms=numbers,
    preemptions=counts,
    evicted_in_prefill=st.booleans(),
    shrinks=counts,
    offloads=counts,
    events=st.lists(st.builds(SequenceEvent, st.sampled_from(EventKind), numbers, counts), max_size=3).map(tuple),
)
logprobs = st.builds(TokenLogprobs, numbers, st.lists(st.tuples(counts, numbers), max_size=3).map(tuple))
outputs = st.builds(
    RequestOutput,
    request_id=request_ids,
    token_ids=token_id_tuples,
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    receipt=st.none() | receipts,
    error=st.none() | texts,
)
infos = st.builds(EngineInfo, texts, texts, counts, counts, counts, counts, counts, counts)
stats = st.builds(
    EngineStats,
    num_running=counts,
    num_waiting=counts,
    blocks_free=counts,
    blocks_held=counts,
    blocks_cached=counts,
    steps_total=totals,
    prompt_tokens_total=totals,
    generation_tokens_total=totals,
    prefix_cache_queries_total=totals,
    prefix_cache_hits_total=totals,
    preemptions_total=totals,
    evicted_tokens_total=st.dictionaries(texts, totals, max_size=3),
)
commands = st.builds(Submit, requests) | st.builds(Abort, request_ids) | st.builds(Finish, request_ids)
events = (
    st.builds(Hello, infos, stats)
    | st.builds(StepOutputs, st.lists(outputs, max_size=3).map(tuple), stats)
    | st.builds(Heartbeat, stats, st.booleans())
)


@given(commands)
def test_a_command_arrives_as_it_left(command: Command) -> None:
    sent = command_to_pb(command).SerializeToString()
    assert command_from_pb(pb.SessionRequest.FromString(sent)) == command


@given(events)
def test_an_event_arrives_as_it_left(event: Event) -> None:
    sent = event_to_pb(event).SerializeToString()
    assert event_from_pb(pb.SessionResponse.FromString(sent)) == event


@pytest.mark.parametrize("kind", [InvalidRequestError, ContextLengthError, NeverFitsError])
@pytest.mark.parametrize("param", [None, "prompt"])
def test_a_refusal_keeps_its_type_text_and_param(kind: Callable[..., InvalidRequestError], param: str | None) -> None:
    sent = event_to_pb(Rejection(RequestId("r"), kind("too long", param=param)))
    received = event_from_pb(sent)
    assert isinstance(received, Rejection)
    assert received.request_id == "r"
    assert type(received.error) is kind
    assert str(received.error) == "too long"
    assert isinstance(received.error, InvalidRequestError)
    assert received.error.param == param


def test_a_full_engine_says_when_to_come_back() -> None:
    received = event_from_pb(event_to_pb(Rejection(RequestId("r"), CapacityError("full", retry_after_s=2.5))))
    assert isinstance(received, Rejection)
    assert isinstance(received.error, CapacityError)
    assert received.error.retry_after_s == 2.5


def test_a_failed_engine_is_lost_to_the_router() -> None:
    received = event_from_pb(event_to_pb(Rejection(RequestId("r"), EngineLostError("failed"))))
    assert isinstance(received, Rejection)
    assert isinstance(received.error, EngineLostError)


def test_messages_of_a_newer_peer_are_skipped() -> None:
    assert command_from_pb(pb.SessionRequest()) is None
    assert event_from_pb(pb.SessionResponse()) is None


@pytest.mark.parametrize("max_tokens", [-1, 2**32])
def test_a_number_that_does_not_fit_the_wire_is_an_error(max_tokens: int) -> None:
    request = EngineRequest(RequestId("r"), (1,), SamplingParams(max_tokens=max_tokens))
    with pytest.raises(ValueError, match="range"):
        command_to_pb(Submit(request))


def test_a_request_from_a_router_that_knows_no_leases_has_the_default_terms() -> None:
    message = pb.SessionRequest(submit=pb.SubmitCommand(request_id="a"))
    command = command_from_pb(message)
    assert isinstance(command, Submit)
    assert command.request.terms == LeaseTerms()
