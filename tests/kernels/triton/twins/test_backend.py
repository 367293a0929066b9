"""The whole back end against the reference in float64: hidden states, positions, scores and victims, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch

from kvorum.kernels.backend import run_layers
from kvorum.kernels.plan import EvictionRule, SequenceStep, ShrinkRequest
from kvorum.kernels.spec import DecoderSpec, LayerSpec, Shard
from kvorum.kernels.triton.backend import TritonBackend
from kvorum.kernels.triton.graphs import DecodeGraphs, empty_step, fill_step
from kvorum.kernels.triton.pool import TritonPool
from kvorum.kernels.triton.step import TritonStep
from kvtest.models import random_weights, reference_backend, tiny_spec
from kvtest.paged import DEVICE, INTERPRETED, RULES, assert_near, poison

NUM_BLOCKS, BLOCK_SIZE = 24, 16
TOLERANCE = 1e-4
AVG = EvictionRule(recent_tokens=5, sink_tokens=2, per_lifetime=True, decay=0.95)

PLAIN = tiny_spec(head_dim=16)
GEMMA = replace(
    tiny_spec(head_dim=24, window=9),
    activation="gelu_tanh",
    norm_offset=1.0,
    embedding_scale=8.0,
    attention_scale=0.15,
    qk_norm=True,
    sandwich_norms=True,
)
BIASED = replace(
    tiny_spec(num_heads=2, head_dim=16), qkv_bias=True, output_bias=True, mlp_bias=True, tied_embeddings=False
)
YARN = replace(
    tiny_spec(num_heads=3, num_kv_heads=1, head_dim=16),
    layers=(
        LayerSpec(replace(PLAIN.layers[0].rope, attention_factor=1.2)),
        LayerSpec(PLAIN.layers[0].rope, sliding_window=20),
    ),
    qk_norm=True,
)
SPECS = {"gqa": PLAIN, "gemma, windows": GEMMA, "mha, biases, untied": BIASED, "mqa, yarn, qk_norm": YARN}


class Both:
    """The same steps through both back ends, on poisoned pools."""

    def __init__(self, spec: DecoderSpec) -> None:
        weights = random_weights(spec)
        self.reference = reference_backend(spec, weights)
        self.triton = TritonBackend(spec, Shard.whole(spec), dtype=torch.float32, device=DEVICE)
        self.triton.load(weights.items())
        sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": 4}
        self.reference_pool, self.pool = self.reference.allocate_pool(**sizes), self.triton.allocate_pool(**sizes)
        poison(self.pool)
        self._generator = torch.Generator().manual_seed(1)

    def step(self, *steps: SequenceStep) -> torch.Tensor:
        """Run a step and compare; returns what the Triton back end made of it."""
        num_tokens = sum(step.num_tokens for step in steps)
        tokens = torch.randint(0, 64, (num_tokens,), generator=self._generator)
        expected = self.reference.forward(
            self.reference_pool, self.reference.prepare(self.reference_pool, tokens, steps)
        )
        hidden = self.triton.forward(self.pool, self.triton.prepare(self.pool, tokens, steps))
        assert_near(hidden, expected, TOLERANCE, "hidden states")
        logits = self.triton.logits(hidden)
        assert logits.dtype == torch.float32
        assert_near(logits, self.reference.logits(expected), TOLERANCE, "logits")
        for step in steps:
            self.compare(step.row, step.block_table, step.num_slots_after, scores=step.rule is not None)
        return hidden

    def compare(self, row: int, table: Sequence[int], num_slots: int, *, scores: bool = True) -> None:
        found = self.triton.view_slots(self.pool, row, table, num_slots)
        expected = self.reference.view_slots(self.reference_pool, row, table, num_slots)
        assert torch.equal(found.positions.cpu(), expected.positions)
        assert torch.equal(found.alive.cpu(), expected.alive)
        if scores:
            assert_near(found.scores, expected.scores, TOLERANCE, "scores")

    def shrink(self, request: ShrinkRequest) -> None:
        self.triton.shrink(self.pool, request)
        self.reference.shrink(self.reference_pool, request)
        self.compare(request.row, request.targets, request.keep)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.triton.copy_blocks(self.pool, sources, targets)
        self.reference.copy_blocks(self.reference_pool, sources, targets)

    def clear_victims(self, row: int) -> None:
        self.triton.clear_victims(self.pool, row)
        self.reference.clear_victims(self.reference_pool, row)


A, B = (7, 2, 5, 9), (11, 3, 1)


@pytest.mark.parametrize(("name", "rule"), [*((name, AVG) for name in SPECS), ("gqa", RULES["h2o"])])
def test_a_life_of_two_sequences(name: str, rule: EvictionRule) -> None:
    both = Both(SPECS[name])
    # A prefills in chunks while B does, then decodes; A is cut to 20 slots, pooled as SnapKV does.
    both.step(SequenceStep(1, A, 0, 17, 0, rule), SequenceStep(2, B, 0, 4, 0))
    both.step(SequenceStep(1, A, 17, 10, 17, rule), SequenceStep(2, B, 4, 1, 4))
    both.shrink(ShrinkRequest(1, A, A[:2], 27, 20, 26, rule, 3))
    # A holds 20 and the newest; its victims make room from the second step on.
    both.step(SequenceStep(1, A, 27, 1, 20, rule, choose_victims=True), SequenceStep(2, B, 5, 1, 5))
    for position in (28, 29, 30):
        both.step(SequenceStep(1, A, position, 1, 21, rule, replace=True, choose_victims=True))
    both.step(
        SequenceStep(2, B, 6, 3, 6, rule),
        SequenceStep(1, A, 31, 1, 21, rule, replace=True, choose_victims=True),
    )
    # The pending victims live on: the sequence takes a slot more instead, in a copy of its blocks.
    both.copy_blocks(A[:2], (20, 0))
    both.clear_victims(1)
    both.step(SequenceStep(1, (20, 0), 32, 1, 21, rule, choose_victims=True))
    # A cut with victims pending: they go first.
    both.shrink(ShrinkRequest(1, (20, 0), (13,), 22, 16, 32, rule))
    both.step(SequenceStep(1, (13, 14), 33, 3, 16, rule, choose_victims=True))


def test_a_decode_behind_pending_victims_sees_them() -> None:
    both = Both(PLAIN)
    rule = RULES["h2o"]
    both.step(SequenceStep(0, A, 0, 10, 0, rule))
    both.step(SequenceStep(0, A, 10, 1, 10, rule, choose_victims=True))
    both.step(SequenceStep(0, A, 11, 1, 11, rule))
    both.step(SequenceStep(0, A, 12, 1, 12, rule, choose_victims=True))


def test_long_rows_beside_short_ones() -> None:
    both = Both(replace(PLAIN, layers=PLAIN.layers[:1]))
    table = tuple(range(23, 2, -1))
    rule = RULES["h2o_avg"]
    both.step(SequenceStep(0, table, 0, 299, 0, rule), SequenceStep(1, (0, 1), 0, 4, 0))
    both.step(SequenceStep(0, table, 299, 1, 299, rule, choose_victims=True), SequenceStep(1, (0, 1), 4, 1, 4))
    both.step(SequenceStep(0, table, 300, 1, 300, rule, replace=True, choose_victims=True))


class TestPaths:
    """The ways through a step give the same."""

    STEPS = (
        SequenceStep(1, A, 17, 1, 17, AVG, choose_victims=True),
        SequenceStep(2, B, 5, 1, 5),
        SequenceStep(0, (4,), 3, 1, 3, RULES["h2o"]),
    )
    TOKENS = torch.tensor([5, 6, 7])

    def ready(self) -> tuple[TritonBackend, TritonPool, TritonPool]:
        """Return a back end and two pools with the same sequences."""
        both = Both(GEMMA)
        both.step(SequenceStep(1, A, 0, 17, 0, AVG), SequenceStep(2, B, 0, 5, 0), SequenceStep(0, (4,), 0, 3, 0, AVG))
        pool = both.pool
        copy = TritonPool(
            pool.kv.clone(), pool.scores.clone(), pool.positions.clone(), pool.victims.clone(), pool.logits.clone()
        )
        return both.triton, pool, copy

    def test_half_layers_one_by_one(self) -> None:
        backend, pool, copy = self.ready()
        hidden = backend.forward(pool, backend.prepare(pool, self.TOKENS, self.STEPS))
        halves = run_layers(backend, copy, backend.prepare(copy, self.TOKENS, self.STEPS))
        assert_near(halves, hidden, TOLERANCE, "hidden states")
        self.assert_same_pools(copy, pool)

    def test_rows_that_fill_a_graphs_batch_touch_nothing(self) -> None:
        backend, pool, copy = self.ready()
        step = backend.prepare(pool, self.TOKENS, self.STEPS)
        hidden = run_layers(backend, pool, step)
        padded = empty_step(4, extra_items=5, max_table=20, splits=False, device=DEVICE)
        fill_step(padded, step)
        assert_near(run_layers(backend, copy, padded)[:3], hidden, TOLERANCE, "hidden states")
        self.assert_same_pools(copy, pool)

    @staticmethod
    def assert_same_pools(found: TritonPool, expected: TritonPool) -> None:
        assert torch.equal(found.positions, expected.positions)
        assert torch.equal(found.victims, expected.victims)
        for one, other in ((found.kv, expected.kv), (found.scores, expected.scores)):
            torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


class FakeGraphs:
    """Stands in for torch.cuda: a "graph" is the last forward pass that was run, and a replay runs it again."""

    def __init__(self, backend: TritonBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        self._backend = backend
        self._last: tuple[TritonPool, TritonStep, torch.Tensor] | None = None
        self.captures = 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", mock.MagicMock())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.MagicMock)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)

    def forward(self, pool: TritonPool, step: TritonStep) -> torch.Tensor:
        hidden = run_layers(self._backend, pool, step)
        self._last = pool, step, hidden
        return hidden

    @contextmanager
    def _capture(self, graph: mock.MagicMock, pool: object) -> Iterator[None]:
        del pool
        yield
        assert self._last is not None
        captured = self._last
        self.captures += 1

        def replay() -> None:
            captured[2].copy_(run_layers(self._backend, *captured[:2]))

        graph.replay = replay


@pytest.mark.skipif(not INTERPRETED, reason="real graphs are what forward uses there")
def test_graphs_of_every_size_give_what_steps_without_them_give(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(replace(PLAIN, layers=PLAIN.layers[:1]))
    rule = RULES["h2o_avg"]
    both.step(SequenceStep(0, (5, 2), 0, 17, 0, rule), SequenceStep(1, (7,), 0, 3, 0), SequenceStep(2, (9,), 0, 2, 0))
    fake = FakeGraphs(both.triton, monkeypatch)
    graphs = DecodeGraphs(fake.forward, both.pool, extra_items=6, max_table=30)
    monkeypatch.setattr(both.triton, "forward", lambda _, step: graphs.run(step))
    a = replace(SequenceStep(0, (5, 2), 17, 1, 17, rule), choose_victims=True)
    b, c = SequenceStep(1, (7,), 3, 1, 3), SequenceStep(2, (9,), 2, 1, 2, rule)
    both.step(a, b, c)
    both.step(replace(b, start=4, num_slots=4))
    both.step(replace(a, start=18, num_slots=18, replace=True), replace(b, start=5, num_slots=5))
    both.step(replace(a, start=19, num_slots=18, replace=True), replace(c, start=3, num_slots=3))
    assert fake.captures == 3  # of 4 rows, of 1, and of 2
    step = both.triton.prepare(both.pool, torch.zeros(2, dtype=torch.int64), [replace(c, num_tokens=2)])
    assert not graphs.fits(step)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_bfloat16_stays_near_the_reference(kv_dtype: torch.dtype) -> None:
    spec = tiny_spec(num_heads=8, num_kv_heads=2, head_dim=64)
    weights = {name: weight * 0.3 for name, weight in random_weights(spec).items()}
    reference = reference_backend(spec, weights, dtype=torch.float32)
    triton = TritonBackend(spec, Shard.whole(spec), dtype=torch.bfloat16, device=DEVICE, kv_dtype=kv_dtype)
    triton.load(weights.items())
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_num_seqs": 4}
    reference_pool, pool = reference.allocate_pool(**sizes), triton.allocate_pool(**sizes)
    tokens = torch.arange(41) % 64
    for part, step in (
        (slice(0, 40), SequenceStep(0, A, 0, 40, 0, AVG)),
        (slice(40, 41), SequenceStep(0, A, 40, 1, 40, AVG, choose_victims=True)),
    ):
        expected = reference.forward(reference_pool, reference.prepare(reference_pool, tokens[part], [step]))
        hidden = triton.forward(pool, triton.prepare(pool, tokens[part], [step]))
        assert_near(hidden, expected, 0.1, "hidden states")
    found, expected_scores = triton.read_scores(pool, A, 41), reference.read_scores(reference_pool, A, 41)
    assert_near(found, expected_scores, 0.1, "scores")
