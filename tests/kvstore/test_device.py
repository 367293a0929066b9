"""Each memory operation on a real pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvorum.kernels.backend import HostBlocks
from kvorum.kernels.plan import EvictionRule, ShrinkRequest
from kvorum.kernels.reference.backend import ReferenceBackend, ReferenceStep
from kvorum.kernels.reference.pool import NO_VICTIM, ReferencePool
from kvorum.kvstore.device import DeviceStore
from kvorum.kvstore.ops import (
    ClearVictims,
    CopyBlocks,
    DropScores,
    DropSwap,
    LoadScores,
    Residence,
    SaveScores,
    SwapIn,
    SwapOut,
)
from kvorum.kvstore.types import BlockId, SeqId, SnapshotId
from kvtest.models import random_weights, reference_backend, tiny_spec

BLOCK_SIZE = 4
LAYERS, HEADS = 2, 2
SEQ, ROW, SNAPSHOT = SeqId(7), 1, SnapshotId(3)


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, numbers))


TABLE = ids(6, 1, 4)
NUM_SLOTS = 10


class Rig:
    """A poisoned pool with one sequence of ten slots in blocks 6, 1 and 4."""

    def __init__(self) -> None:
        spec = tiny_spec(num_layers=LAYERS, num_kv_heads=HEADS)
        self.backend: ReferenceBackend = reference_backend(spec, random_weights(spec))
        self.pool = self.backend.allocate_pool(num_blocks=8, block_size=BLOCK_SIZE, max_num_seqs=3)
        self.pool.kv.fill_(torch.nan)
        self.pool.scores.fill_(torch.nan)
        self.pool.positions.fill_(10**9)
        self.store: DeviceStore[ReferencePool, ReferenceStep] = DeviceStore(self.backend, self.pool)
        generator = torch.Generator().manual_seed(0)
        shape = (LAYERS, HEADS, NUM_SLOTS)
        self.slots = HostBlocks(
            keys=torch.randn(*shape, spec.head_dim, generator=generator, dtype=torch.float64),
            values=torch.randn(*shape, spec.head_dim, generator=generator, dtype=torch.float64),
            positions=torch.stack([torch.randperm(NUM_SLOTS, generator=generator) for _ in range(4)]).view(shape),
            scores=torch.rand(shape, generator=generator, dtype=torch.float64),
        )
        self.backend.import_slots(self.pool, TABLE, self.slots)

    def read(self, *block_ids: int, num_slots: int) -> HostBlocks:
        return self.backend.export_slots(self.pool, block_ids, num_slots)

    def wipe(self, *block_ids: int) -> None:
        """Let something else be written there."""
        self.pool.kv[:, list(block_ids)] = 5.0
        self.pool.scores[:, list(block_ids)] = 5.0
        self.pool.positions[:, list(block_ids)] = 5


@pytest.fixture
def rig() -> Rig:
    return Rig()


def assert_same(found: HostBlocks, expected: HostBlocks) -> None:
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.scores, expected.scores)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)


def without(slots: HostBlocks, victims: torch.Tensor) -> HostBlocks:
    """Take one slot [num_layers, num_kv_heads] out of each pair."""

    def rest(tensor: torch.Tensor) -> torch.Tensor:
        rows = [
            torch.cat((tensor[layer, head, :slot], tensor[layer, head, slot + 1 :]))
            for layer in range(LAYERS)
            for head, slot in enumerate(victims[layer].tolist())
        ]
        return torch.stack(rows).view(LAYERS, HEADS, *rows[0].shape)

    return HostBlocks(rest(slots.keys), rest(slots.values), rest(slots.positions), rest(slots.scores))


def test_blocks_are_copied_whole(rig: Rig) -> None:
    rig.store.carry_out(CopyBlocks(ids(6, 1), ids(0, 7)))
    assert_same(rig.read(0, 7, num_slots=8), rig.read(6, 1, num_slots=8))


def test_victims_of_a_row_are_forgotten(rig: Rig) -> None:
    rig.pool.victims.fill_(2)
    rig.store.carry_out(ClearVictims(ROW))
    assert rig.pool.victims[0].tolist() == [[2, 2], [NO_VICTIM, NO_VICTIM], [2, 2]]


def test_a_shrink_keeps_the_best(rig: Rig) -> None:
    rule = EvictionRule(recent_tokens=0)
    rig.store.carry_out(ShrinkRequest(ROW, TABLE, ids(0), NUM_SLOTS, keep=3, newest=9, rule=rule))
    found = rig.read(0, num_slots=3).scores.sort(dim=-1).values
    assert torch.equal(found, rig.slots.scores.sort(dim=-1).values[..., -3:])


class TestScores:
    def test_what_was_saved_is_loaded_elsewhere(self, rig: Rig) -> None:
        rig.store.carry_out(SaveScores(SNAPSHOT, TABLE[:2], 8))
        rig.wipe(6, 1)
        rig.store.carry_out(LoadScores(SNAPSHOT, ids(0, 7), 8))
        assert torch.equal(rig.backend.read_scores(rig.pool, ids(0, 7), 8), rig.slots.scores[..., :8])

    def test_they_can_be_loaded_again(self, rig: Rig) -> None:
        rig.store.carry_out(SaveScores(SNAPSHOT, TABLE[:2], 8))
        for blocks in (ids(0, 7), ids(2, 3)):
            rig.store.carry_out(LoadScores(SNAPSHOT, blocks, 8))
            rig.backend.write_scores(rig.pool, blocks, rig.backend.read_scores(rig.pool, blocks, 8) + 1.0)
        assert torch.equal(rig.backend.read_scores(rig.pool, ids(2, 3), 8), rig.slots.scores[..., :8] + 1.0)

    def test_loading_nothing_sets_zeros_whatever_was_there(self, rig: Rig) -> None:
        rig.store.carry_out(LoadScores(None, ids(0, 7), 8))
        assert torch.equal(rig.backend.read_scores(rig.pool, ids(0, 7), 8), torch.zeros(LAYERS, HEADS, 8).double())

    def test_loading_changes_neither_keys_nor_positions(self, rig: Rig) -> None:
        rig.store.carry_out(LoadScores(None, TABLE, NUM_SLOTS))
        expected = replace(rig.slots, scores=torch.zeros_like(rig.slots.scores))
        assert_same(rig.read(*TABLE, num_slots=NUM_SLOTS), expected)

    def test_dropped_ones_are_gone(self, rig: Rig) -> None:
        rig.store.carry_out(SaveScores(SNAPSHOT, TABLE, NUM_SLOTS))
        assert rig.store.num_snapshots == 1
        rig.store.carry_out(DropScores(SNAPSHOT))
        assert rig.store.num_snapshots == 0


class TestSwap:
    VICTIMS = torch.tensor([[0, 9], [4, 3]])

    def test_a_sequence_comes_back_as_it_went(self, rig: Rig) -> None:
        rig.store.carry_out(SwapOut(SEQ, ROW, TABLE, NUM_SLOTS))
        rig.wipe(*TABLE)
        rig.store.carry_out(SwapIn(SEQ, ids(0, 7, 2)))
        assert_same(rig.read(0, 7, 2, num_slots=NUM_SLOTS), rig.slots)
        assert rig.store.num_swapped == 0

    def test_pending_victims_are_left_behind(self, rig: Rig) -> None:
        rig.pool.victims[:, ROW] = self.VICTIMS
        rig.store.carry_out(SwapOut(SEQ, ROW, TABLE, NUM_SLOTS))
        rig.wipe(*TABLE)
        rig.store.carry_out(SwapIn(SEQ, ids(0, 7, 2)))
        assert_same(rig.read(0, 7, 2, num_slots=NUM_SLOTS - 1), without(rig.slots, self.VICTIMS))

    def test_victims_of_another_row_are_not_its_own(self, rig: Rig) -> None:
        rig.pool.victims[:, ROW + 1] = self.VICTIMS
        rig.store.carry_out(SwapOut(SEQ, ROW, TABLE, NUM_SLOTS))
        rig.store.carry_out(SwapIn(SEQ, ids(0, 7, 2)))
        assert_same(rig.read(0, 7, 2, num_slots=NUM_SLOTS), rig.slots)

    def test_a_dropped_sequence_is_gone(self, rig: Rig) -> None:
        rig.store.carry_out(SwapOut(SEQ, ROW, TABLE, NUM_SLOTS))
        assert rig.store.num_swapped == 1
        rig.store.carry_out(DropSwap(SEQ))
        assert rig.store.num_swapped == 0


class TestViews:
    def test_a_resident_sequence_is_looked_at_in_the_pool(self, rig: Rig) -> None:
        rig.pool.victims[:, ROW] = TestSwap.VICTIMS
        view = rig.store.view(Residence(SEQ, ROW, TABLE, NUM_SLOTS))
        assert torch.equal(view.positions, rig.slots.positions)
        assert torch.equal(view.scores, rig.slots.scores)
        assert (~view.alive).nonzero().tolist() == [[0, 0, 0], [0, 1, 9], [1, 0, 4], [1, 1, 3]]

    def test_a_swapped_sequence_is_looked_at_in_host_memory_and_all_alive(self, rig: Rig) -> None:
        rig.pool.victims[:, ROW] = TestSwap.VICTIMS
        rig.store.carry_out(SwapOut(SEQ, ROW, TABLE, NUM_SLOTS))
        rig.wipe(*TABLE)
        view = rig.store.view(Residence(SEQ, ROW, (), NUM_SLOTS - 1))
        expected = without(rig.slots, TestSwap.VICTIMS)
        assert torch.equal(view.positions, expected.positions)
        assert torch.equal(view.scores, expected.scores)
        assert bool(view.alive.all())
