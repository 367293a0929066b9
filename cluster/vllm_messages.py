"""The gateways' protocol, vllm.grpc.engine: its messages as checked fields, and answers as messages.

A field that asks for what a cluster does not have is refused by its name, whatever its value. What concerns only the
text of an answer has no effect: gateways turn tokens into text themselves, and cut it at stop strings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import Message
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.generation import Delta, Ending
from kvorum.cluster.grpc_messages import GenerateFields, present, validated
from kvorum.cluster.model import ServedModel
from kvorum.cluster.planning import GenerationRequest
from kvorum.cluster.tokenizer_archive import tokenizer_archive
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.workers.request import FinishReason, TokenLogprobs

_OPTIONAL_SAMPLING = ("temperature", "max_tokens", "logprobs", "seed")
# These are never 0, so 0 is what an absent one looks like.
_POSITIVE_SAMPLING = ("top_p", "repetition_penalty", "n")
_PLAIN_SAMPLING = (
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "skip_special_tokens",
    "ignore_eos",
)
_CONSTRAINTS = ("json_schema", "regex", "json_object", "choice")
# A grammar always holds from the first token here.
_WITHOUT_EFFECT = ("spaces_between_special_tokens", "include_stop_str_in_output", "grammar_from_first_token")
_KNOWN_SAMPLING = frozenset(
    (
        *_OPTIONAL_SAMPLING,
        *_POSITIVE_SAMPLING,
        *_PLAIN_SAMPLING,
        *_CONSTRAINTS,
        *_WITHOUT_EFFECT,
        "stop",
        "stop_token_ids",
        "logit_bias",
    )
)
# Names nothing that a gateway could find elsewhere: it then takes the tokenizer that is served, and its chat template.
_TOKENIZER_PATH = "kvorum:tokenizer"
_CHUNK_BYTES = 64 * 1024
_INT32_MAX = 2**31 - 1
_KNOWN_REQUEST = frozenset(("request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"))


def generate_fields(message: pb.GenerateRequest) -> GenerateFields:
    """Check a request's fields; raises InvalidRequestError, also for those that a cluster does not have."""
    params = message.sampling_params
    _refuse_others(message, _KNOWN_REQUEST)
    _refuse_others(params, _KNOWN_SAMPLING)
    if message.data_parallel_rank:
        raise InvalidRequestError(
            f"data_parallel_rank: is {message.data_parallel_rank}, but there is only rank 0", param="data_parallel_rank"
        )
    values = present(params, _OPTIONAL_SAMPLING)
    values |= {name: getattr(params, name) for name in _PLAIN_SAMPLING}
    values |= {name: getattr(params, name) or None for name in _POSITIVE_SAMPLING}
    values |= {
        "request_id": message.request_id,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": dict(params.logit_bias),
        "structured_outputs": _structured_values(params),
    }
    return validated(GenerateFields, values)


@dataclass(slots=True)
class _Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class AnswerWriter:
    """Writes the answers to one request: for each sequence its chunks, if it streams, and at its end the whole.

    A sequence that does not end by itself has no such message: the call fails with its error's status.
    """

    def __init__(self, plan: GenerationRequest, *, streams: bool) -> None:
        self._plan = plan
        self._streams = streams
        self._answers = [_Answer() for _ in plan.sequences]

    def write(self, delta: Delta) -> Iterator[pb.GenerateResponse]:
        """Yield the messages for what is new."""
        answer = self._answers[delta.index]
        answer.token_ids += delta.token_ids
        if self._streams:
            if delta.token_ids:
                yield pb.GenerateResponse(chunk=self._chunk(delta))
        else:
            answer.logprobs += delta.logprobs
        if delta.ending:
            yield pb.GenerateResponse(complete=self._complete(delta.index, delta.ending))

    def _chunk(self, delta: Delta) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            index=delta.index,
            token_ids=delta.token_ids,
            output_logprobs=_logprobs_message(delta.token_ids, delta.logprobs),
            prompt_tokens=self._plan.prompt_tokens,
            completion_tokens=len(delta.token_ids),
        )

    def _complete(self, index: int, ending: Ending) -> pb.GenerateComplete:
        answer = self._answers[index]
        message = pb.GenerateComplete(
            index=index,
            output_ids=answer.token_ids,
            output_logprobs=_logprobs_message(answer.token_ids, answer.logprobs),
            finish_reason=ending.reason.value,
            prompt_tokens=self._plan.prompt_tokens,
            completion_tokens=ending.completion_tokens,
            cached_tokens=ending.receipt.prompt_tokens_cached,
        )
        if ending.stop_string is not None:
            message.matched_stop_str = ending.stop_string
        elif (token_id := self._stop_token(index, ending)) is not None:
            message.matched_token_id = token_id
        return message

    def _stop_token(self, index: int, ending: Ending) -> int | None:
        """Return the stop token that ended a sequence; the end of the text, where that counts, is none."""
        sampling = self._plan.sequences[index].sampling
        token_ids = self._answers[index].token_ids
        ends_text = () if sampling.ignore_eos else sampling.eos_token_ids
        if ending.reason is not FinishReason.STOP or not token_ids or token_ids[-1] in ends_text:
            return None
        return token_ids[-1] if token_ids[-1] in sampling.stop_token_ids else None


def model_info(model: ServedModel) -> pb.GetModelInfoResponse:
    """Describe the served model."""
    return pb.GetModelInfoResponse(
        model_path=model.name,
        served_model_name=model.name,
        tokenizer_path=_TOKENIZER_PATH,
        is_generation=True,
        vocab_size=model.vocab_size,
        max_context_length=model.max_model_len,
        max_req_input_len=model.max_model_len - 1,
        eos_token_ids=model.eos_token_ids,
    )


def scheduler_load(engines: Mapping[str, EngineStatus], *, num_queued: int) -> pb.SchedulerLoad:
    """Add up what engines do; num_queued: requests that have no engine yet."""
    statuses = engines.values()
    num_running = sum(status.stats.num_running for status in statuses)
    num_waiting = sum(status.stats.num_waiting for status in statuses) + num_queued
    capacity = sum(status.info.num_blocks * status.info.block_size for status in statuses)
    used = sum(status.stats.blocks_held * status.info.block_size for status in statuses)
    queries = sum(status.stats.prefix_cache_queries_total for status in statuses)
    hits = sum(status.stats.prefix_cache_hits_total for status in statuses)
    usage = used / capacity if capacity else 0.0
    return pb.SchedulerLoad(
        num_running_reqs=num_running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=num_running + num_waiting,
        # The protocol was made for one engine: a large cluster holds more tokens than its fields.
        num_used_tokens=min(used, _INT32_MAX),
        max_total_num_tokens=min(capacity, _INT32_MAX),
        token_usage=usage,
        utilization=usage,
        cache_hit_rate=hits / queries if queries else 0.0,
        max_running_requests=sum(status.info.max_num_seqs for status in statuses),
    )


def tokenizer_chunks(model: ServedModel) -> tuple[common_pb2.GetTokenizerChunk, ...]:
    """Return the model's tokenizer as an archive in pieces, of which the last one has the digest of the whole."""
    archive = tokenizer_archive(model)
    chunks = tuple(
        common_pb2.GetTokenizerChunk(data=archive[start : start + _CHUNK_BYTES])
        for start in range(0, len(archive), _CHUNK_BYTES)
    )
    chunks[-1].sha256 = hashlib.sha256(archive).hexdigest()
    return chunks


def _refuse_others(message: Message, known: Collection[str]) -> None:
    for descriptor, _ in message.ListFields():
        if descriptor.name not in known:
            raise InvalidRequestError(f"{descriptor.name}: is not supported here", param=descriptor.name)


def _structured_values(params: pb.SamplingParams) -> dict[str, object] | None:
    match params.WhichOneof("constraint"):
        case "json_schema":
            return {"json": params.json_schema}
        case "regex":
            return {"regex": params.regex}
        case "choice":
            return {"choice": list(params.choice.choices)}
        case "json_object" if params.json_object:
            return {"json": {"type": "object"}}
    return None


def _logprobs_message(token_ids: Collection[int], logprobs: Collection[TokenLogprobs]) -> pb.OutputLogProbs | None:
    if not logprobs:
        return None
    top = [
        pb.TopLogProbs(token_ids=[token_id for token_id, _ in entry.top], values=[value for _, value in entry.top])
        for entry in logprobs
    ]
    return pb.OutputLogProbs(
        token_ids=token_ids, token_logprobs=[entry.logprob for entry in logprobs], top_logprobs=top
    )
