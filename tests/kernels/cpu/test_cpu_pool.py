"""The CPU pool's moves: what is written is read, nothing else changes."""

from __future__ import annotations

import pytest
import torch

from kvorum.kernels.backend import HostBlocks
from kvorum.kernels.cpu.backend import CpuBackend
from kvorum.kernels.cpu.pool import CpuPool
from kvorum.kernels.plan import EvictionRule, ShrinkRequest
from kvtest.cpu import cpu_backend
from kvtest.models import random_weights, reference_backend, tiny_spec

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32
SIZES = (1, 15, 16, 17, 33)
KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
TABLE = (7, 2, 5)
ROW = 1
SPEC = tiny_spec(num_layers=LAYERS, num_heads=4, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def make(kv_dtype: torch.dtype = torch.float32, *, block_size: int = 16) -> tuple[CpuBackend, CpuPool]:
    """Return a back end and a poisoned pool."""
    backend = cpu_backend(SPEC, random_weights(SPEC), kv_dtype=kv_dtype)
    pool = backend.allocate_pool(num_blocks=10, block_size=block_size, max_num_seqs=4)
    pool.kv.fill_(77 if kv_dtype == torch.int8 else torch.nan)
    pool.scores.fill_(torch.nan)
    pool.scales.fill_(torch.nan)
    pool.positions.fill_(10**9)
    return backend, pool


def host_blocks(num_slots: int, *, seed: int = 0) -> HostBlocks:
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, KV_HEADS, num_slots)
    positions = torch.stack([torch.randperm(2 * num_slots, generator=generator)[:num_slots] for _ in range(4)])
    return HostBlocks(
        keys=torch.randn(*shape, HEAD_DIM, generator=generator),
        values=torch.randn(*shape, HEAD_DIM, generator=generator) * 100,
        positions=positions.view(shape),
        scores=torch.rand(shape, generator=generator),
    )


def assert_same(found: HostBlocks, expected: HostBlocks) -> None:
    for name in ("positions", "scores", "keys", "values"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def snapshot(pool: CpuPool) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (pool.kv, pool.scores, pool.positions, pool.scales)]


def changed_panels(pool: CpuPool, before: list[torch.Tensor]) -> set[int]:
    changed = torch.zeros(pool.kv.shape[2], dtype=torch.bool)
    for old, new in zip(before, (pool.kv, pool.scores, pool.positions, pool.scales), strict=True):
        if old.numel():
            same = (old == new) | (old.isnan() & new.isnan())
            changed |= ~same.transpose(0, 2).flatten(1).all(dim=1)
    return set(changed.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("num_slots", SIZES)
def test_what_was_imported_is_exported_and_imported_again_to_the_bit(kv_dtype: torch.dtype, num_slots: int) -> None:
    backend, pool = make(kv_dtype)
    blocks = host_blocks(num_slots)
    backend.import_slots(pool, TABLE, blocks)
    exported = backend.export_slots(pool, TABLE, num_slots)
    assert torch.equal(exported.positions, blocks.positions)
    assert torch.equal(exported.scores, blocks.scores)
    tolerance = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.int8: 0.51 / 127}[kv_dtype]
    for found, expected in ((exported.keys, blocks.keys), (exported.values, blocks.values)):
        error = (found.float() - expected).abs()
        assert bool((error <= tolerance * expected.abs().amax(dim=-1, keepdim=True)).all())
    backend.import_slots(pool, (1, 8, 0), exported)
    assert_same(backend.export_slots(pool, (1, 8, 0), num_slots), exported)


@pytest.mark.parametrize("num_slots", SIZES)
def test_an_import_touches_only_its_panels(num_slots: int) -> None:
    backend, pool = make()
    before = snapshot(pool)
    backend.import_slots(pool, TABLE, host_blocks(num_slots))
    assert changed_panels(pool, before) == set(TABLE[: -(-num_slots // 16)])


@pytest.mark.parametrize("block_size", [16, 32])
def test_targets_of_a_copy_become_their_sources(block_size: int) -> None:
    backend, pool = make(torch.int8, block_size=block_size)
    backend.import_slots(pool, TABLE, host_blocks(3 * block_size))
    before = snapshot(pool)
    backend.copy_blocks(pool, [2, 5], [0, 9])
    per_block = block_size // 16
    assert changed_panels(pool, before) == {block * per_block + i for block in (0, 9) for i in range(per_block)}
    assert_same(
        backend.export_slots(pool, [7, 0, 9], 3 * block_size), backend.export_slots(pool, TABLE, 3 * block_size)
    )


def test_scores_that_were_written_are_read_and_no_others_change() -> None:
    backend, pool = make()
    backend.import_slots(pool, TABLE, host_blocks(33))
    scores = host_blocks(17, seed=3).scores
    backend.write_scores(pool, TABLE, scores)
    found = backend.read_scores(pool, TABLE, 33)
    assert torch.equal(found[..., :17], scores)
    assert torch.equal(found[..., 17:], host_blocks(33).scores[..., 17:])


@pytest.mark.parametrize("targets", [TABLE, (8, 0, 3)], ids=["in place", "elsewhere"])
@pytest.mark.parametrize(("keep", "pool_width"), [(1, 1), (16, 3), (17, 1), (40, 5)])
def test_a_shrink_keeps_what_the_reference_keeps(keep: int, pool_width: int, targets: tuple[int, ...]) -> None:
    backend, pool = make()
    reference = reference_backend(SPEC, random_weights(SPEC), dtype=torch.float32)
    reference_pool = reference.allocate_pool(num_blocks=10, block_size=16, max_num_seqs=4)
    blocks = host_blocks(41)
    request = ShrinkRequest(
        ROW, TABLE, targets[: -(-keep // 16)], 41, keep, 82, EvictionRule(recent_tokens=5, sink_tokens=2), pool_width
    )
    results = []
    for each, its_pool in ((backend, pool), (reference, reference_pool)):
        each.import_slots(its_pool, TABLE, blocks)  # type: ignore[arg-type]
        its_pool.victims[:, ROW] = torch.tensor([3, 40])
        each.shrink(its_pool, request)  # type: ignore[arg-type]
        assert bool((its_pool.victims[:, ROW] == -1).all())
        results.append(each.export_slots(its_pool, targets, keep))  # type: ignore[arg-type]
    found, expected = results
    assert_same(found, expected)


def test_a_pending_victim_is_dead_until_it_is_cleared() -> None:
    backend, pool = make()
    backend.import_slots(pool, TABLE, host_blocks(33))
    pool.victims[0, ROW] = torch.tensor([4, 32])
    dead = (~backend.view_slots(pool, ROW, TABLE, 33).alive).nonzero().tolist()
    assert dead == [[0, 0, 4], [0, 1, 32]]
    backend.clear_victims(pool, ROW)
    assert bool(backend.view_slots(pool, ROW, TABLE, 33).alive.all())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_block_takes_the_bytes_it_says(kv_dtype: torch.dtype) -> None:
    backend, pool = make(kv_dtype)
    held = sum(t.numel() * t.element_size() for t in (pool.kv, pool.scores, pool.positions, pool.scales))
    assert backend.block_bytes(16) * 10 == held
