"""The control plane's messages as plain data, and back; protobuf types go no further than this and its callers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.message import Message

from kvorum.cluster.manager.safe_shares import SafeShare
from kvorum.cluster.manager.types import (
    AdmitRequest,
    EngineFacts,
    EngineView,
    Granted,
    LeaseChanges,
    LeaseRecord,
    Refusal,
    Refused,
    TenantView,
)
from kvorum.cluster.manager.watching import ViewChange
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvorum.workers.governance import Directive, EngineReport, LadderStep, LeaseUse, TenantUse


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that an engine knows."""

    facts: EngineFacts
    report: EngineReport
    leases: tuple[LeaseUse, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed at an engine since the message before; report: EngineReport.since that one's."""

    number: int
    report: EngineReport
    changes: LeaseChanges


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The last directive that an engine carried out."""

    number: int


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """The manager lost count of an engine's deltas."""


EngineMessage = Snapshot | Delta | Acknowledgement


# Routers.


def lease_request_to_pb(request: AdmitRequest) -> pb.LeaseRequest:
    """Write an AdmitRequest; who asks is said once for all of a message."""
    return pb.LeaseRequest(
        lease_id=request.lease_id,
        tenant=request.tenant,
        sequence_blocks=request.sequence_blocks,
        tokens=request.tokens,
        max_wait_s=request.max_wait_s,
        priority=request.priority,
        prefix_runs=request.prefix_runs,
    )


def lease_request_from_pb(message: pb.LeaseRequest, router_id: str) -> AdmitRequest:
    """Read an AdmitRequest."""
    return AdmitRequest(
        lease_id=message.lease_id,
        tenant=message.tenant,
        sequence_blocks=tuple(message.sequence_blocks),
        tokens=message.tokens,
        max_wait_s=message.max_wait_s,
        priority=message.priority,
        prefix_runs=tuple(message.prefix_runs),
        router_id=router_id,
    )


def outcome_to_pb(outcome: Granted | Refused) -> pb.LeaseDecision:
    """Write the answer to an AdmitRequest."""
    if isinstance(outcome, Granted):
        return pb.LeaseDecision(lease_id=outcome.lease_id, grant=pb.Grant(engine_id=outcome.engine_id))
    return pb.LeaseDecision(
        lease_id=outcome.lease_id,
        refusal=pb.Refusal(
            reason=_REASON_PREFIX + outcome.reason.name,
            message=outcome.message,
            retry_after_s=outcome.retry_after_s,
        ),
    )


def outcome_from_pb(message: pb.LeaseDecision) -> str | Refused:
    """Read the answer to an AdmitRequest: the engine's id, or why not."""
    if message.WhichOneof("outcome") == "grant":
        return message.grant.engine_id
    refusal = message.refusal
    reason = Refusal[pb.RefusalReason.Name(refusal.reason).removeprefix(_REASON_PREFIX)]
    retry_after_s = refusal.retry_after_s if refusal.HasField("retry_after_s") else None
    return Refused(message.lease_id, reason, refusal.message, retry_after_s)


_REASON_PREFIX = "REFUSAL_REASON_"


def record_to_pb(record: LeaseRecord) -> pb.LeaseRecord:
    """Write a LeaseRecord."""
    return pb.LeaseRecord(
        lease_id=record.lease_id,
        tenant=record.tenant,
        engine_id=record.engine_id,
        sequence_blocks=record.sequence_blocks,
    )


def record_from_pb(message: pb.LeaseRecord) -> LeaseRecord:
    """Read a LeaseRecord."""
    return LeaseRecord(message.lease_id, message.tenant, message.engine_id, tuple(message.sequence_blocks))


def share_to_pb(share: SafeShare) -> pb.SafeShare:
    """Write a SafeShare."""
    return pb.SafeShare(
        blocks=share.blocks, max_running=share.max_running, max_requests_per_minute=share.max_requests_per_minute
    )


def share_from_pb(message: pb.SafeShare) -> SafeShare:
    """Read a SafeShare."""
    return SafeShare(
        message.blocks,
        max_running=message.max_running if message.HasField("max_running") else None,
        max_requests_per_minute=(
            message.max_requests_per_minute if message.HasField("max_requests_per_minute") else None
        ),
    )


# Engines.


def engine_message_to_pb(message: EngineMessage) -> pb.CoordinateRequest:
    """Write what an engine sends."""
    match message:
        case Snapshot(facts, report, leases):
            return pb.CoordinateRequest(
                snapshot=pb.Snapshot(
                    engine_id=facts.engine_id,
                    epoch=facts.epoch,
                    max_sequences=facts.max_sequences,
                    report=_report_to_pb(report),
                    leases=_uses_to_pb(leases),
                )
            )
        case Delta(number, report, changes):
            return pb.CoordinateRequest(
                delta=pb.Delta(
                    number=number,
                    report=_report_to_pb(report),
                    started=_uses_to_pb(changes.started),
                    ended=changes.ended,
                )
            )
        case Acknowledgement(number):
            return pb.CoordinateRequest(acknowledged_directive=number)


def engine_message_from_pb(message: pb.CoordinateRequest) -> EngineMessage:
    """Read what an engine sends."""
    match message.WhichOneof("message"):
        case "snapshot":
            sent = message.snapshot
            report = _report_from_pb(sent.report)
            facts = EngineFacts(sent.engine_id, sent.epoch, report.total_blocks, sent.max_sequences)
            return Snapshot(facts, report, _uses_from_pb(sent.leases))
        case "delta":
            changes = LeaseChanges(_uses_from_pb(message.delta.started), tuple(message.delta.ended))
            return Delta(message.delta.number, _report_from_pb(message.delta.report), changes)
        case _:
            return Acknowledgement(message.acknowledged_directive)


def directive_to_pb(directive: Directive) -> pb.CoordinateResponse:
    """Write a Directive."""
    return pb.CoordinateResponse(
        directive=pb.Directive(
            number=directive.number,
            allowances=dict(directive.allowances),
            reclaim_blocks=directive.reclaim_blocks,
        )
    )


def order_from_pb(message: pb.CoordinateResponse) -> Directive | SnapshotOrder | None:
    """Read what the manager sends an engine; None for a heartbeat."""
    match message.WhichOneof("message"):
        case "directive":
            sent = message.directive
            return Directive(sent.number, dict(sent.allowances), sent.reclaim_blocks)
        case "send_snapshot":
            return SnapshotOrder()
        case _:
            return None


def _report_to_pb(report: EngineReport) -> pb.EngineReport:
    return pb.EngineReport(
        total_blocks=report.total_blocks,
        free_blocks=report.free_blocks,
        cached_blocks=report.cached_blocks,
        price=report.price,
        tenants={name: _use_to_pb(use) for name, use in report.tenants.items()},
        reclaimed={str(step): count for step, count in report.reclaimed.items()},
        unread_tokens=report.unread_tokens,
    )


def _report_from_pb(message: pb.EngineReport) -> EngineReport:
    return EngineReport(
        total_blocks=message.total_blocks,
        free_blocks=message.free_blocks,
        cached_blocks=message.cached_blocks,
        price=message.price,
        tenants={name: _use_from_pb(use) for name, use in message.tenants.items()},
        reclaimed={LadderStep(step): count for step, count in message.reclaimed.items()},
        unread_tokens=message.unread_tokens,
    )


def _use_to_pb(use: TenantUse) -> pb.TenantUse:
    return pb.TenantUse(held=use.held, reserved=use.reserved, elastic=use.elastic, cached=use.cached, worths=use.worths)


def _use_from_pb(use: pb.TenantUse) -> TenantUse:
    return TenantUse(use.held, use.reserved, use.elastic, use.cached, tuple(use.worths))


def _uses_to_pb(uses: Collection[LeaseUse]) -> list[pb.LeaseUse]:
    return [pb.LeaseUse(lease_id=use.lease_id, tenant=use.tenant, reserved_blocks=use.reserved_blocks) for use in uses]


def _uses_from_pb(messages: Collection[pb.LeaseUse]) -> tuple[LeaseUse, ...]:
    return tuple(LeaseUse(use.lease_id, use.tenant, use.reserved_blocks) for use in messages)


# Operators.


def change_to_pb(number: int, change: ViewChange) -> pb.WatchResponse:
    """Write what changed in a ClusterView."""
    return pb.WatchResponse(
        number=number,
        engines=[pb.EngineView(**asdict(engine)) for engine in change.engines],
        tenants=[pb.TenantView(**asdict(tenant)) for tenant in change.tenants],
        gone_engines=change.gone_engines,
        gone_tenants=change.gone_tenants,
        price=change.price,
        drift_blocks=change.drift_blocks,
        oldest_lease_s=change.oldest_lease_s,
    )


def change_from_pb(message: pb.WatchResponse) -> ViewChange:
    """Read what changed in a ClusterView."""
    return ViewChange(
        engines=tuple(
            EngineView(**{**_scalars(engine), "reclaimed": dict(engine.reclaimed)}) for engine in message.engines
        ),
        tenants=tuple(
            TenantView(
                **{
                    **_scalars(tenant),
                    "refused_total": dict(tenant.refused_total),
                    "ceiling_blocks": tenant.ceiling_blocks if tenant.HasField("ceiling_blocks") else None,
                }
            )
            for tenant in message.tenants
        ),
        gone_engines=tuple(message.gone_engines),
        gone_tenants=tuple(message.gone_tenants),
        price=message.price,
        drift_blocks=message.drift_blocks,
        oldest_lease_s=message.oldest_lease_s,
    )


def _scalars(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
