"""The reference back end's pool, on poisoned memory, and its steps: who may depend on whom, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kernels.backend import HostBlocks
from kvorum.kernels.plan import EvictionRule, SequenceStep, ShrinkRequest
from kvorum.kernels.reference.backend import QUERY_TILE, ReferenceBackend, query_tiles
from kvorum.kernels.reference.pool import NO_VICTIM, ReferencePool
from kvorum.kernels.spec import Shard
from kvtest.models import random_weights, reference_backend, tiny_spec

BLOCK_SIZE = 16
NUM_BLOCKS = 10
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
POISON_POSITION = 10**9
SIZES = (1, 15, 16, 17, 33)
# Blocks of a sequence: out of order, so that slot and place in memory differ.
TABLE = (7, 2, 5)
ROW = 1


def make_backend(dtype: torch.dtype = torch.float64) -> ReferenceBackend:
    spec = tiny_spec(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    return reference_backend(spec, random_weights(spec), dtype=dtype)


def poisoned_pool(backend: ReferenceBackend) -> ReferencePool:
    pool = backend.allocate_pool(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=4)
    pool.kv.fill_(torch.nan)
    pool.scores.fill_(torch.nan)
    pool.positions.fill_(POISON_POSITION)
    return pool


def host_blocks(num_slots: int, *, seed: int = 0) -> HostBlocks:
    """Positions as after evictions: others in each head, the newest (2 * num_slots) in all; scores with ties."""
    generator = torch.Generator().manual_seed(seed)
    pairs = LAYERS * KV_HEADS
    older = [torch.randperm(2 * num_slots, generator=generator)[: num_slots - 1] for _ in range(pairs)]
    positions = torch.stack([torch.cat((row, torch.tensor([2 * num_slots]))) for row in older])
    shape = (LAYERS, KV_HEADS, num_slots)
    return HostBlocks(
        keys=torch.randn(*shape, HEAD_DIM, generator=generator, dtype=torch.float64),
        values=torch.randn(*shape, HEAD_DIM, generator=generator, dtype=torch.float64),
        positions=positions.view(shape),
        scores=torch.randint(0, 9, shape, generator=generator).to(torch.float64) / 4,
    )


@dataclass(frozen=True)
class Bits:
    """A copy of a pool that can be compared with what became of it, NaNs included."""

    kv: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    victims: torch.Tensor

    @classmethod
    def of(cls, pool: ReferencePool) -> Bits:
        return cls(pool.kv.clone(), pool.scores.clone(), pool.positions.clone(), pool.victims.clone())

    def changed_slots(self, pool: ReferencePool) -> set[tuple[int, int, int, int]]:
        """Return (layer, block, head, offset) of every slot in which a bit is another."""
        kv = (self.kv.view(torch.int64) != pool.kv.view(torch.int64)).any(dim=-1).any(dim=2)
        scores = self.scores.view(torch.int64) != pool.scores.view(torch.int64)
        changed = kv | scores | (self.positions != pool.positions)
        return {(slot[0], slot[1], slot[2], slot[3]) for slot in changed.nonzero().tolist()}


def places(block_table: Sequence[int], slots: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Return (layer, block, head, offset) of slots in all layers and heads."""
    return {
        (layer, block_table[slot // BLOCK_SIZE], head, slot % BLOCK_SIZE)
        for layer in range(LAYERS)
        for head in range(KV_HEADS)
        for slot in slots
    }


def assert_same(found: HostBlocks, expected: HostBlocks) -> None:
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.scores, expected.scores)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)


def pick(blocks: HostBlocks, index: torch.Tensor) -> HostBlocks:
    """Return the slots [num_layers, num_kv_heads, n] of each pair, in that order."""
    wide = index[..., None].expand(*index.shape, HEAD_DIM)
    return HostBlocks(
        keys=blocks.keys.gather(2, wide),
        values=blocks.values.gather(2, wide),
        positions=blocks.positions.gather(2, index),
        scores=blocks.scores.gather(2, index),
    )


class TestExportAndImport:
    @pytest.mark.parametrize("num_slots", SIZES)
    def test_what_was_imported_is_exported(self, num_slots: int) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        blocks = host_blocks(num_slots)
        backend.import_slots(pool, TABLE, blocks)
        assert_same(backend.export_slots(pool, TABLE, num_slots), blocks)

    @pytest.mark.parametrize("num_slots", SIZES)
    def test_an_import_changes_the_first_slots_of_its_blocks_and_nothing_else(self, num_slots: int) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        before = Bits.of(pool)
        backend.import_slots(pool, TABLE, host_blocks(num_slots))
        assert before.changed_slots(pool) == places(TABLE, range(num_slots))
        assert torch.equal(pool.victims, before.victims)

    def test_a_slot_lies_in_its_block_at_its_offset(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        blocks = host_blocks(33)
        backend.import_slots(pool, TABLE, blocks)
        for slot in range(33):
            block, offset = TABLE[slot // BLOCK_SIZE], slot % BLOCK_SIZE
            assert torch.equal(pool.kv[:, block, 0, :, offset], blocks.keys[:, :, slot])
            assert torch.equal(pool.kv[:, block, 1, :, offset], blocks.values[:, :, slot])
            assert torch.equal(pool.positions[:, block, :, offset], blocks.positions[:, :, slot])
            assert torch.equal(pool.scores[:, block, :, offset], blocks.scores[:, :, slot])

    def test_what_was_exported_does_not_follow_the_pool(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        backend.import_slots(pool, TABLE, host_blocks(20))
        exported = backend.export_slots(pool, TABLE, 20)
        backend.import_slots(pool, TABLE, host_blocks(20, seed=1))
        assert_same(exported, host_blocks(20))


class TestCopyBlocks:
    def test_targets_become_their_sources_and_nothing_else_changes(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        backend.import_slots(pool, TABLE, host_blocks(40))
        before = Bits.of(pool)
        backend.copy_blocks(pool, [2, 5], [0, 9])
        written = {place for place in places([0, 9], range(32)) if place[1] == 0 or place[3] < 8}
        assert before.changed_slots(pool) == written  # block 5 holds 8 slots, the rest of it is poison as before
        assert_same(
            backend.export_slots(pool, [0, 9], 24),
            pick(host_blocks(40), torch.arange(16, 40).expand(LAYERS, KV_HEADS, 24)),
        )


# Shrinking.

RULES = {
    "h2o": EvictionRule(recent_tokens=5),
    "h2o_avg": EvictionRule(recent_tokens=3, sink_tokens=4, per_lifetime=True),
    "decay": EvictionRule(recent_tokens=2, per_lifetime=True, decay=0.95),
    "observed": EvictionRule(recent_tokens=2, per_lifetime=True, observe_from=60),
    "sinks": EvictionRule(recent_tokens=0, sink_tokens=4, by_age=True),
}
NUM_SLOTS = 41
NEWEST = 2 * NUM_SLOTS


def slow_worth(rule: EvictionRule, score: float, position: int) -> float:
    if rule.by_age:
        return 0.0
    if not rule.per_lifetime:
        return score
    counted = range(max(position, rule.observe_from), NEWEST + 1)
    return score / sum(rule.decay ** (NEWEST - query) for query in counted)


def slow_kept(
    rule: EvictionRule, positions: list[int], scores: list[float], *, keep: int, pool_width: int, victim: int | None
) -> list[int]:
    """Return the slots that survive, in slot order."""
    in_order = sorted(range(len(positions)), key=positions.__getitem__)
    worths = [slow_worth(rule, scores[slot], positions[slot]) for slot in in_order]
    reach = pool_width // 2
    pooled = {slot: max(worths[max(0, i - reach) : i + reach + 1]) for i, slot in enumerate(in_order)}

    def rank(slot: int) -> tuple[bool, bool, float, int]:
        protected = positions[slot] < rule.sink_tokens or positions[slot] > NEWEST - rule.recent_tokens
        return slot != victim, protected, pooled[slot], positions[slot]

    return sorted(sorted(range(len(positions)), key=rank)[-keep:])


@dataclass
class Shrinking:
    """A sequence of 41 slots with scores that tie, ready to be cut."""

    targets: tuple[int, ...]
    keep: int
    rule: EvictionRule
    pool_width: int = 1
    victims: tuple[tuple[int, ...], ...] | None = None
    backend: ReferenceBackend = field(default_factory=make_backend)

    def __post_init__(self) -> None:
        self.blocks = host_blocks(NUM_SLOTS)
        self.pool = poisoned_pool(self.backend)
        self.backend.import_slots(self.pool, TABLE, self.blocks)
        self.backend.import_slots(self.pool, (1, 4), host_blocks(25, seed=1))  # a neighbour
        self.pool.victims[:, 2] = 3  # a neighbour's
        if self.victims is not None:
            self.pool.victims[:, ROW] = torch.tensor(self.victims)
        self.before = Bits.of(self.pool)

    def run(self) -> None:
        request = ShrinkRequest(ROW, TABLE, self.targets, NUM_SLOTS, self.keep, NEWEST, self.rule, self.pool_width)
        self.backend.shrink(self.pool, request)

    def expected(self) -> HostBlocks:
        kept = [
            [
                slow_kept(
                    self.rule,
                    self.blocks.positions[layer, head].tolist(),
                    self.blocks.scores[layer, head].tolist(),
                    keep=self.keep,
                    pool_width=self.pool_width,
                    victim=None if self.victims is None else self.victims[layer][head],
                )
                for head in range(KV_HEADS)
            ]
            for layer in range(LAYERS)
        ]
        return pick(self.blocks, torch.tensor(kept))

    def found(self) -> HostBlocks:
        return self.backend.export_slots(self.pool, self.targets, self.keep)


class TestShrink:
    @pytest.mark.parametrize("targets", [TABLE, (8, 0, 3)], ids=["in place", "elsewhere"])
    @pytest.mark.parametrize("keep", [1, 15, 16, 17, 40])
    @pytest.mark.parametrize("rule", RULES)
    def test_the_best_stay_in_slot_order(self, rule: str, keep: int, targets: tuple[int, ...]) -> None:
        it = Shrinking(targets[: -(-keep // BLOCK_SIZE)], keep, RULES[rule])
        it.run()
        assert_same(it.found(), it.expected())

    @pytest.mark.parametrize("pool_width", [3, 5, 7])
    def test_neighbours_of_the_best_stay_when_values_are_pooled(self, pool_width: int) -> None:
        it = Shrinking((8, 0), 20, RULES["h2o"], pool_width)
        it.run()
        assert_same(it.found(), it.expected())

    @pytest.mark.parametrize("targets", [TABLE, (8, 0, 3)], ids=["in place", "elsewhere"])
    def test_pending_victims_go_first_even_the_best(self, targets: tuple[int, ...]) -> None:
        blocks = host_blocks(NUM_SLOTS)
        best = blocks.scores.argmax(dim=-1)
        it = Shrinking(targets, NUM_SLOTS - 1, RULES["h2o"], victims=tuple(map(tuple, best.tolist())))
        it.run()
        assert_same(it.found(), it.expected())
        assert bool((it.found().scores.sum(dim=-1) == blocks.scores.sum(dim=-1) - blocks.scores.amax(dim=-1)).all())

    def test_it_forgets_its_own_row_of_victims_and_no_other(self) -> None:
        it = Shrinking((8, 0), 20, RULES["h2o"], victims=((1, 2), (3, 4)))
        it.run()
        assert bool((it.pool.victims[:, ROW] == NO_VICTIM).all())
        assert bool((it.pool.victims[:, 2] == 3).all())

    @pytest.mark.parametrize("targets", [(7, 2), (8, 0)], ids=["in place", "elsewhere"])
    def test_nothing_changes_outside_the_kept_slots_of_the_targets(self, targets: tuple[int, ...]) -> None:
        it = Shrinking(targets, 20, RULES["h2o"])
        it.run()
        assert it.before.changed_slots(it.pool) <= places(targets, range(20))

    @given(seed=st.integers(0, 10**6))
    def test_permuting_slots_keeps_the_same_tokens(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.stack([torch.randperm(NUM_SLOTS, generator=generator) for _ in range(4)]).view(2, 2, -1)
        kept = []
        for order in (torch.arange(NUM_SLOTS).expand(LAYERS, KV_HEADS, NUM_SLOTS), shuffled):
            it = Shrinking((8, 0), 20, RULES["h2o_avg"], pool_width=5)
            it.backend.import_slots(it.pool, TABLE, pick(it.blocks, order))
            it.run()
            kept.append(it.found().positions.sort(dim=-1).values)
        assert torch.equal(kept[0], kept[1])


class TestScoresAndViews:
    def test_a_view_is_what_was_imported_and_all_alive(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        blocks = host_blocks(33)
        backend.import_slots(pool, TABLE, blocks)
        view = backend.view_slots(pool, ROW, TABLE, 33)
        assert torch.equal(view.positions, blocks.positions)
        assert torch.equal(view.scores, blocks.scores)
        assert view.alive.shape == (LAYERS, KV_HEADS, 33)
        assert bool(view.alive.all())

    def test_a_pending_victim_is_dead_in_its_own_layer_head_and_row(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        backend.import_slots(pool, TABLE, host_blocks(33))
        pool.victims[0, ROW] = torch.tensor([4, 32])
        pool.victims[1, ROW, 1] = 0
        dead = (~backend.view_slots(pool, ROW, TABLE, 33).alive).nonzero().tolist()
        assert dead == [[0, 0, 4], [0, 1, 32], [1, 1, 0]]
        assert bool(backend.view_slots(pool, ROW + 1, TABLE, 33).alive.all())

    def test_clearing_victims_revives_one_row(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        pool.victims.fill_(3)
        backend.clear_victims(pool, ROW)
        assert bool((pool.victims[:, ROW] == NO_VICTIM).all())
        assert bool((pool.victims[:, [0, 2, 3]] == 3).all())

    def test_a_new_pool_has_no_victims(self) -> None:
        backend = make_backend()
        pool = backend.allocate_pool(num_blocks=2, block_size=BLOCK_SIZE, max_num_seqs=3)
        assert bool((pool.victims == NO_VICTIM).all())

    def test_scores_that_were_written_are_read(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        scores = host_blocks(33).scores
        backend.write_scores(pool, TABLE, scores)
        assert torch.equal(backend.read_scores(pool, TABLE, 33), scores)
        assert torch.equal(backend.read_scores(pool, TABLE, 17), scores[..., :17])

    def test_writing_scores_changes_nothing_but_scores_of_the_first_slots(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        before = Bits.of(pool)
        backend.write_scores(pool, TABLE, host_blocks(17).scores)
        assert before.changed_slots(pool) == places(TABLE, range(17))
        assert bool(pool.kv.isnan().all())
        assert bool((pool.positions == POISON_POSITION).all())

    def test_scores_that_were_read_do_not_follow_the_pool(self) -> None:
        backend = make_backend()
        pool = poisoned_pool(backend)
        backend.write_scores(pool, TABLE, host_blocks(17).scores)
        read = backend.read_scores(pool, TABLE, 17)
        backend.write_scores(pool, TABLE, host_blocks(17, seed=1).scores)
        assert torch.equal(read, host_blocks(17).scores)


@pytest.mark.parametrize("kv_heads", [(0, 2), (0, 1), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 16])
def test_block_bytes_are_the_bytes_that_a_pool_takes(
    block_size: int, dtype: torch.dtype, kv_heads: tuple[int, int]
) -> None:
    spec = tiny_spec()
    shard = replace(Shard.whole(spec), q_heads=(2 * kv_heads[0], 2 * kv_heads[1]), kv_heads=kv_heads)
    backend = ReferenceBackend(spec, shard, dtype=dtype, device=torch.device("cpu"))
    pool = backend.allocate_pool(num_blocks=7, block_size=block_size, max_num_seqs=1)
    assert pool.kv.nbytes + pool.scores.nbytes + pool.positions.nbytes == 7 * backend.block_bytes(block_size)


# Steps.


@dataclass
class Run:
    """Sequences in a pool of their own, stepped by hand."""

    backend: ReferenceBackend

    def __post_init__(self) -> None:
        self.pool = poisoned_pool(self.backend)

    def step(self, *items: tuple[SequenceStep, Sequence[int]]) -> torch.Tensor:
        """Return the logits of all tokens."""
        token_ids = torch.tensor([token for _, tokens in items for token in tokens])
        step = self.backend.prepare(self.pool, token_ids, [item for item, _ in items])
        hidden = self.backend.embed(step)
        for layer in range(self.backend.spec.num_layers):
            partial = self.backend.attention_block(hidden, layer, self.pool, step)
            hidden = self.backend.add_residual(hidden, partial, layer, after_mlp=False)
            partial = self.backend.mlp_block(hidden, layer, step)
            hidden = self.backend.add_residual(hidden, partial, layer, after_mlp=True)
        return self.backend.logits(hidden)


def tokens_of(count: int, *, seed: int = 0) -> list[int]:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prefill(run: Run, table: tuple[int, ...], tokens: Sequence[int], *, row: int, rule: EvictionRule | None) -> None:
    run.step((SequenceStep(row, table, start=0, num_tokens=len(tokens), num_slots=0, rule=rule), tokens))


BUDGET = 20
RULE = EvictionRule(recent_tokens=10)


def held_to_budget(run: Run, *, row: int = ROW) -> None:
    """Prefill 30 tokens into blocks 7 and 2, and cut them to the budget."""
    prefill(run, (7, 2), tokens_of(30), row=row, rule=RULE)
    run.backend.shrink(run.pool, ShrinkRequest(row, (7, 2), (7, 2), 30, BUDGET, 29, RULE))


def decode_step(position: int, table: tuple[int, ...], *, first: bool, row: int = ROW) -> SequenceStep:
    """Return a step at the budget: the first one takes a slot more, the others replace."""
    num_slots = BUDGET if first else BUDGET + 1
    return SequenceStep(row, table, position, 1, num_slots, RULE, replace=not first, choose_victims=True)


def decode(run: Run, table: tuple[int, ...], *, steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Feed known tokens; returns the logits and the positions kept after each step, ascending."""
    logits, kept = [], []
    for index, token in enumerate(tokens_of(steps, seed=9)):
        logits.append(run.step((decode_step(30 + index, table, first=index == 0), [token])))
        view = run.backend.view_slots(run.pool, ROW, table, BUDGET + 1)
        kept.append(view.positions[view.alive].view(LAYERS, KV_HEADS, BUDGET).sort(dim=-1).values)
    return torch.cat(logits), kept


class TestSteps:
    @pytest.mark.parametrize("seed", range(3))
    def test_permuting_slots_changes_neither_logits_nor_what_is_kept_later(self, seed: int) -> None:
        plain, permuted = Run(make_backend()), Run(make_backend())
        held_to_budget(plain)
        held_to_budget(permuted)
        generator = torch.Generator().manual_seed(seed)
        order = torch.stack([torch.randperm(BUDGET, generator=generator) for _ in range(LAYERS * KV_HEADS)])
        slots = permuted.backend.export_slots(permuted.pool, (7, 2), BUDGET)
        permuted.backend.import_slots(permuted.pool, (0, 9), pick(slots, order.view(LAYERS, KV_HEADS, BUDGET)))

        logits, kept = decode(plain, (7, 2), steps=15)
        permuted_logits, permuted_kept = decode(permuted, (0, 9), steps=15)

        torch.testing.assert_close(permuted_logits, logits, rtol=1e-10, atol=1e-10)
        assert all(map(torch.equal, permuted_kept, kept))

    def test_a_step_at_the_budget_overwrites_the_victims_and_no_other_token(self) -> None:
        run = Run(make_backend())
        held_to_budget(run)
        run.step((decode_step(30, (7, 2), first=True), [1]))
        victims = run.pool.victims[:, ROW].clone()
        before = Bits.of(run.pool)
        run.step((decode_step(31, (7, 2), first=False), [2]))
        assert before.changed_slots(run.pool) <= places((7, 2), range(2 * BLOCK_SIZE))  # its own blocks' scores
        moved = (before.positions != run.pool.positions).nonzero().tolist()
        slots = {(layer, head, (7, 2).index(block) * BLOCK_SIZE + offset) for layer, block, head, offset in moved}
        pairs = [(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)]
        assert slots == {(layer, head, int(victims[layer, head])) for layer, head in pairs}
        assert torch.equal(
            (before.kv.view(torch.int64) != run.pool.kv.view(torch.int64)).any(dim=-1).any(dim=2),
            before.positions != run.pool.positions,
        )

    def test_a_token_that_takes_a_victims_slot_has_its_own_position(self) -> None:
        run = Run(make_backend())
        held_to_budget(run)
        _, kept = decode(run, (7, 2), steps=3)
        assert [bool((positions[..., -1] == 30 + index).all()) for index, positions in enumerate(kept)] == [True] * 3

    def test_a_step_that_chooses_no_victims_leaves_none(self) -> None:
        run = Run(make_backend())
        prefill(run, (7, 2), tokens_of(30), row=ROW, rule=RULE)
        assert bool((run.pool.victims == NO_VICTIM).all())

    def test_a_sequence_without_a_rule_keeps_no_scores(self) -> None:
        run = Run(make_backend())
        prefill(run, (7, 2), tokens_of(30), row=ROW, rule=None)
        assert not run.backend.read_scores(run.pool, (7, 2), 30).any()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_a_step_of_several_sequences_equals_each_alone_bit_for_bit(self, dtype: torch.dtype) -> None:
        """One prefills, one decodes without a rule, one appends at its budget and one replaces its victims."""

        def ready(run: Run) -> Run:
            prefill(run, (3, 4), tokens_of(19, seed=2), row=0, rule=None)
            held_to_budget(run)
            prefill(run, (5, 6), tokens_of(30, seed=3), row=2, rule=RULE)
            run.backend.shrink(run.pool, ShrinkRequest(2, (5, 6), (5, 6), 30, BUDGET, 29, RULE))
            run.step((decode_step(30, (5, 6), first=True, row=2), [11]))
            return run

        items: list[tuple[SequenceStep, list[int]]] = [
            (SequenceStep(3, (0, 1), start=0, num_tokens=21, num_slots=0, rule=RULE), tokens_of(21, seed=4)),
            (SequenceStep(0, (3, 4), start=19, num_tokens=1, num_slots=19), [7]),
            (decode_step(30, (7, 2), first=True), [8]),
            (decode_step(31, (5, 6), first=False, row=2), [9]),
        ]
        together = ready(Run(make_backend(dtype)))
        batch = together.step(*items)

        row = 0
        for item, tokens in items:
            alone = ready(Run(make_backend(dtype)))
            assert torch.equal(alone.step((item, tokens)), batch[row : row + len(tokens)])
            num_slots = item.num_slots_after
            found, expected = (
                run.backend.export_slots(run.pool, item.block_table, num_slots) for run in (together, alone)
            )
            assert_same(found, expected)
            assert torch.equal(together.pool.victims[:, item.row], alone.pool.victims[:, item.row])
            row += len(tokens)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("cut", [16, 32])
    def test_logits_do_not_depend_on_chunks_that_end_at_query_tiles(self, cut: int, dtype: torch.dtype) -> None:
        tokens = tokens_of(45)
        whole, cut_up = Run(make_backend(dtype)), Run(make_backend(dtype))
        expected = whole.step((SequenceStep(ROW, TABLE, 0, 45, 0), tokens))
        first = cut_up.step((SequenceStep(ROW, TABLE, 0, cut, 0), tokens[:cut]))
        rest = cut_up.step((SequenceStep(ROW, TABLE, cut, 45 - cut, cut), tokens[cut:]))
        assert torch.equal(torch.cat((first, rest)), expected)

    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize(("decay", "observe_from"), [(1.0, 0), (0.9, 0), (1.0, 20), (0.9, 20)])
    def test_each_query_that_counts_gives_its_weight_for_each_query_head(
        self, decay: float, observe_from: int, window: int | None
    ) -> None:
        spec = tiny_spec(window=window)
        run = Run(reference_backend(spec, random_weights(spec)))
        rule = EvictionRule(recent_tokens=5, decay=decay, observe_from=observe_from)
        prefill(run, TABLE, tokens_of(33), row=ROW, rule=rule)
        run.step((SequenceStep(ROW, TABLE, 33, 1, 33, rule), [5]))
        mass = sum(decay ** (33 - query) for query in range(observe_from, 34))
        found = run.backend.read_scores(run.pool, TABLE, 34).sum(dim=-1)
        torch.testing.assert_close(found, torch.full_like(found, spec.group_size * mass))

    def test_scores_do_not_depend_on_chunks(self) -> None:
        tokens, rule = tokens_of(45), EvictionRule(recent_tokens=5, decay=0.9, observe_from=20)
        whole, cut_up = Run(make_backend()), Run(make_backend())
        prefill(whole, TABLE, tokens, row=ROW, rule=rule)
        for first, last in ((0, 16), (16, 32), (32, 44), (44, 45)):
            cut_up.step((SequenceStep(ROW, TABLE, first, last - first, first, rule), tokens[first:last]))
        found, expected = (run.backend.read_scores(run.pool, TABLE, 45) for run in (cut_up, whole))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@given(st.integers(0, 100), st.integers(1, 100))
def test_query_tiles_cut_at_multiples_of_the_tile_and_nowhere_else(start: int, num_tokens: int) -> None:
    tiles = query_tiles(start, num_tokens)
    covered = [index for first, last in tiles for index in range(first, last)]
    assert covered == list(range(num_tokens))
    inner = [start + first for first, _ in tiles[1:]]
    assert inner == [p for p in range(start + 1, start + num_tokens) if p % QUERY_TILE == 0]
