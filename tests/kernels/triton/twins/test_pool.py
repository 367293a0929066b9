"""Shrinks, copies and moves between pool and host: the reference back end does the same to the same slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from kvorum.kernels.backend import HostBlocks
from kvorum.kernels.plan import ShrinkRequest
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.reference.pool import ReferencePool
from kvorum.kernels.spec import Shard
from kvorum.kernels.triton import shrink as shrink_module
from kvorum.kernels.triton.backend import TritonBackend
from kvorum.kernels.triton.pool import TritonPool
from kvtest.models import tiny_spec
from kvtest.paged import DEVICE, POISON_POSITION, RULES, poison

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS = 12, 16, 4
SIZES = (1, 15, 16, 17, 33)
TABLE = (7, 2, 5)
ROW = 1
SPEC = tiny_spec(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def triton_backend(kv_dtype: torch.dtype = torch.float32) -> TritonBackend:
    return TritonBackend(SPEC, Shard.whole(SPEC), dtype=torch.float32, device=DEVICE, kv_dtype=kv_dtype)


def host_blocks(num_slots: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> HostBlocks:
    """Other positions in each head, with gaps; scores with ties."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, KV_HEADS, num_slots)
    positions = [torch.randperm(2 * num_slots, generator=generator)[:num_slots] for _ in range(LAYERS * KV_HEADS)]
    keys, values = (torch.randn(*shape, HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
    scores = torch.randint(0, 9, shape, generator=generator) / 4
    return HostBlocks(keys, values, torch.stack(positions).view(shape), scores)


def assert_same(found: HostBlocks, expected: HostBlocks) -> None:
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.scores, expected.scores)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)


@dataclass
class Pair:
    """The same slots in a Triton pool and in a reference pool, poison around them."""

    num_slots: int
    table: tuple[int, ...] = TABLE
    backend: TritonBackend = field(default_factory=triton_backend)

    def __post_init__(self) -> None:
        self.reference = ReferenceBackend(SPEC, Shard.whole(SPEC), dtype=torch.float32, device=torch.device("cpu"))
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": MAX_NUM_SEQS}
        self.pool: TritonPool = self.backend.allocate_pool(**sizes)
        self.reference_pool: ReferencePool = self.reference.allocate_pool(**sizes)
        poison(self.pool)
        self.reference_pool.kv.fill_(torch.nan)
        self.reference_pool.scores.fill_(torch.nan)
        self.reference_pool.positions.fill_(POISON_POSITION)
        blocks = host_blocks(self.num_slots)
        self.backend.import_slots(self.pool, self.table, blocks)
        self.reference.import_slots(self.reference_pool, self.table, blocks)

    def set_victims(self, victims: list[list[int]]) -> None:
        self.pool.victims[:, ROW] = torch.tensor(victims, dtype=torch.int32, device=DEVICE)
        self.reference_pool.victims[:, ROW] = torch.tensor(victims)

    def shrink(self, request: ShrinkRequest) -> None:
        self.backend.shrink(self.pool, request)
        self.reference.shrink(self.reference_pool, request)

    def check(self) -> None:
        """Compare every slot of the pools, poison included."""
        for found, expected in (
            (self.pool.kv, self.reference_pool.kv),
            (self.pool.scores, self.reference_pool.scores),
        ):
            torch.testing.assert_close(found.cpu(), expected, rtol=0.0, atol=0.0, equal_nan=True)
        assert torch.equal(self.pool.positions.cpu().long(), self.reference_pool.positions)
        assert torch.equal(self.pool.victims.cpu().long(), self.reference_pool.victims)


def request(num_slots: int, keep: int, rule: str, targets: tuple[int, ...], *, pool_width: int = 1) -> ShrinkRequest:
    used = targets[: -(-keep // BLOCK_SIZE)]
    return ShrinkRequest(ROW, TABLE, used, num_slots, keep, 2 * num_slots, RULES[rule], pool_width)


IN_PLACE, ELSEWHERE = TABLE, (8, 0, 3)


class TestShrink:
    @pytest.mark.parametrize("targets", [IN_PLACE, ELSEWHERE], ids=["in place", "elsewhere"])
    @pytest.mark.parametrize("rule", RULES)
    def test_the_best_stay_in_slot_order(self, rule: str, targets: tuple[int, ...]) -> None:
        pair = Pair(41)
        pair.shrink(request(41, 17, rule, targets))
        pair.check()

    @pytest.mark.parametrize(("num_slots", "keep"), [(1, 1), (17, 1), (33, 15), (33, 16), (41, 40), (48, 48)])
    def test_any_size(self, num_slots: int, keep: int) -> None:
        pair = Pair(num_slots)
        pair.shrink(request(num_slots, keep, "h2o", IN_PLACE))
        pair.check()

    @pytest.mark.parametrize("pool_width", [3, 7])
    def test_neighbours_of_the_best_stay_when_values_are_pooled(self, pool_width: int) -> None:
        pair = Pair(41)
        pair.shrink(request(41, 20, "h2o", ELSEWHERE, pool_width=pool_width))
        pair.check()

    @pytest.mark.parametrize("targets", [IN_PLACE, ELSEWHERE], ids=["in place", "elsewhere"])
    def test_pending_victims_go_first_even_the_best(self, targets: tuple[int, ...]) -> None:
        pair = Pair(41)
        pair.set_victims(host_blocks(41).scores.argmax(dim=-1).tolist())
        pair.shrink(request(41, 40, "h2o", targets))
        pair.check()

    def test_more_slots_than_a_tile_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shrink_module, "SLOT_TILE", 16)
        monkeypatch.setattr(shrink_module, "MOVE_TILE", 8)
        pair = Pair(41)
        pair.shrink(request(41, 30, "h2o_avg", IN_PLACE))
        pair.check()

    def test_layers_in_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shrink_module, "SCRATCH_BYTES", 1)
        pair = Pair(20)
        pair.set_victims([[3, 4], [5, 6]])
        pair.shrink(request(20, 9, "h2o", ELSEWHERE))
        pair.check()

    def test_another_rows_victims_stay(self) -> None:
        pair = Pair(20)
        pair.pool.victims[:, 2] = 3
        pair.backend.shrink(pair.pool, request(20, 9, "h2o", ELSEWHERE))
        assert bool((pair.pool.victims[:, 2] == 3).all())


class TestCopyBlocks:
    @pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
    def test_targets_become_their_sources_and_nothing_else_changes(self, kv_dtype: torch.dtype) -> None:
        pair = Pair(40, backend=triton_backend(kv_dtype))
        before = pair.backend.export_slots(pair.pool, range(NUM_BLOCKS), NUM_BLOCKS * BLOCK_SIZE)
        pair.backend.copy_blocks(pair.pool, [2, 5], [0, 9])
        after = pair.backend.export_slots(pair.pool, range(NUM_BLOCKS), NUM_BLOCKS * BLOCK_SIZE)
        order = list(range(NUM_BLOCKS))
        order[0], order[9] = 2, 5
        slots = [block * BLOCK_SIZE + offset for block in order for offset in range(BLOCK_SIZE)]
        for found, expected in (
            (after.keys, before.keys),
            (after.values, before.values),
            (after.scores, before.scores),
            (after.positions, before.positions),
        ):
            torch.testing.assert_close(found, expected[:, :, slots], rtol=0.0, atol=0.0, equal_nan=True)

    def test_nothing_is_copied_for_nothing(self) -> None:
        pair = Pair(20)
        pair.backend.copy_blocks(pair.pool, [], [])
        pair.check()


class TestHost:
    @pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
    @pytest.mark.parametrize("num_slots", SIZES)
    def test_what_was_imported_is_exported(self, num_slots: int, kv_dtype: torch.dtype) -> None:
        pair = Pair(1, backend=triton_backend(kv_dtype))
        exact = torch.bfloat16 if kv_dtype == torch.float8_e4m3fn else kv_dtype
        blocks = host_blocks(num_slots, dtype=kv_dtype)
        pair.backend.import_slots(pair.pool, ELSEWHERE, blocks)
        wide = HostBlocks(blocks.keys.to(exact), blocks.values.to(exact), blocks.positions, blocks.scores)
        found = pair.backend.export_slots(pair.pool, ELSEWHERE, num_slots)
        assert found.keys.device.type == "cpu"
        assert_same(found, wide)

    def test_an_import_changes_its_slots_and_nothing_else(self) -> None:
        Pair(33).check()

    def test_views_scores_and_life_are_the_references(self) -> None:
        pair = Pair(33)
        pair.set_victims([[4, 32], [-1, 0]])
        found = pair.backend.view_slots(pair.pool, ROW, TABLE, 33)
        expected = pair.reference.view_slots(pair.reference_pool, ROW, TABLE, 33)
        assert torch.equal(found.positions.cpu(), expected.positions)
        assert torch.equal(found.scores.cpu(), expected.scores)
        assert torch.equal(found.alive.cpu(), expected.alive)

    def test_scores_that_were_written_are_read_and_nothing_else_changes(self) -> None:
        pair = Pair(33)
        scores = host_blocks(17, seed=1).scores
        pair.backend.write_scores(pair.pool, TABLE, scores)
        pair.reference.write_scores(pair.reference_pool, TABLE, scores)
        pair.check()
        read = pair.backend.read_scores(pair.pool, TABLE, 33)
        assert torch.equal(read.cpu(), pair.reference.read_scores(pair.reference_pool, TABLE, 33))
        pair.backend.write_scores(pair.pool, TABLE, scores + 1)
        assert torch.equal(read[..., :17].cpu(), scores)

    def test_clearing_victims_revives_one_row(self) -> None:
        pair = Pair(1)
        pair.pool.victims.fill_(3)
        pair.backend.clear_victims(pair.pool, ROW)
        assert bool((pair.pool.victims[:, ROW] == -1).all())
        assert bool((pair.pool.victims[:, [0, 2, 3]] == 3).all())
