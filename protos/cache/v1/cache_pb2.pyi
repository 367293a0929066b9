from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_NEVER_FITS: _ClassVar[RefusalReason]
    REFUSAL_REASON_CONCURRENCY: _ClassVar[RefusalReason]
    REFUSAL_REASON_RATE: _ClassVar[RefusalReason]
    REFUSAL_REASON_QUOTA: _ClassVar[RefusalReason]
    REFUSAL_REASON_CAPACITY: _ClassVar[RefusalReason]
    REFUSAL_REASON_NO_ENGINE: _ClassVar[RefusalReason]
    REFUSAL_REASON_DEADLINE: _ClassVar[RefusalReason]
    REFUSAL_REASON_UNKNOWN_TENANT: _ClassVar[RefusalReason]
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_NEVER_FITS: RefusalReason
REFUSAL_REASON_CONCURRENCY: RefusalReason
REFUSAL_REASON_RATE: RefusalReason
REFUSAL_REASON_QUOTA: RefusalReason
REFUSAL_REASON_CAPACITY: RefusalReason
REFUSAL_REASON_NO_ENGINE: RefusalReason
REFUSAL_REASON_DEADLINE: RefusalReason
REFUSAL_REASON_UNKNOWN_TENANT: RefusalReason

class AdmitRequest(_message.Message):
    __slots__ = ("router_id", "requests")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    requests: _containers.RepeatedCompositeFieldContainer[LeaseRequest]
    def __init__(self, router_id: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[LeaseRequest, _Mapping]]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("lease_id", "tenant", "sequence_blocks", "tokens", "max_wait_s", "priority", "prefix_runs")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_RUNS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    sequence_blocks: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    max_wait_s: float
    priority: int
    prefix_runs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ..., sequence_blocks: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., max_wait_s: _Optional[float] = ..., priority: _Optional[int] = ..., prefix_runs: _Optional[_Iterable[int]] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("decisions", "num_read")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_READ_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[LeaseDecision]
    num_read: int
    def __init__(self, decisions: _Optional[_Iterable[_Union[LeaseDecision, _Mapping]]] = ..., num_read: _Optional[int] = ...) -> None: ...

class LeaseDecision(_message.Message):
    __slots__ = ("lease_id", "grant", "refusal")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    grant: Grant
    refusal: Refusal
    def __init__(self, lease_id: _Optional[str] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("engine_id",)
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    def __init__(self, engine_id: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message", "retry_after_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    reason: RefusalReason
    message: str
    retry_after_s: float
    def __init__(self, reason: _Optional[_Union[RefusalReason, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("router_id", "leases", "has_more")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HAS_MORE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRecord]
    has_more: bool
    def __init__(self, router_id: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[LeaseRecord, _Mapping]]] = ..., has_more: _Optional[bool] = ...) -> None: ...

class LeaseRecord(_message.Message):
    __slots__ = ("lease_id", "tenant", "engine_id", "sequence_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    engine_id: str
    sequence_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ..., engine_id: _Optional[str] = ..., sequence_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("shares", "is_learning", "lease_s", "is_new")
    class SharesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SafeShare
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SafeShare, _Mapping]] = ...) -> None: ...
    SHARES_FIELD_NUMBER: _ClassVar[int]
    IS_LEARNING_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.MessageMap[str, SafeShare]
    is_learning: bool
    lease_s: float
    is_new: bool
    def __init__(self, shares: _Optional[_Mapping[str, SafeShare]] = ..., is_learning: _Optional[bool] = ..., lease_s: _Optional[float] = ..., is_new: _Optional[bool] = ...) -> None: ...

class SafeShare(_message.Message):
    __slots__ = ("blocks", "max_running", "max_requests_per_minute")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    max_running: int
    max_requests_per_minute: int
    def __init__(self, blocks: _Optional[int] = ..., max_running: _Optional[int] = ..., max_requests_per_minute: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids", "ended_lease_ids")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    ended_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ..., ended_lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoordinateRequest(_message.Message):
    __slots__ = ("snapshot", "delta", "acknowledged_directive")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    delta: Delta
    acknowledged_directive: int
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., acknowledged_directive: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("engine_id", "epoch", "max_sequences", "report", "leases")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch: int
    max_sequences: int
    report: EngineReport
    leases: _containers.RepeatedCompositeFieldContainer[LeaseUse]
    def __init__(self, engine_id: _Optional[str] = ..., epoch: _Optional[int] = ..., max_sequences: _Optional[int] = ..., report: _Optional[_Union[EngineReport, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[LeaseUse, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("number", "report", "started", "ended")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    report: EngineReport
    started: _containers.RepeatedCompositeFieldContainer[LeaseUse]
    ended: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., report: _Optional[_Union[EngineReport, _Mapping]] = ..., started: _Optional[_Iterable[_Union[LeaseUse, _Mapping]]] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "cached_blocks", "price", "tenants", "reclaimed", "unread_tokens")
    class TenantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TenantUse
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TenantUse, _Mapping]] = ...) -> None: ...
    class ReclaimedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    RECLAIMED_FIELD_NUMBER: _ClassVar[int]
    UNREAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    price: float
    tenants: _containers.MessageMap[str, TenantUse]
    reclaimed: _containers.ScalarMap[str, int]
    unread_tokens: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., price: _Optional[float] = ..., tenants: _Optional[_Mapping[str, TenantUse]] = ..., reclaimed: _Optional[_Mapping[str, int]] = ..., unread_tokens: _Optional[int] = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("held", "reserved", "elastic", "cached", "worths")
    HELD_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    ELASTIC_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    WORTHS_FIELD_NUMBER: _ClassVar[int]
    held: int
    reserved: int
    elastic: int
    cached: int
    worths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, held: _Optional[int] = ..., reserved: _Optional[int] = ..., elastic: _Optional[int] = ..., cached: _Optional[int] = ..., worths: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseUse(_message.Message):
    __slots__ = ("lease_id", "tenant", "reserved_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    tenant: str
    reserved_blocks: int
    def __init__(self, lease_id: _Optional[str] = ..., tenant: _Optional[str] = ..., reserved_blocks: _Optional[int] = ...) -> None: ...

class CoordinateResponse(_message.Message):
    __slots__ = ("directive", "send_snapshot", "heartbeat", "report_period_s")
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    SEND_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    REPORT_PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    directive: Directive
    send_snapshot: SnapshotOrder
    heartbeat: Heartbeat
    report_period_s: float
    def __init__(self, directive: _Optional[_Union[Directive, _Mapping]] = ..., send_snapshot: _Optional[_Union[SnapshotOrder, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., report_period_s: _Optional[float] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("number", "allowances", "reclaim_blocks")
    class AllowancesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ALLOWANCES_FIELD_NUMBER: _ClassVar[int]
    RECLAIM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    allowances: _containers.ScalarMap[str, int]
    reclaim_blocks: int
    def __init__(self, number: _Optional[int] = ..., allowances: _Optional[_Mapping[str, int]] = ..., reclaim_blocks: _Optional[int] = ...) -> None: ...

class SnapshotOrder(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("number", "engines", "tenants", "gone_engines", "gone_tenants", "price", "drift_blocks", "oldest_lease_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    GONE_ENGINES_FIELD_NUMBER: _ClassVar[int]
    GONE_TENANTS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    DRIFT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineView]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantView]
    gone_engines: _containers.RepeatedScalarFieldContainer[str]
    gone_tenants: _containers.RepeatedScalarFieldContainer[str]
    price: float
    drift_blocks: int
    oldest_lease_s: float
    def __init__(self, number: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineView, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantView, _Mapping]]] = ..., gone_engines: _Optional[_Iterable[str]] = ..., gone_tenants: _Optional[_Iterable[str]] = ..., price: _Optional[float] = ..., drift_blocks: _Optional[int] = ..., oldest_lease_s: _Optional[float] = ...) -> None: ...

class EngineView(_message.Message):
    __slots__ = ("engine_id", "total_blocks", "held_blocks", "reserved_blocks", "cached_blocks", "free_blocks", "num_leases", "price", "reclaimed")
    class ReclaimedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    RECLAIMED_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    total_blocks: int
    held_blocks: int
    reserved_blocks: int
    cached_blocks: int
    free_blocks: int
    num_leases: int
    price: float
    reclaimed: _containers.ScalarMap[str, int]
    def __init__(self, engine_id: _Optional[str] = ..., total_blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., num_leases: _Optional[int] = ..., price: _Optional[float] = ..., reclaimed: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TenantView(_message.Message):
    __slots__ = ("tenant", "held_blocks", "reserved_blocks", "cached_blocks", "floor_blocks", "ceiling_blocks", "num_running", "num_waiting", "admitted_total", "refused_total", "share_of_service")
    class RefusedTotalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CEILING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SHARE_OF_SERVICE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    held_blocks: int
    reserved_blocks: int
    cached_blocks: int
    floor_blocks: int
    ceiling_blocks: int
    num_running: int
    num_waiting: int
    admitted_total: int
    refused_total: _containers.ScalarMap[str, int]
    share_of_service: float
    def __init__(self, tenant: _Optional[str] = ..., held_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., floor_blocks: _Optional[int] = ..., ceiling_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., admitted_total: _Optional[int] = ..., refused_total: _Optional[_Mapping[str, int]] = ..., share_of_service: _Optional[float] = ...) -> None: ...
