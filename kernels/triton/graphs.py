"""Decode steps as captured CUDA graphs, one for each padded batch size.

A step is copied into a graph's own tensors and the graph is replayed. Rows that fill the batch up have a record of
zeros: kernels see that they have no tokens and touch nothing for them, and their hidden states go nowhere. What differs
between steps of one size, lengths and victims above all, is read from device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvorum.kernels.triton import records
from kvorum.kernels.triton.pool import TritonPool
from kvorum.kernels.triton.step import TritonStep

Forward = Callable[[TritonPool, TritonStep], torch.Tensor]


def padded_size(num_seqs: int) -> int:
    """Return the batch size of the graph that a step runs in: powers of two up to 32, then multiples of 32."""
    if num_seqs <= 32:
        return 1 << (num_seqs - 1).bit_length()
    return -(-num_seqs // 32) * 32


def empty_step(num_seqs: int, *, extra_items: int, max_table: int, splits: bool, device: torch.device) -> TritonStep:
    """Return a decode step of rows that do nothing. max_table: block ids that all tables together may have."""

    def ints(*shape: int, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=device)

    extra = extra_items if splits else 0
    return TritonStep(
        token_ids=torch.zeros(num_seqs, dtype=torch.int64, device=device),
        token_seqs=torch.arange(num_seqs, dtype=torch.int32, device=device),
        seqs=ints(num_seqs, records.NUM_FIELDS.value),
        rules=torch.zeros(num_seqs, records.NUM_NUMBERS.value, dtype=torch.float64, device=device),
        tables=ints(max_table),
        decode_items=ints(num_seqs + extra, records.ITEM_FIELDS.value, fill=-1),
        splits=splits,
        query_tiles=ints(0, 2),
        key_tiles=ints(0, 2),
        query_weights=torch.empty(0, dtype=torch.float32, device=device),
        choosers=ints(num_seqs if splits else 0, fill=-1),
    )


def fill_step(target: TritonStep, source: TritonStep) -> None:
    """Copy a decode step into one with room for it; what is left over does nothing."""
    for whole, part, filler in (
        (target.token_ids, source.token_ids, 0),
        (target.seqs, source.seqs, 0),
        (target.rules, source.rules, None),
        (target.tables, source.tables, None),
        (target.decode_items, source.decode_items, -1),
        (target.choosers, source.choosers, -1),
    ):
        whole[: len(part)].copy_(part)
        if filler is not None and len(part) < len(whole):
            whole[len(part) :].fill_(filler)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    step: TritonStep
    hidden: torch.Tensor


class DecodeGraphs:
    """The graphs over one pool, captured when a size is first met."""

    def __init__(self, forward: Forward, pool: TritonPool, *, extra_items: int, max_table: int) -> None:
        self.pool = pool
        self._forward = forward
        self._extra_items = extra_items
        # The graphs of all sizes read their block tables here: they run one at a time.
        self._tables = torch.zeros(max_table, dtype=torch.int32, device=pool.kv.device)
        self._captured: dict[tuple[int, bool], _Captured] = {}

    def fits(self, step: TritonStep) -> bool:
        """Say whether a step can run as a graph."""
        return step.only_decodes and len(step.tables) <= len(self._tables)

    def run(self, step: TritonStep) -> torch.Tensor:
        """Run a decode step; returns hidden states [num_tokens, hidden_size]."""
        key = padded_size(step.num_tokens), step.splits
        if key not in self._captured:
            self._captured[key] = self._capture(*key)
        captured = self._captured[key]
        fill_step(captured.step, step)
        captured.graph.replay()
        return captured.hidden[: step.num_tokens].clone()

    def _capture(self, num_seqs: int, splits: bool) -> _Captured:
        step = empty_step(
            num_seqs, extra_items=self._extra_items, max_table=0, splits=splits, device=self.pool.kv.device
        )
        step = replace(step, tables=self._tables)
        # Compiles what was not compiled yet and warms cuBLAS up, which a capture may not do.
        side = torch.cuda.Stream(self.pool.kv.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._forward(self.pool, step)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        memory = next((captured.graph.pool() for captured in self._captured.values()), None)
        with torch.cuda.graph(graph, pool=memory):
            hidden = self._forward(self.pool, step)
        return _Captured(graph, step, hidden)
