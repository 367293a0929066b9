"""One layer of a Triton pool with sequences in it, poison everywhere else, and what attention over it should give."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvorum.kernels.plan import EvictionRule, SequenceStep
from kvorum.kernels.reference.attention import attend, choose_victims, column_sums, visible
from kvorum.kernels.triton.pool import PoolLayer, TritonPool
from kvorum.kernels.triton.step import TritonStep, build_step
from kvorum.kernels.triton.tiles import Architecture, Tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Where kernels run: in Triton's interpreter, or compiled on a GPU.
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
# bfloat16 products are wrong in the interpreter.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
# Of outputs, relative to the largest: the sums of a head, rounded once or twice.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
POISON_POSITION = 10**9

RULES = {
    "h2o": EvictionRule(recent_tokens=5),
    "h2o_avg": EvictionRule(recent_tokens=3, sink_tokens=4, per_lifetime=True),
    "decay": EvictionRule(recent_tokens=2, per_lifetime=True, decay=0.95),
    "observed": EvictionRule(recent_tokens=2, per_lifetime=True, observe_from=20),
    "unobserved": EvictionRule(recent_tokens=2, observe_from=10**6),
    "sinks": EvictionRule(recent_tokens=0, sink_tokens=4, by_age=True),
    "all recent": EvictionRule(recent_tokens=2**40),
}


def poison(pool: TritonPool) -> None:
    """Fill a pool with what must never be read."""
    pool.kv.copy_(torch.full_like(pool.kv, torch.nan, dtype=torch.float32))
    pool.scores.fill_(torch.nan)
    pool.positions.fill_(POISON_POSITION)
    pool.logits.fill_(torch.nan)


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Compare by the error relative to the largest number expected."""
    assert found.shape == expected.shape, what
    wide = found.double().to(expected.device)
    assert bool(wide.isfinite().all()), f"{what}: not finite"
    error = float((wide - expected.double()).abs().max()) / max(float(expected.abs().max()), 1e-30)
    assert error <= tolerance, f"{what}: relative error {error:.1e}, allowed {tolerance:.1e}"


@dataclass(frozen=True)
class Expected:
    """What one sequence's step gives: outputs [num_tokens, num_heads, head_dim], scores [num_kv_heads, num_slots]."""

    output: torch.Tensor
    scores: torch.Tensor
    victims: torch.Tensor


class PagedLayer:
    """A layer whose K and V of a step were written already, as `append` leaves it.

    Each head has positions of its own, in no order, with gaps as after evictions.
    """

    def __init__(
        self,
        steps: Sequence[SequenceStep],
        *,
        num_kv_heads: int = 2,
        group_size: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        window: int | None = None,
        programs: int = 12,
    ) -> None:
        self.window = window
        self.group_size = group_size
        self._generator = torch.Generator().manual_seed(7)
        self._tolerance = TOLERANCE[dtype]
        num_blocks = 2 + sum(-(-step.num_slots_after // block_size) for step in steps)
        free = torch.randperm(num_blocks, generator=self._generator).tolist()
        self.steps = []
        for row, step in enumerate(steps):
            table = tuple(free.pop() for _ in range(-(-step.num_slots_after // block_size)))
            self.steps.append(_placed(step, row, table))
        slots = (1, num_blocks, num_kv_heads, block_size)
        kv_shape = (1, num_blocks, 2, num_kv_heads, block_size, head_dim)
        self.pool = TritonPool(
            kv=torch.empty(kv_shape, dtype=kv_dtype or dtype, device=DEVICE),
            scores=torch.empty(slots, dtype=torch.float32, device=DEVICE),
            positions=torch.empty(slots, dtype=torch.int32, device=DEVICE),
            victims=torch.full((1, len(steps) + 1, num_kv_heads), -1, dtype=torch.int32, device=DEVICE),
            logits=torch.empty((num_blocks, num_kv_heads, group_size, block_size), device=DEVICE),
        )
        poison(self.pool)
        self._contents = [self._fill(step) for step in self.steps]
        num_tokens = sum(step.num_tokens for step in self.steps)
        self.queries = self._draw(num_tokens, num_kv_heads * group_size, head_dim).to(DEVICE, dtype)
        self.out = torch.full_like(self.queries, torch.nan)
        self.tiles = Tiles.choose(
            Architecture.of(DEVICE),
            num_kv_heads=num_kv_heads,
            group_size=group_size,
            head_dim=head_dim,
            kv_itemsize=self.pool.kv.element_size(),
            programs=programs,
        )
        token_ids = torch.zeros(num_tokens, dtype=torch.int64)
        self.step: TritonStep = build_step(
            token_ids, self.steps, block_size=block_size, tiles=self.tiles, device=DEVICE
        )

    @property
    def layer(self) -> PoolLayer:
        """The only layer."""
        return self.pool.layer(0)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)

    def _fill(self, step: SequenceStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Write a sequence's slots; returns keys, values, positions, scores as float64 and int64, by slot."""
        heads, head_dim = self.pool.kv.shape[3], self.pool.kv.shape[5]
        size = step.num_slots_after
        older = size - step.num_tokens
        positions = torch.empty(heads, size, dtype=torch.int64)
        scores = torch.zeros(heads, size)
        for head in range(heads):
            new = torch.arange(step.start, step.start + step.num_tokens)
            kept = torch.randperm(step.start, generator=self._generator)[:older]
            mass = torch.randint(0, 9, (older,), generator=self._generator) / 4  # with ties
            place = int(torch.randint(0, size, (1,), generator=self._generator)) if step.replace else older
            positions[head] = torch.cat((kept[:place], new, kept[place:]))
            scores[head] = torch.cat((mass[:place], torch.zeros(step.num_tokens), mass[place:]))
        keys, values = (self._draw(heads, size, head_dim).to(self.pool.kv.dtype) for _ in range(2))
        blocks, offsets = self.pool.locate(step.block_table, size)
        for part, numbers in enumerate((keys, values)):
            bits = numbers.to(DEVICE).view(torch.uint8).transpose(0, 1)  # not every device indexes float8
            self.pool.kv.view(torch.uint8)[0, blocks, part, :, offsets] = bits
        self.pool.positions[0, blocks, :, offsets] = positions.t().to(DEVICE, torch.int32)
        self.pool.scores[0, blocks, :, offsets] = scores.t().to(DEVICE)
        return keys.double(), values.double(), positions, scores.double()

    def expected(self, index: int) -> Expected:
        """Work out a sequence's step in float64."""
        step = self.steps[index]
        keys, values, positions, scores = self._contents[index]
        first = sum(other.num_tokens for other in self.steps[:index])
        queries = self.queries[first : first + step.num_tokens].double().cpu()
        grouped = queries.unflatten(1, (len(keys), self.group_size)).permute(1, 2, 0, 3)
        query_positions = torch.arange(step.start, step.start + step.num_tokens)
        seen = visible(positions, query_positions, self.window)
        output, lse, _ = attend(grouped, keys, values, seen)
        newest = step.start + step.num_tokens - 1
        if step.rule is None:
            return Expected(output.permute(2, 0, 1, 3).flatten(1, 2), scores, torch.full((len(keys),), -1))
        age = (newest - query_positions).double()
        weights = torch.where(query_positions >= step.rule.observe_from, step.rule.decay**age, 0.0)
        received = column_sums(grouped, keys, lse, seen, weights)
        scores = scores * step.rule.decay**step.num_tokens + received
        victims = choose_victims(step.rule, scores, positions, newest=newest)
        return Expected(output.permute(2, 0, 1, 3).flatten(1, 2), scores, victims)

    def check(self, *, tolerance: float | None = None) -> None:
        """Compare everything with what was expected, and see that nothing else was written."""
        tolerance = tolerance or self._tolerance
        first = 0
        blocks_used = set()
        for index, step in enumerate(self.steps):
            expected = self.expected(index)
            output = self.out[first : first + step.num_tokens]
            first += step.num_tokens
            assert_near(output, expected.output, tolerance, f"output of sequence {index}")
            blocks, offsets = self.pool.locate(step.block_table, step.num_slots_after)
            scores = self.pool.scores[0, blocks, :, offsets].t()
            assert_near(scores, expected.scores, tolerance, f"scores of sequence {index}")
            victims = self.pool.victims[0, step.row].cpu().long()
            chosen = expected.victims if step.choose_victims else torch.full_like(victims, -1)
            assert torch.equal(victims, chosen), f"victims of sequence {index}: {victims} instead of {chosen}"
            if step.rule is None:  # its blocks may be shared with a sequence that keeps logits there
                assert bool(self.pool.logits[list(step.block_table)].isnan().all()), f"logits of sequence {index}"
            blocks_used |= set(step.block_table)
            behind = step.num_slots_after % self.pool.block_size
            if behind:
                assert bool(self.pool.scores[0, step.block_table[-1], :, behind:].isnan().all())
        others = [block for block in range(self.pool.num_blocks) if block not in blocks_used]
        assert bool(self.pool.scores[0, others].isnan().all()), "a block that belongs to nobody was written"


def _placed(step: SequenceStep, row: int, table: tuple[int, ...]) -> SequenceStep:
    return SequenceStep(
        row, table, step.start, step.num_tokens, step.num_slots, step.rule, step.replace, step.choose_victims
    )


def chunk(
    prefix: int, num_tokens: int, rule: EvictionRule | None = None, *, gap: int = 0, choose: bool = False
) -> SequenceStep:
    """A step of num_tokens behind a prefix of so many slots, `gap` tokens having been evicted."""
    return SequenceStep(0, (), prefix + gap, num_tokens, prefix, rule, choose_victims=choose)


def decode(
    num_slots: int, rule: EvictionRule | None = None, *, gap: int = 9, replace: bool = False, choose: bool = False
) -> SequenceStep:
    """A step of one token after which the sequence has num_slots slots."""
    before = num_slots if replace else num_slots - 1
    return SequenceStep(0, (), num_slots - 1 + gap, 1, before, rule, replace, choose)
