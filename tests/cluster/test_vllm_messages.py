"""The gateways' messages: what of a request is understood, what is refused by its name, and how answers are written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.generation import Delta, Ending
from kvorum.cluster.planning import GenerationRequest
from kvorum.cluster.vllm_messages import AnswerWriter, generate_fields, model_info, scheduler_load
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.workers.request import EngineRequest, FinishReason, Receipt, RequestId, SamplingParams, TokenLogprobs
from kvtest.servers import Unchecked
from kvtest.stack import DEFAULT_INFO, IDLE_STATS
from kvtest.tiny_model import tiny_model

RECEIPT = Receipt("full", None, 3, 2, 5, 7, 0, 1.0, 0.0, 0.0, preemptions=0, evicted_in_prefill=False)
EOS = 256

UNDERSTOOD: list[tuple[str, Unchecked]] = [
    ("temperature", 0.0),
    ("temperature", 1.5),
    ("top_p", 0.5),
    ("top_k", 40),
    ("min_p", 0.25),
    ("frequency_penalty", -1.5),
    ("presence_penalty", 1.5),
    ("repetition_penalty", 1.25),
    ("max_tokens", 7),
    ("min_tokens", 3),
    ("stop", ["a", "b"]),
    ("stop_token_ids", [1, 2]),
    ("skip_special_tokens", True),
    ("ignore_eos", True),
    ("n", 3),
    ("logprobs", 0),
    ("logprobs", 5),
    ("seed", -4),
    ("logit_bias", {5: -100.0}),
]
CONSTRAINTS: list[tuple[dict[str, Unchecked], dict[str, object]]] = [
    ({"json_schema": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"choice": pb.ChoiceConstraint(choices=["x", "y"])}, {"choice": ["x", "y"]}),
    ({"json_object": True}, {"json_schema": {"type": "object"}}),
]
WITHOUT_EFFECT: list[dict[str, Unchecked]] = [
    {"json_object": False},
    {"spaces_between_special_tokens": True},
    {"include_stop_str_in_output": True},
    {"grammar_from_first_token": True},
]
UNKNOWN_PARAMS: list[tuple[str, Unchecked]] = [
    ("grammar", "root ::= 'a'"),
    ("structural_tag", "{}"),
    ("prompt_logprobs", 0),
    ("truncate_prompt_tokens", 5),
]
UNKNOWN_FIELDS: list[tuple[str, Unchecked]] = [
    ("kv_transfer_params", pb.KvTransferParams()),
    ("kv_transfer_params_json", ""),
    ("mm_inputs", pb.MultimodalInputs()),
    ("extra_mm_inputs", [pb.MultimodalInputs()]),
    ("media_refs", pb.MediaRefs()),
    ("data_parallel_rank", 1),
]


def fields_of(**params: Unchecked) -> dict[str, object]:
    """Return what is understood of sampling parameters, without what is as if it had not been given."""
    fields = generate_fields(pb.GenerateRequest(sampling_params=pb.SamplingParams(**params)))
    return fields.model_dump(exclude_none=True)


def test_absent_fields_have_vllms_meaning() -> None:
    assert fields_of() == {
        "request_id": "",
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "min_tokens": 0,
        "skip_special_tokens": False,
        "ignore_eos": False,
        "stop": [],
        "stop_token_ids": [],
        "logit_bias": {},
    }


@pytest.mark.parametrize(("name", "value"), UNDERSTOOD)
def test_sampling_parameters_are_understood(name: str, value: Unchecked) -> None:
    assert fields_of(**{name: value})[name] == value


@pytest.mark.parametrize(("params", "meaning"), CONSTRAINTS)
def test_constraints_become_structured_outputs(params: dict[str, Unchecked], meaning: dict[str, object]) -> None:
    assert fields_of(**params)["structured_outputs"] == meaning


@pytest.mark.parametrize("params", WITHOUT_EFFECT)
def test_what_has_no_effect_here_is_taken(params: dict[str, Unchecked]) -> None:
    assert fields_of(**params) == fields_of()


@pytest.mark.parametrize(("name", "value"), UNKNOWN_PARAMS)
def test_sampling_parameters_that_a_cluster_does_not_have_are_refused_by_name(name: str, value: Unchecked) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}: is not supported here") as refused:
        fields_of(**{name: value})
    assert refused.value.param == name


@pytest.mark.parametrize(("name", "value"), UNKNOWN_FIELDS)
def test_requests_for_what_a_cluster_does_not_have_are_refused_by_name(name: str, value: Unchecked) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name}: ") as refused:
        generate_fields(pb.GenerateRequest(**{name: value}))
    assert refused.value.param == name


def test_the_only_rank_may_be_named() -> None:
    generate_fields(pb.GenerateRequest(data_parallel_rank=0))


def test_the_tables_above_hold_every_field() -> None:
    """A field that a later protocol adds must be looked at, not passed over."""
    tables = (UNDERSTOOD, UNKNOWN_PARAMS, [(name, None) for params, _ in CONSTRAINTS for name in params])
    names = {name for table in tables for name, _ in table} | {name for params in WITHOUT_EFFECT for name in params}
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    understood = {"request_id", "tokenized", "text", "sampling_params", "stream"}
    assert understood | {name for name, _ in UNKNOWN_FIELDS} == set(pb.GenerateRequest.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"temperature": 9.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"choice": pb.ChoiceConstraint()}, "structured_outputs.choice"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params: dict[str, Unchecked], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        fields_of(**params)
    assert refused.value.param == param


def plan_of(num_sequences: int = 1, **sampling: Unchecked) -> GenerationRequest:
    params = SamplingParams(max_tokens=99, eos_token_ids=(EOS,), **sampling)
    return GenerationRequest(
        request_id=RequestId("mine"),
        tenant="default",
        sequences=tuple(EngineRequest(RequestId(str(i)), (1, 2, 3), params) for i in range(num_sequences)),
        num_prompts=1,
        stop=(),
        skip_special_tokens=True,
        timeout_s=1.0,
    )


def ending(reason: FinishReason = FinishReason.LENGTH, *, tokens: int = 0, stop_string: str | None = None) -> Ending:
    return Ending(reason, "engine-0", RECEIPT, tokens, stop_string=stop_string)


def last_of(token_ids: tuple[int, ...], end: Ending, **sampling: Unchecked) -> pb.GenerateComplete:
    (response,) = AnswerWriter(plan_of(**sampling), streams=False).write(Delta(0, "", token_ids, ending=end))
    return response.complete


def test_a_sequence_ends_with_its_counts() -> None:
    complete = last_of((5, 6), ending(tokens=2))
    assert complete == pb.GenerateComplete(
        output_ids=[5, 6], finish_reason="length", prompt_tokens=3, completion_tokens=2, cached_tokens=2
    )


def test_what_stopped_a_sequence_is_named() -> None:
    stop = FinishReason.STOP
    by_string = last_of((5, 6), ending(stop, stop_string="xy"), stop_token_ids=(6,))
    assert (by_string.finish_reason, by_string.WhichOneof("matched_stop")) == ("stop", "matched_stop_str")
    assert by_string.matched_stop_str == "xy"
    by_token = last_of((5, 6), ending(stop), stop_token_ids=(6,))
    assert (by_token.WhichOneof("matched_stop"), by_token.matched_token_id) == ("matched_token_id", 6)
    for tokens, sampling in (
        ((5, EOS), {}),
        ((5, EOS), {"stop_token_ids": (EOS,)}),  # the end of the text, whoever else asked for it
        ((5, 6), {}),  # a grammar's end
        ((), {"stop_token_ids": (6,)}),
    ):
        assert last_of(tokens, ending(stop), **sampling).WhichOneof("matched_stop") is None
    asked_for = last_of((5, EOS), ending(stop), stop_token_ids=(EOS,), ignore_eos=True)
    assert asked_for.matched_token_id == EOS
    assert last_of((5, 6), ending(), stop_token_ids=(6,)).WhichOneof("matched_stop") is None


def test_logprobs_stand_beside_their_tokens() -> None:
    entries = (TokenLogprobs(-0.5, ((5, -0.5), (9, -1.0))), TokenLogprobs(-2.0))
    expected = pb.OutputLogProbs(
        token_ids=[5, 6],
        token_logprobs=[-0.5, -2.0],
        top_logprobs=[pb.TopLogProbs(token_ids=[5, 9], values=[-0.5, -1.0]), pb.TopLogProbs()],
    )
    delta = Delta(0, "", (5, 6), entries, ending(tokens=2))
    (whole,) = AnswerWriter(plan_of(), streams=False).write(delta)
    assert whole.complete.output_logprobs == expected
    chunk, last = AnswerWriter(plan_of(), streams=True).write(delta)
    assert chunk.chunk.output_logprobs == expected
    assert not last.complete.HasField("output_logprobs")


tokens = st.integers(0, 255)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(tokens, max_size=3)), max_size=12))
def test_a_stream_and_a_whole_answer_have_the_same_tokens(steps: list[tuple[int, list[int]]]) -> None:
    deltas = [Delta(index, "", tuple(ids)) for index, ids in steps]
    expected = {i: [token for index, ids in steps if index == i for token in ids] for i in range(3)}
    deltas += [Delta(index, ending=ending(tokens=len(expected[index]))) for index in range(3)]
    for streams in (True, False):
        writer = AnswerWriter(plan_of(3), streams=streams)
        responses = [response for delta in deltas for response in writer.write(delta)]
        completes = [response.complete for response in responses if response.HasField("complete")]
        assert [(each.index, list(each.output_ids), each.completion_tokens) for each in completes] == [
            (index, ids, len(ids)) for index, ids in expected.items()
        ]
        chunks = [response.chunk for response in responses if response.HasField("chunk")]
        sent = {i: [token for chunk in chunks if chunk.index == i for token in chunk.token_ids] for i in range(3)}
        assert sent == (expected if streams else {0: [], 1: [], 2: []})
        assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 for chunk in chunks)


def test_the_model_is_described() -> None:
    info = model_info(tiny_model(max_model_len=512))
    assert (info.served_model_name, info.vocab_size, info.max_context_length) == ("tiny", 257, 512)
    assert info.tokenizer_path != info.served_model_name, "which may name another tokenizer elsewhere"
    assert (info.is_generation, info.supports_vision, list(info.eos_token_ids)) == (True, False, [EOS])


def test_a_cluster_is_one_engine_to_a_gateway() -> None:
    stats = replace(
        IDLE_STATS,
        num_running=2,
        num_waiting=1,
        blocks_held=16,
        blocks_cached=9,
        prefix_cache_queries_total=8,
        prefix_cache_hits_total=2,
    )
    engines = {"a": EngineStatus(DEFAULT_INFO, stats), "b": EngineStatus(DEFAULT_INFO, IDLE_STATS)}
    assert scheduler_load(engines, num_queued=5) == pb.SchedulerLoad(
        num_running_reqs=2,
        num_waiting_reqs=6,
        num_total_reqs=8,
        num_used_tokens=256,
        max_total_num_tokens=2048,
        token_usage=0.125,
        utilization=0.125,
        cache_hit_rate=0.25,
        max_running_requests=8,
    )
    assert scheduler_load({}, num_queued=0) == pb.SchedulerLoad()


def test_a_cluster_may_hold_more_tokens_than_the_protocol_can_say() -> None:
    info, stats = replace(DEFAULT_INFO, num_blocks=2**28), replace(IDLE_STATS, blocks_held=2**27)
    load = scheduler_load({"a": EngineStatus(info, stats)}, num_queued=0)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (2**31 - 1, 2**31 - 1, 0.5)
