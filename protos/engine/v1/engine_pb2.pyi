from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_TIMEOUT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class RejectionCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECTION_CODE_UNSPECIFIED: _ClassVar[RejectionCode]
    REJECTION_CODE_INVALID_REQUEST: _ClassVar[RejectionCode]
    REJECTION_CODE_CONTEXT_LENGTH: _ClassVar[RejectionCode]
    REJECTION_CODE_NEVER_FITS: _ClassVar[RejectionCode]
    REJECTION_CODE_CAPACITY: _ClassVar[RejectionCode]
    REJECTION_CODE_ENGINE_LOST: _ClassVar[RejectionCode]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_TIMEOUT: FinishReason
FINISH_REASON_ERROR: FinishReason
REJECTION_CODE_UNSPECIFIED: RejectionCode
REJECTION_CODE_INVALID_REQUEST: RejectionCode
REJECTION_CODE_CONTEXT_LENGTH: RejectionCode
REJECTION_CODE_NEVER_FITS: RejectionCode
REJECTION_CODE_CAPACITY: RejectionCode
REJECTION_CODE_ENGINE_LOST: RejectionCode

class ListSequencesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[SequenceRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[SequenceRow, _Mapping]]] = ...) -> None: ...

class SequenceRow(_message.Message):
    __slots__ = ("request_id", "tenant", "policy", "phase", "num_prompt", "num_tokens", "blocks", "reserved_blocks", "kv_budget", "evicted_tokens", "shrinks", "offloads", "preemptions")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BUDGET_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHRINKS_FIELD_NUMBER: _ClassVar[int]
    OFFLOADS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    policy: str
    phase: str
    num_prompt: int
    num_tokens: int
    blocks: int
    reserved_blocks: int
    kv_budget: int
    evicted_tokens: int
    shrinks: int
    offloads: int
    preemptions: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., policy: _Optional[str] = ..., phase: _Optional[str] = ..., num_prompt: _Optional[int] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., kv_budget: _Optional[int] = ..., evicted_tokens: _Optional[int] = ..., shrinks: _Optional[int] = ..., offloads: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class LookAtSequenceRequest(_message.Message):
    __slots__ = ("request_id", "layer", "kv_head")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    layer: int
    kv_head: int
    def __init__(self, request_id: _Optional[str] = ..., layer: _Optional[int] = ..., kv_head: _Optional[int] = ...) -> None: ...

class LookAtSequenceResponse(_message.Message):
    __slots__ = ("look",)
    LOOK_FIELD_NUMBER: _ClassVar[int]
    look: SequenceLook
    def __init__(self, look: _Optional[_Union[SequenceLook, _Mapping]] = ...) -> None: ...

class SequenceLook(_message.Message):
    __slots__ = ("row", "token_ids", "num_written", "num_cached", "block_ids", "num_shared", "slots", "events")
    ROW_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    row: SequenceRow
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_written: int
    num_cached: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    num_shared: int
    slots: HeadSlots
    events: _containers.RepeatedCompositeFieldContainer[SequenceEvent]
    def __init__(self, row: _Optional[_Union[SequenceRow, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_written: _Optional[int] = ..., num_cached: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., num_shared: _Optional[int] = ..., slots: _Optional[_Union[HeadSlots, _Mapping]] = ..., events: _Optional[_Iterable[_Union[SequenceEvent, _Mapping]]] = ...) -> None: ...

class HeadSlots(_message.Message):
    __slots__ = ("positions", "scores", "values", "alive")
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    values: _containers.RepeatedScalarFieldContainer[float]
    alive: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, positions: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[float]] = ..., values: _Optional[_Iterable[float]] = ..., alive: _Optional[_Iterable[bool]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("submit", "abort", "finish")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    submit: SubmitCommand
    abort: AbortCommand
    finish: FinishCommand
    def __init__(self, submit: _Optional[_Union[SubmitCommand, _Mapping]] = ..., abort: _Optional[_Union[AbortCommand, _Mapping]] = ..., finish: _Optional[_Union[FinishCommand, _Mapping]] = ...) -> None: ...

class SubmitCommand(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "sampling", "kv", "priority", "timeout_s", "cache_salt", "answer_token_ids", "terms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    kv: KVParams
    priority: int
    timeout_s: float
    cache_salt: str
    answer_token_ids: _containers.RepeatedScalarFieldContainer[int]
    terms: LeaseTerms
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., kv: _Optional[_Union[KVParams, _Mapping]] = ..., priority: _Optional[int] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., answer_token_ids: _Optional[_Iterable[int]] = ..., terms: _Optional[_Union[LeaseTerms, _Mapping]] = ...) -> None: ...

class LeaseTerms(_message.Message):
    __slots__ = ("lease_id", "tenant", "reserved_blocks", "weight", "least_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    LEAST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    reserved_blocks: int
    weight: float
    least_tokens: int
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ..., reserved_blocks: _Optional[int] = ..., weight: _Optional[float] = ..., least_tokens: _Optional[int] = ...) -> None: ...

class AbortCommand(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class FinishCommand(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "logprobs", "logit_bias", "min_tokens", "stop_token_ids", "eos_token_ids", "ignore_eos", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    grammar: str
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., grammar: _Optional[str] = ...) -> None: ...

class KVParams(_message.Message):
    __slots__ = ("policy", "kv_budget_tokens", "kv_budget_fraction", "min_retained_mass")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KV_BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BUDGET_FRACTION_FIELD_NUMBER: _ClassVar[int]
    MIN_RETAINED_MASS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    kv_budget_tokens: int
    kv_budget_fraction: float
    min_retained_mass: float
    def __init__(self, policy: _Optional[str] = ..., kv_budget_tokens: _Optional[int] = ..., kv_budget_fraction: _Optional[float] = ..., min_retained_mass: _Optional[float] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("hello", "step", "rejection", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    step: StepOutputs
    rejection: Rejection
    heartbeat: Heartbeat
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., step: _Optional[_Union[StepOutputs, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("info", "stats")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    info: EngineInfo
    stats: EngineStats
    def __init__(self, info: _Optional[_Union[EngineInfo, _Mapping]] = ..., stats: _Optional[_Union[EngineStats, _Mapping]] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("engine_id", "model_name", "max_model_len", "vocab_size", "num_blocks", "block_size", "max_num_seqs", "max_num_waiting", "tensor_parallel_size")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    model_name: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_waiting: int
    tensor_parallel_size: int
    def __init__(self, engine_id: _Optional[str] = ..., model_name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_waiting: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs", "stats")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[RequestOutput]
    stats: EngineStats
    def __init__(self, outputs: _Optional[_Iterable[_Union[RequestOutput, _Mapping]]] = ..., stats: _Optional[_Union[EngineStats, _Mapping]] = ...) -> None: ...

class RequestOutput(_message.Message):
    __slots__ = ("request_id", "token_ids", "logprobs", "finish_reason", "receipt", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    receipt: Receipt
    error: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("policy", "kv_budget", "prompt_tokens", "prompt_tokens_cached", "completion_tokens", "kv_tokens_held", "kv_tokens_evicted", "retained_mass", "kv_page_seconds", "queued_ms", "preemptions", "evicted_in_prefill", "shrinks", "offloads", "events")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KV_BUDGET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_HELD_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_MASS_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_MS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_IN_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SHRINKS_FIELD_NUMBER: _ClassVar[int]
    OFFLOADS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    policy: str
    kv_budget: int
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
    shrinks: int
    offloads: int
    events: _containers.RepeatedCompositeFieldContainer[SequenceEvent]
    def __init__(self, policy: _Optional[str] = ..., kv_budget: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., kv_tokens_held: _Optional[int] = ..., kv_tokens_evicted: _Optional[int] = ..., retained_mass: _Optional[float] = ..., kv_page_seconds: _Optional[float] = ..., queued_ms: _Optional[float] = ..., preemptions: _Optional[int] = ..., evicted_in_prefill: _Optional[bool] = ..., shrinks: _Optional[int] = ..., offloads: _Optional[int] = ..., events: _Optional[_Iterable[_Union[SequenceEvent, _Mapping]]] = ...) -> None: ...

class SequenceEvent(_message.Message):
    __slots__ = ("kind", "at_s", "tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    at_s: float
    tokens: int
    def __init__(self, kind: _Optional[str] = ..., at_s: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("request_id", "code", "message", "param", "retry_after_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    code: RejectionCode
    message: str
    param: str
    retry_after_s: float
    def __init__(self, request_id: _Optional[str] = ..., code: _Optional[_Union[RejectionCode, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("stats", "healthy")
    STATS_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    stats: EngineStats
    healthy: bool
    def __init__(self, stats: _Optional[_Union[EngineStats, _Mapping]] = ..., healthy: _Optional[bool] = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("num_running", "num_waiting", "blocks_free", "blocks_held", "blocks_cached", "steps_total", "prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total", "preemptions_total", "evicted_tokens_total")
    class EvictedTokensTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    STEPS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EVICTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
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
    evicted_tokens_total: _containers.ScalarMap[str, int]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_held: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., steps_total: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., generation_tokens_total: _Optional[int] = ..., prefix_cache_queries_total: _Optional[int] = ..., prefix_cache_hits_total: _Optional[int] = ..., preemptions_total: _Optional[int] = ..., evicted_tokens_total: _Optional[_Mapping[str, int]] = ...) -> None: ...
