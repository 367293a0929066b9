"""A pool that is far too short, on a tiny model with real numbers: who pays, and what nobody may notice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from kvorum.kvstore.types import blocks_for
from kvorum.workers.governance import LadderStep, LeaseTerms
from kvorum.workers.request import EngineRequest, EventKind, KVParams
from kvtest.cpu import cpu_backend
from kvtest.engines import Answer, request, rig
from kvtest.models import random_weights, reference_backend, tiny_spec

BLOCK_SIZE = 16
CONTEXT = 160


def checked_tokens(length: int, *, seed: int) -> list[int]:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(requests: Sequence[EngineRequest], **options: int | bool | str) -> dict[str, Answer]:
    spec = tiny_spec(num_heads=6, num_kv_heads=2)

    async def go() -> dict[str, Answer]:
        backend = reference_backend(spec, random_weights(spec))
        async with rig(backend, **{"num_blocks": 200, "max_num_seqs": 18, "note_kept": False} | options) as it:  # type: ignore[arg-type]
            answers = await it.run(requests)
            assert it.engine.report().held_blocks == 0
            return answers

    return asyncio.run(go())


def crowd() -> list[EngineRequest]:
    """Return 18 requests that want ten blocks each: two full, one with a floor, the others as the pool allows."""
    items = []
    for index in range(18):
        kv, reserved = KVParams("h2o_avg"), blocks_for(16 + BLOCK_SIZE, BLOCK_SIZE)
        if index in (3, 12):
            kv, reserved = KVParams(), blocks_for(CONTEXT, BLOCK_SIZE)
        elif index == 5:
            kv, reserved = KVParams("h2o", None, 0.8), blocks_for(CONTEXT, BLOCK_SIZE)
        terms = LeaseTerms(f"lease{index}", "tenant", reserved, least_tokens=16)
        item = request(f"r{index}", checked_tokens(CONTEXT - 40, seed=index), max_tokens=40, kv=kv)
        items.append(replace(item, terms=terms))
    return items


@cache
def undisturbed() -> dict[str, Answer]:
    """Return the answers in a pool with room for all."""
    return run(crowd())


@pytest.mark.parametrize("allocation", ["same_cap", "proportional", "price", "price:alpha=1"])
def test_in_a_third_of_the_pool_full_answers_do_not_change_and_nobody_is_preempted(allocation: str) -> None:
    items = crowd()
    assert sum(item.terms.reserved_blocks for item in items) <= 60
    answers = run(items, num_blocks=60, allocation=allocation)
    for item in items:
        answer, receipt = answers[item.request_id], answers[item.request_id].receipt
        assert receipt is not None
        assert len(answer.token_ids) == 40
        assert receipt.preemptions == 0
        assert receipt.retained_mass >= item.kv.min_retained_mass - 1e-9
        if item.kv.policy == "full":
            assert answer.token_ids == undisturbed()[item.request_id].token_ids
            assert (receipt.shrinks, receipt.kv_tokens_evicted) == (0, 0)
        started, *later = receipt.events
        assert (started.kind, started.tokens) == (EventKind.STARTED, 0)
        shrinks = [event.kind for event in later if event.kind is not EventKind.CUT]
        assert shrinks == [EventKind.SHRUNK] * receipt.shrinks
        assert sum(event.tokens for event in later) <= receipt.kv_tokens_evicted
    assert sum(answer.receipt.shrinks for answer in answers.values() if answer.receipt) > 0


@pytest.mark.parametrize("policy", ["full", "h2o"])
@pytest.mark.parametrize("on_cpu_kernels", [False, True])
def test_a_sequence_that_lost_nothing_comes_back_from_host_memory_as_it_was(policy: str, on_cpu_kernels: bool) -> None:
    spec = tiny_spec(num_heads=4, num_kv_heads=2, head_dim=16)
    kv = KVParams(policy, None if policy == "full" else 200)
    moved = request("moved", checked_tokens(60, seed=1), max_tokens=45, kv=kv, priority=1)
    rival = request("rival", checked_tokens(60, seed=2), max_tokens=45)

    async def go(items: Sequence[EngineRequest], num_blocks: int) -> tuple[dict[str, Answer], int]:
        weights = random_weights(spec)
        whole = (
            rig(cpu_backend(spec, weights), num_blocks=num_blocks, max_offloaded_blocks=8)
            if on_cpu_kernels
            else rig(reference_backend(spec, weights), num_blocks=num_blocks, max_offloaded_blocks=8)
        )
        async with whole as it:
            answers = await it.run(items)
            return answers, it.engine.report().reclaimed[LadderStep.OFFLOAD]

    alone, _ = asyncio.run(go([moved], 64))
    beside, offloaded = asyncio.run(go([moved, rival], 10))
    receipt = beside["moved"].receipt
    assert receipt is not None
    assert receipt.offloads == receipt.preemptions > 0
    moves = [event for event in receipt.events if event.kind is not EventKind.CUT][1:]
    assert [event.kind for event in moves] == [EventKind.OFFLOADED, EventKind.RESUMED] * receipt.offloads
    assert all(there.tokens == back.tokens > 0 for there, back in zip(moves[::2], moves[1::2], strict=True))
    assert offloaded > 0
    assert beside["moved"].token_ids == alone["moved"].token_ids
