"""What the console shows, as plain JSON: the model once, then the cluster and the sequence in focus, again and again.

Everything comes from where it is known: engines say what they do, the cache manager what is reserved and for whom.
Texts are shown of the operator's own tenant only; of others' sequences lengths, slots and scores are, and no word.
Where no tenants are configured everybody is the same one, so texts are shown only on a server for its own machine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvorum.cluster.addresses import is_loopback
from kvorum.cluster.engine_client import EngineClient
from kvorum.cluster.engine_status import EngineStatus
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.manager.types import ClusterView
from kvorum.kernels.sharding import plan_shards
from kvorum.kernels.spec import DecoderSpec
from kvorum.kvstore.errors import EngineLostError, InvalidRequestError
from kvorum.workers.looking import SequenceLook, SequenceRow
from kvorum.workers.plan import HeadSlots
from kvorum.workers.request import RequestId

PERIOD_S = 0.4

Json = dict[str, Any]

# Of a sequence, in the order of SequenceRow's fields, after the index of its engine.
ROW_FIELDS = ("engine", *SequenceRow.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Focus:
    """The sequence that is looked at, and in which KV head of which layer."""

    engine_id: str
    request_id: RequestId
    layer: int = 0
    kv_head: int = 0


def check_focus(focus: Focus, spec: DecoderSpec) -> None:
    """Raise InvalidRequestError where the model has no such layer or head."""
    for name, value, count in (("layer", focus.layer, spec.num_layers), ("kv_head", focus.kv_head, spec.num_kv_heads)):
        if not 0 <= value < count:
            raise InvalidRequestError(f"{name}: must be in 0..{count - 1}, got {value}", param=name)


async def watch(frontend: Frontend, focus: Focus | None, *, tenant: str) -> AsyncGenerator[Json]:
    """Yield what an operator of a tenant sees, until closed."""
    yield {"model": _describe_model(frontend)}
    texts = _Texts(frontend)
    while True:
        # Together: what one of them says should fit what the others say.
        view, listed, look = await asyncio.gather(
            frontend.look_at_cluster(), _list_sequences(frontend), _look(frontend, focus)
        )
        seen: Json = {"cluster": _describe_cluster(frontend, view, listed)}
        if focus is not None:
            is_private = frontend.tenants.tells_apart or is_loopback(frontend.config.host)
            shows_text = is_private and look is not None and look.row.tenant == tenant
            seen["sequence"] = look and _describe_sequence(look, texts, shows_text=shows_text)
        yield seen
        await asyncio.sleep(PERIOD_S)


def _describe_model(frontend: Frontend) -> Json:
    spec = frontend.model.spec
    return {
        "name": frontend.model.name,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_model_len": frontend.model.max_model_len,
        "row_fields": ROW_FIELDS,
    }


async def _list_sequences(frontend: Frontend) -> dict[str, tuple[SequenceRow, ...]]:
    """Return the sequences of each engine that answers."""
    clients = {client.status.info.engine_id: client for client in frontend.engine_clients() if client.status}
    return dict(zip(clients, await asyncio.gather(*map(_rows_of, clients.values())), strict=True))


async def _rows_of(client: EngineClient) -> tuple[SequenceRow, ...]:
    try:
        return await client.sequences()
    except EngineLostError:
        return ()


async def _look(frontend: Frontend, focus: Focus | None) -> SequenceLook | None:
    for client in frontend.engine_clients():
        if focus and client.status and client.status.info.engine_id == focus.engine_id:
            try:
                return await client.look(focus.request_id, layer=focus.layer, kv_head=focus.kv_head)
            except EngineLostError:
                return None
    return None


def _describe_cluster(frontend: Frontend, view: ClusterView | None, listed: dict[str, tuple[SequenceRow, ...]]) -> Json:
    statuses = frontend.statuses()
    managed = {} if view is None else {engine.engine_id: asdict(engine) for engine in view.engines}
    rows = [listed.get(name, ()) for name in statuses]
    return {
        "has_manager": frontend.config.cache_manager,
        "manager_is_up": view is not None,
        "price": 0.0 if view is None else view.price,
        "drift_blocks": 0 if view is None else view.drift_blocks,
        "engines": [
            _describe_engine(status, frontend.model.spec) | managed.get(name, {}) for name, status in statuses.items()
        ],
        "tenants": [] if view is None else [asdict(tenant) for tenant in view.tenants],
        "sequences": _describe_rows(rows),
    }


def _describe_engine(status: EngineStatus, spec: DecoderSpec) -> Json:
    info, stats = status.info, status.stats
    return {
        "engine_id": info.engine_id,
        "healthy": status.healthy,
        "total_blocks": info.num_blocks,
        "block_size": info.block_size,
        "held_blocks": stats.blocks_held,
        "cached_blocks": stats.blocks_cached,
        "free_blocks": stats.blocks_free,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "steps_total": stats.steps_total,
        "prompt_tokens_total": stats.prompt_tokens_total,
        "generation_tokens_total": stats.generation_tokens_total,
        "evicted_tokens_total": sum(stats.evicted_tokens_total.values()),
        "preemptions_total": stats.preemptions_total,
        "ranks": [
            {"q_heads": shard.q_heads, "kv_heads": shard.kv_heads}
            for shard in plan_shards(spec, info.tensor_parallel_size)
        ],
    }


def _describe_rows(listed: Sequence[Sequence[SequenceRow]]) -> list[list[object]]:
    """Write each engine's rows without their fields' names: there may be thousands, several times a second."""
    fields = ROW_FIELDS[1:]
    return [[engine, *(getattr(row, field) for field in fields)] for engine, rows in enumerate(listed) for row in rows]


class _Texts:
    """Each token's text, and how many of the sequence's tokens the console has already."""

    def __init__(self, frontend: Frontend) -> None:
        self._tokenizer = frontend.model.tokenizer
        self._known: dict[int, str] = {}
        self._num_sent = 0

    def news(self, token_ids: Sequence[int]) -> Json:
        """Return the texts that the console lacks, and from which position on."""
        first, self._num_sent = self._num_sent, len(token_ids)
        return {"from": first, "texts": [self._text(token_id) for token_id in token_ids[first:]]}

    def _text(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return self._known[token_id]


def _describe_sequence(look: SequenceLook, texts: _Texts, *, shows_text: bool) -> Json:
    return {
        "row": asdict(look.row),
        "tokens": texts.news(look.token_ids) if shows_text else None,
        "num_written": look.num_written,
        "num_cached": look.num_cached,
        "block_ids": look.block_ids,
        "num_shared": look.num_shared,
        "slots": None if look.slots is None else _describe_slots(look.slots),
        "events": [asdict(event) for event in look.events],
    }


def _describe_slots(slots: HeadSlots) -> Json:
    """Write slots; JSON has no infinity, so a protected slot's value is null."""
    return {
        "positions": slots.positions,
        "scores": [round(score, 6) for score in slots.scores],
        "values": [None if math.isinf(value) else round(value, 6) for value in slots.values],
        "alive": slots.alive,
    }
