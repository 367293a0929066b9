"""Sequences that live side by side in a back end and in the reference, step by step."""

from __future__ import annotations

import random

import torch

from kvorum.kernels.plan import EvictionRule, SequenceStep, ShrinkRequest
from kvorum.kernels.spec import DecoderSpec
from kvtest.cpu import Pair, relative_error
from kvtest.models import random_weights


class Conversation:
    """Sequences of a batch that live side by side, each on its own blocks in random order."""

    def __init__(self, pair: Pair, *, seed: int, lengths: list[int], rule: EvictionRule | None) -> None:
        self.pair = pair
        self.random = random.Random(seed)
        blocks = list(range(pair.num_blocks))
        self.random.shuffle(blocks)
        share = pair.num_blocks // len(lengths)
        self.tables = [tuple(blocks[i * share : (i + 1) * share]) for i in range(len(lengths))]
        self.lengths = lengths
        self.rule = rule
        self.num_slots = [0] * len(lengths)
        self.num_tokens = [0] * len(lengths)

    def step(self, counts: list[int], *, replace_victims: bool = False, choose: bool = False) -> float:
        """Feed so many new tokens to each sequence (0: not in the batch); returns the hidden states' error."""
        steps, tokens = [], []
        for row, count in enumerate(counts):
            if count:
                steps.append(
                    SequenceStep(
                        row=row,
                        block_table=self.tables[row],
                        start=self.num_tokens[row],
                        num_tokens=count,
                        num_slots=self.num_slots[row],
                        rule=self.rule,
                        replace=replace_victims,
                        choose_victims=choose,
                    )
                )
                tokens += [self.random.randrange(self.pair.spec.vocab_size) for _ in range(count)]
                self.num_tokens[row] += count
                self.num_slots[row] = steps[-1].num_slots_after
        return relative_error(*self.pair.forward(tokens, steps))

    def shrink(self, row: int, keep: int, *, pool_width: int = 1) -> None:
        assert self.rule is not None
        request = ShrinkRequest(
            row=row,
            sources=self.tables[row],
            targets=self.tables[row][: -(-keep // self.pair.block_size)],
            num_slots=self.num_slots[row],
            keep=keep,
            newest=self.num_tokens[row] - 1,
            rule=self.rule,
            pool_width=pool_width,
        )
        self.pair.cpu.shrink(self.pair.cpu_pool, request)
        self.pair.reference.shrink(self.pair.reference_pool, request)
        self.num_slots[row] = keep

    def assert_same_slots(self, *, score_tolerance: float = 1e-3, relative: float = 1e-4) -> None:
        """The same tokens in the same slots, the same victims, scores alike."""
        for row, (table, num_slots) in enumerate(zip(self.tables, self.num_slots, strict=True)):
            ours = self.pair.cpu.view_slots(self.pair.cpu_pool, row, table, num_slots)
            theirs = self.pair.reference.view_slots(self.pair.reference_pool, row, table, num_slots)
            assert torch.equal(ours.positions, theirs.positions)
            assert torch.equal(ours.alive, theirs.alive)
            if self.rule is not None:
                torch.testing.assert_close(ours.scores.double(), theirs.scores, atol=score_tolerance, rtol=relative)


def make_pair(spec: DecoderSpec, **options: object) -> Pair:
    return Pair(spec, small_weights(spec), **options)  # type: ignore[arg-type]


def small_weights(spec: DecoderSpec, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights whose logits stay within a few units whatever the width, so that errors are not blown up by softmax."""
    weights = random_weights(spec, seed=seed)
    return {
        name: tensor * (8.0 / tensor.shape[-1]) ** 0.5 if tensor.dim() == 2 and "." in name else tensor
        for name, tensor in weights.items()
    }
