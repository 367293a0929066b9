"""The engine keeps just what the slow decoder keeps: the tests (a) to (h) of the eviction rules, on tiny models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from kvorum.kvstore.types import SeqId
from kvorum.workers.request import EngineRequest, KVParams
from kvtest.engines import Answer, Recorder, request, rig
from kvtest.models import random_weights, reference_backend, tiny_spec
from kvtest.slow_decoder import SlowPolicy, slow_run

EVICTING = ("h2o", "h2o_avg", "snap_h2o", "sliding", "sinks")
SHAPES = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}


def prompt_of(length: int, *, seed: int = 1) -> list[int]:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(
    requests: Sequence[EngineRequest], *, shape: str = "gqa", window: int | None = None, **options: int | bool
) -> tuple[dict[str, Answer], Recorder]:
    heads, kv_heads = SHAPES[shape]
    spec = tiny_spec(num_heads=heads, num_kv_heads=kv_heads, window=window)

    async def go() -> tuple[dict[str, Answer], Recorder]:
        async with rig(reference_backend(spec, random_weights(spec)), **{"num_blocks": 64, **options}) as it:  # type: ignore[arg-type]
            return await it.run(requests), it.recorder

    return asyncio.run(go())


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt_tokens", [9, 61])
def test_kept_tokens_equal_the_slow_reference_at_every_step(policy: str, shape: str, prompt_tokens: int) -> None:
    heads, kv_heads = SHAPES[shape]
    spec = tiny_spec(num_heads=heads, num_kv_heads=kv_heads)
    prompt = prompt_of(prompt_tokens)
    answers, recorder = run([request("a", prompt, max_tokens=41, kv=KVParams(policy, 20))], shape=shape)

    tokens, kept = slow_run(spec, random_weights(spec), prompt, SlowPolicy(policy, 20, prompt_tokens), steps=40)

    assert answers["a"].token_ids == tokens
    assert recorder.kept[SeqId(0)][1:] == kept


def test_sliding_window_layers_attend_and_evict_like_the_slow_reference() -> None:
    spec = tiny_spec(num_heads=6, num_kv_heads=2, window=12)
    prompt = prompt_of(50)
    answers, recorder = run([request("a", prompt, max_tokens=30, kv=KVParams("h2o", 24))], window=12)
    tokens, kept = slow_run(spec, random_weights(spec), prompt, SlowPolicy("h2o", 24, 50), steps=29)
    assert answers["a"].token_ids == tokens
    assert recorder.kept[SeqId(0)][1:] == kept


@pytest.mark.parametrize("policy", EVICTING)
def test_a_budget_that_is_not_reached_changes_no_bit(policy: str) -> None:
    prompt = prompt_of(40)
    _, full = run([request("a", prompt, max_tokens=20)])
    _, held = run([request("a", prompt, max_tokens=20, kv=KVParams(policy, 60))])
    for expected, found in zip(full.logits[SeqId(0)], held.logits[SeqId(0)], strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("policy", EVICTING)
def test_a_prefix_hit_keeps_what_a_cold_start_keeps(policy: str) -> None:
    shared = prompt_of(70)
    items = [
        request(name, [*shared, *prompt_of(length, seed=seed)], max_tokens=20, kv=KVParams(policy, 24))
        for name, length, seed in (("a", 13, 2), ("b", 30, 3), ("c", 20, 4), ("d", 13, 2))
    ]

    def one_by_one(*, caching: bool) -> tuple[list[Answer], list[object]]:
        spec = tiny_spec(num_heads=6, num_kv_heads=2)

        async def go() -> tuple[list[Answer], list[object]]:
            backend = reference_backend(spec, random_weights(spec))
            async with rig(backend, num_blocks=64, enable_prefix_caching=caching) as it:
                answers = [(await it.run([item]))[item.request_id] for item in items]
                return answers, [it.recorder.kept[SeqId(i)][1:] for i in range(len(items))]

        return asyncio.run(go())

    cold, cold_kept = one_by_one(caching=False)
    warm, warm_kept = one_by_one(caching=True)
    assert [answer.token_ids for answer in warm] == [answer.token_ids for answer in cold]
    assert warm_kept == cold_kept
    cached = [answer.receipt.prompt_tokens_cached for answer in warm if answer.receipt is not None]
    # The first branch has no scores to start from where it leaves the first prompt, and saves them for the next.
    expected = [0, 64, 48, 48] if policy == "snap_h2o" else [0, 0, 64, 80]
    assert cached == expected


def test_neighbours_change_neither_tokens_nor_kept_sets() -> None:
    items = [
        request("h2o", prompt_of(50), max_tokens=25, kv=KVParams("h2o", 20)),
        request("full", prompt_of(33, seed=5), max_tokens=25),
        request("avg", prompt_of(61, seed=6), max_tokens=25, kv=KVParams("h2o_avg", 30)),
        request("short", prompt_of(3, seed=7), max_tokens=25, kv=KVParams("sinks", 16)),
    ]
    together, batch = run(items)
    for index, item in enumerate(items):
        alone, single = run([item])
        assert alone[item.request_id].token_ids == together[item.request_id].token_ids
        assert single.kept[SeqId(0)] == batch.kept[SeqId(index)]


def test_a_request_that_did_not_opt_in_is_bit_identical_whatever_its_neighbours_do() -> None:
    mine = request("mine", prompt_of(45), max_tokens=20)
    _, alone = run([mine], max_num_batched_tokens=48)
    neighbours = [
        request(f"n{i}", prompt_of(30 + i, seed=i), max_tokens=20, kv=KVParams(policy, 20), priority=-1)
        for i, policy in enumerate(EVICTING)
    ]
    _, crowded = run([*neighbours, mine], max_num_batched_tokens=48)
    for expected, found in zip(alone.logits[SeqId(0)], crowded.logits[SeqId(5)], strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("policy", EVICTING)
def test_a_swapped_sequence_goes_on_as_if_nothing_had_happened(policy: str) -> None:
    moved = request("moved", prompt_of(60), max_tokens=45, kv=KVParams(policy, 30), priority=1)
    rival = request("rival", prompt_of(47, seed=9), max_tokens=60)
    undisturbed, single = run([moved])
    answers, recorder = run([moved, rival], num_blocks=7)
    assert answers["moved"].receipt is not None
    assert answers["moved"].receipt.preemptions > 0
    assert answers["moved"].token_ids == undisturbed["moved"].token_ids
    assert recorder.kept[SeqId(0)] == single.kept[SeqId(0)]


def test_a_recomputed_sequence_goes_on_as_if_nothing_had_happened() -> None:
    moved = request("moved", prompt_of(30), max_tokens=40, priority=1)
    rival = request("rival", prompt_of(40, seed=9), max_tokens=50)
    undisturbed, _ = run([moved])
    answers, _ = run([moved, rival], num_blocks=7)
    assert answers["moved"].receipt is not None
    assert answers["moved"].receipt.preemptions > 0
    assert answers["moved"].token_ids == undisturbed["moved"].token_ids


@pytest.mark.parametrize("chunk", [16, 48, 2048])
def test_a_dense_prompt_does_not_depend_on_its_chunks(chunk: int) -> None:
    item = request("a", prompt_of(90), max_tokens=15, kv=KVParams("h2o", 24))
    _, whole = run([item])
    _, cut = run([item], max_num_batched_tokens=chunk)
    assert cut.kept[SeqId(0)] == whole.kept[SeqId(0)]
    assert all(map(torch.equal, cut.logits[SeqId(0)], whole.logits[SeqId(0)]))


def test_a_prompt_of_any_length_fits_a_short_pool_chunk_by_chunk() -> None:
    item = request("a", prompt_of(200), max_tokens=15, kv=KVParams("h2o", 32))
    answers, recorder = run([item], num_blocks=4, max_num_batched_tokens=16)
    receipt = answers["a"].receipt
    assert receipt is not None
    assert receipt.evicted_in_prefill
    assert receipt.kv_tokens_held + receipt.kv_tokens_evicted == 200 + 14
    held = [len(row.step.block_table) for plan in recorder.plans for row in plan.rows]
    assert max(held) <= -(-(32 + 16) // 16)


@pytest.mark.parametrize("policy", EVICTING)
def test_a_prompt_in_a_short_pool_is_cut_after_each_chunk(policy: str) -> None:
    spec = tiny_spec(num_heads=6, num_kv_heads=2)
    prompt = prompt_of(75)
    item = request("a", prompt, max_tokens=11, kv=KVParams(policy, 24))
    _, recorder = run([item], num_blocks=3, max_num_batched_tokens=16)
    _, kept = slow_run(spec, random_weights(spec), prompt, SlowPolicy(policy, 24, 75), steps=10, chunk=16)
    assert recorder.kept[SeqId(0)][1:] == kept


@pytest.mark.parametrize("budget", [20, 32, 47])
def test_blocks_held_never_exceed_the_budget_once_the_prompt_is_done(budget: int) -> None:
    item = request("a", prompt_of(90), max_tokens=30, kv=KVParams("h2o_avg", budget))
    _, recorder = run([item])
    held = [len(row.step.block_table) for plan in recorder.plans[1:] for row in plan.rows]
    assert max(held) == -(-(budget + 1) // 16)


@pytest.mark.parametrize("floor", [0.6, 0.8, 0.95, 1.0])
def test_a_floor_of_retained_mass_is_never_crossed(floor: float) -> None:
    item = request("a", prompt_of(70), max_tokens=40, kv=KVParams("h2o", 20, floor))
    free, _ = run([request("a", prompt_of(70), max_tokens=40, kv=KVParams("h2o", 20))])
    answers, _ = run([item])
    receipt, lowest = answers["a"].receipt, free["a"].receipt
    assert receipt is not None
    assert lowest is not None
    assert receipt.retained_mass >= floor - 1e-9
    assert lowest.retained_mass < 0.6 < 1.0
    assert receipt.kv_tokens_held > lowest.kv_tokens_held


def test_the_receipt_agrees_with_the_pool() -> None:
    item = request("a", prompt_of(70), max_tokens=21, kv=KVParams("h2o", 33))
    answers, recorder = run([item])
    receipt = answers["a"].receipt
    assert receipt is not None
    kept = recorder.kept[SeqId(0)][-1]
    assert {len(head) for layer in kept for head in layer} == {receipt.kv_tokens_held} == {33}
    assert receipt.kv_tokens_evicted == 70 + 20 - 33
    assert receipt.prompt_tokens == 70
    assert receipt.completion_tokens == 21
