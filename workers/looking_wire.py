"""What operators look at in an engine, as messages of the engine's service, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from kvorum.protos.engine.v1 import engine_pb2 as pb
from kvorum.workers.looking import Phase, SequenceLook, SequenceRow
from kvorum.workers.plan import HeadSlots
from kvorum.workers.request import RequestId
from kvorum.workers.wire import events_from_pb


def rows_to_pb(rows: Sequence[SequenceRow]) -> pb.ListSequencesResponse:
    """Write a list of sequences."""
    return pb.ListSequencesResponse(rows=[pb.SequenceRow(**asdict(row)) for row in rows])


def rows_from_pb(message: pb.ListSequencesResponse) -> tuple[SequenceRow, ...]:
    """Read a list of sequences."""
    return tuple(map(_row_from_pb, message.rows))


def _row_from_pb(message: pb.SequenceRow) -> SequenceRow:
    return SequenceRow(
        request_id=RequestId(message.request_id),
        tenant=message.tenant,
        policy=message.policy,
        phase=Phase(message.phase),
        num_prompt=message.num_prompt,
        num_tokens=message.num_tokens,
        blocks=message.blocks,
        reserved_blocks=message.reserved_blocks,
        kv_budget=message.kv_budget if message.HasField("kv_budget") else None,
        evicted_tokens=message.evicted_tokens,
        shrinks=message.shrinks,
        offloads=message.offloads,
        preemptions=message.preemptions,
    )


def look_to_pb(look: SequenceLook | None) -> pb.LookAtSequenceResponse:
    """Write a look at a sequence."""
    return pb.LookAtSequenceResponse(look=None if look is None else pb.SequenceLook(**asdict(look)))


def look_from_pb(message: pb.LookAtSequenceResponse) -> SequenceLook | None:
    """Read a look at a sequence."""
    if not message.HasField("look"):
        return None
    look, slots = message.look, message.look.slots
    return SequenceLook(
        row=_row_from_pb(look.row),
        token_ids=tuple(look.token_ids),
        num_written=look.num_written,
        num_cached=look.num_cached,
        block_ids=tuple(look.block_ids),
        num_shared=look.num_shared,
        slots=HeadSlots(tuple(slots.positions), tuple(slots.scores), tuple(slots.values), tuple(slots.alive))
        if look.HasField("slots")
        else None,
        events=tuple(events_from_pb(look.events)),
    )
