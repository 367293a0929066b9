"""Retained mass: sums over what is kept, against loops and against a real run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvorum.kernels.backend import HostBlocks, SlotView
from kvorum.kernels.plan import EvictionRule, SequenceStep, ShrinkRequest
from kvorum.kernels.spec import DecoderSpec
from kvorum.kvstore.policies import Policy, parse_policy
from kvorum.kvstore.retention import kept_mass, kept_mass_curve, mass_given, smallest_budget
from kvorum.kvstore.types import blocks_for
from kvtest.models import random_weights, reference_backend, tiny_spec

BLOCK_SIZE = 4
LAYERS, HEADS = 2, 3


@st.composite
def views(draw: st.DrawFn) -> SlotView:
    """Any scores, with at most one pending victim in each (layer, KV head), as a row has all or none."""
    num_slots = draw(st.integers(1, 23))
    numbers = st.floats(0.0, 8.0, width=32)
    cells = LAYERS * HEADS * num_slots
    scores = torch.tensor(draw(st.lists(numbers, min_size=cells, max_size=cells))).view(LAYERS, HEADS, num_slots)
    positions = torch.arange(num_slots).expand(LAYERS, HEADS, num_slots)
    alive = torch.ones(LAYERS, HEADS, num_slots, dtype=torch.bool)
    if num_slots > 1 and draw(st.booleans()):
        seed = draw(st.integers(0, 1000))
        victims = torch.randint(0, num_slots, (LAYERS, HEADS, 1), generator=torch.Generator().manual_seed(seed))
        alive.scatter_(-1, victims, torch.zeros_like(victims, dtype=torch.bool))
    return SlotView(positions, scores, alive)


def alive_scores(view: SlotView) -> list[list[float]]:
    """Return the living slots' scores of each (layer, KV head), best first."""
    return [
        sorted(view.scores[layer, head][view.alive[layer, head]].tolist(), reverse=True)
        for layer in range(view.scores.shape[0])
        for head in range(view.scores.shape[1])
    ]


class TestKeptMass:
    @given(views())
    def test_it_is_what_living_slots_received(self, view: SlotView) -> None:
        assert kept_mass(view) == pytest.approx(math.fsum(math.fsum(scores) for scores in alive_scores(view)))


class TestCurve:
    @given(views())
    def test_it_equals_the_sums_of_the_best_scores(self, view: SlotView) -> None:
        num_slots = view.scores.shape[-1]
        found = kept_mass_curve(view, block_size=BLOCK_SIZE).tolist()
        expected = [
            math.fsum(math.fsum(scores[: blocks * BLOCK_SIZE]) for scores in alive_scores(view))
            for blocks in range(blocks_for(num_slots, BLOCK_SIZE) + 1)
        ]
        assert found == pytest.approx(expected)

    @given(views())
    def test_it_rises_from_nothing_to_the_kept_mass(self, view: SlotView) -> None:
        curve = kept_mass_curve(view, block_size=BLOCK_SIZE)
        assert curve[0] == 0.0
        assert bool((curve.diff() >= -1e-9).all())
        assert float(curve[-1]) == pytest.approx(kept_mass(view))

    @given(views())
    def test_each_block_adds_no_more_than_the_one_before(self, view: SlotView) -> None:
        gains = kept_mass_curve(view, block_size=BLOCK_SIZE).diff()
        assert bool((gains.diff() <= 1e-9).all())


# A real run.


class Run:
    """A prompt of 37 tokens and three more, nothing evicted, in a tiny model's pool."""

    TABLE = tuple(range(10))

    def __init__(self, rule: EvictionRule | None, *, spec: DecoderSpec | None = None) -> None:
        self.spec = spec or tiny_spec(num_heads=6, num_kv_heads=2)
        self.backend = reference_backend(self.spec, random_weights(self.spec))
        self.pool = self.backend.allocate_pool(num_blocks=20, block_size=BLOCK_SIZE, max_num_seqs=1)
        tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1)).tolist()
        for start, stop in ((0, 16), (16, 37), (37, 38), (38, 39), (39, 40)):
            self.step(tokens[start:stop], SequenceStep(0, self.TABLE, start, stop - start, start, rule))

    def step(self, tokens: Sequence[int], sequence: SequenceStep) -> None:
        step = self.backend.prepare(self.pool, torch.tensor(tokens), [sequence])
        hidden = self.backend.embed(step)
        for layer in range(self.spec.num_layers):
            partial = self.backend.attention_block(hidden, layer, self.pool, step)
            hidden = self.backend.add_residual(hidden, partial, layer, after_mlp=False)
            partial = self.backend.mlp_block(hidden, layer, step)
            hidden = self.backend.add_residual(hidden, partial, layer, after_mlp=True)

    @property
    def view(self) -> SlotView:
        return self.backend.view_slots(self.pool, 0, self.TABLE, 40)


POLICIES = ("h2o", "h2o_avg", "h2o:decay=0.95", "snap_h2o", "h2o_avg:recent=0.6,sinks=8", "h2o:recent=0,sinks=0")
NUM_TOKENS = 40


def rule_of(policy: Policy, budget: int | None = None) -> EvictionRule:
    return policy.rule(budget, prompt_tokens=NUM_TOKENS)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("name", POLICIES)
def test_the_mass_given_is_the_attention_of_a_real_run(name: str, heads: tuple[int, int]) -> None:
    spec = tiny_spec(num_heads=heads[0], num_kv_heads=heads[1], window=13)
    rule = rule_of(parse_policy(name))
    found = Run(rule, spec=spec).view.scores.sum(dim=-1)
    mass = mass_given(rule, spec, num_tokens=NUM_TOKENS)
    torch.testing.assert_close(found, torch.full_like(found, mass / found.numel()))


def mass_of(run: Run, policy: Policy) -> float:
    return mass_given(rule_of(policy), run.spec, num_tokens=NUM_TOKENS)


def cut(run: Run, policy: Policy, keep: int) -> SlotView:
    """Return what is left of the run, cut to `keep` tokens as at a prompt's end."""
    backend = run.backend
    whole: HostBlocks = backend.export_slots(run.pool, run.TABLE, NUM_TOKENS)
    targets = tuple(range(10, 10 + blocks_for(keep, BLOCK_SIZE)))
    backend.shrink(
        run.pool,
        ShrinkRequest(
            0, run.TABLE, targets, NUM_TOKENS, keep, NUM_TOKENS - 1, rule_of(policy, keep), policy.pool_width
        ),
    )
    backend.import_slots(run.pool, run.TABLE, whole)
    return backend.view_slots(run.pool, 0, targets, keep)


def find_budget(view: SlotView, policy: Policy, *, floor: float, budget: int) -> int:
    return smallest_budget(view, policy, floor=floor, budget=budget, prompt_tokens=NUM_TOKENS, add_up=lambda kept: kept)


class TestSmallestBudget:
    @pytest.mark.parametrize("floor", [0.3, 0.5, 0.8, 0.9, 0.99])
    @pytest.mark.parametrize("name", ["h2o", "h2o_avg", "snap_h2o", "h2o:decay=0.95", "h2o_avg:recent=0.6,sinks=8"])
    def test_it_is_the_first_whose_cut_keeps_the_floor(self, name: str, floor: float) -> None:
        policy = parse_policy(name)
        run = Run(rule_of(policy))
        wanted = floor * mass_of(run, policy)
        expected = next(keep for keep in range(16, NUM_TOKENS + 1) if kept_mass(cut(run, policy, keep)) >= wanted)
        assert find_budget(run.view, policy, floor=wanted, budget=16) == expected

    def test_it_is_not_less_than_the_budget_asked_for(self) -> None:
        policy = parse_policy("h2o")
        run = Run(rule_of(policy))
        assert find_budget(run.view, policy, floor=0.1 * mass_of(run, policy), budget=29) == 29

    @pytest.mark.parametrize("budget", [16, 40, 50])
    def test_a_floor_of_one_keeps_everything(self, budget: int) -> None:
        policy = parse_policy("h2o_avg")
        run = Run(rule_of(policy))
        assert find_budget(run.view, policy, floor=mass_of(run, policy), budget=budget) == NUM_TOKENS

    def test_pending_victims_are_not_kept(self) -> None:
        policy = parse_policy("h2o:recent=0")
        scores = torch.tensor([[[5.0, 1.0, 1.0, 1.0]]])
        alive = torch.tensor([[[False, True, True, True]]])
        view = SlotView(torch.arange(4).view(1, 1, 4), scores, alive)
        found = [find_budget(view, policy, floor=floor, budget=1) for floor in (2.0, 7.2)]
        assert found == [2, 3]  # all that live keep 3

    def test_what_other_ranks_keep_counts(self) -> None:
        policy = parse_policy("h2o:recent=0")
        view = SlotView(torch.arange(4).view(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4, dtype=torch.bool))
        found = smallest_budget(view, policy, floor=6.0, budget=1, prompt_tokens=4, add_up=lambda kept: 2.0 * kept)
        assert found == 3
