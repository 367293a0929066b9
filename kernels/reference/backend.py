"""The reference back end: one decoder in plain torch, a sequence at a time.

Every sequence is attended on its own, in tiles of queries that start at multiples of QUERY_TILE positions, so that a
token's hidden state depends neither on its neighbours in the batch nor on how the prompt was cut into chunks (as long
as chunks end at multiples of QUERY_TILE).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvorum.kernels.backend import HostBlocks, SlotView, embed_part, run_layers
from kvorum.kernels.plan import SequenceStep, ShrinkRequest
from kvorum.kernels.reference import pool as pool_ops
from kvorum.kernels.reference.attention import attend, choose_victims, column_sums, visible
from kvorum.kernels.reference.layers import activate, linear, rms_norm, rotary_table, rotate, wide_dtype
from kvorum.kernels.reference.pool import NO_VICTIM, ReferencePool
from kvorum.kernels.spec import DecoderSpec, RopeSpec, Shard, weight_names

QUERY_TILE = 16


@dataclass(frozen=True, slots=True)
class PreparedSequence:
    """A SequenceStep with its addresses worked out.

    rows: the sequence's tokens in the batch. table: [num_blocks] block ids. num_slots: slots in use after the step.
    positions: [num_tokens] int64. weights: [num_tokens], what each query counts for in the scores.
    """

    step: SequenceStep
    rows: slice
    table: torch.Tensor
    num_slots: int
    positions: torch.Tensor
    weights: torch.Tensor

    @property
    def newest(self) -> int:
        """Position of the last token."""
        return self.step.start + self.step.num_tokens - 1


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """A whole step. rotary: cos and sin [num_tokens, head_dim] of each kind of rotary table in the model."""

    token_ids: torch.Tensor
    sequences: tuple[PreparedSequence, ...]
    rotary: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]


class ReferenceBackend:
    """Backend[ReferencePool, ReferenceStep] in the dtype of the weights."""

    def __init__(self, spec: DecoderSpec, shard: Shard, *, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.shard = shard
        self._dtype = dtype
        self._device = device
        self._weights: dict[str, torch.Tensor] = {}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the weights; every name of `weight_names` must come."""
        self._weights = {name: tensor.to(self._device, self._dtype) for name, tensor in weights}
        missing = set(weight_names(self.spec)) - self._weights.keys()
        assert not missing, f"weights missing: {sorted(missing)}"

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block: K and V, scores and positions, over all layers."""
        slots = self.spec.num_layers * self.shard.num_kv_heads * block_size
        score_bytes = wide_dtype(self._dtype).itemsize
        return slots * (2 * self.spec.head_dim * self._dtype.itemsize + score_bytes + torch.int64.itemsize)

    def allocate_pool(self, *, num_blocks: int, block_size: int, max_num_seqs: int) -> ReferencePool:
        """Allocate the pool; its contents are unspecified."""
        layers, heads, device = self.spec.num_layers, self.shard.num_kv_heads, self._device
        slots = (layers, num_blocks, heads, block_size)
        kv_shape = (layers, num_blocks, 2, heads, block_size, self.spec.head_dim)
        return ReferencePool(
            kv=torch.empty(kv_shape, dtype=self._dtype, device=device),
            scores=torch.empty(slots, dtype=wide_dtype(self._dtype), device=device),
            positions=torch.empty(slots, dtype=torch.int64, device=device),
            victims=torch.full((layers, max_num_seqs, heads), NO_VICTIM, dtype=torch.int64, device=device),
        )

    def prepare(self, pool: ReferencePool, token_ids: torch.Tensor, sequences: Sequence[SequenceStep]) -> ReferenceStep:
        """Work out addresses, query weights and rotary tables."""
        prepared, first_row = [], 0
        for step in sequences:
            num_slots = step.num_slots_after
            table = step.block_table[: -(-num_slots // pool.block_size)]
            assert num_slots <= len(table) * pool.block_size, "block table is too short"
            positions = torch.arange(step.start, step.start + step.num_tokens, device=self._device)
            prepared.append(
                PreparedSequence(
                    step=step,
                    rows=slice(first_row, first_row + step.num_tokens),
                    table=torch.tensor(table, dtype=torch.int64, device=self._device),
                    num_slots=num_slots,
                    positions=positions,
                    weights=self._query_weights(step, positions),
                )
            )
            first_row += step.num_tokens
        assert first_row == len(token_ids), "token_ids and sequences disagree"
        positions = torch.cat([sequence.positions for sequence in prepared])
        ropes = {layer.rope for layer in self.spec.layers}
        rotary = {rope: rotary_table(rope, positions, self._dtype) for rope in ropes}
        return ReferenceStep(token_ids=token_ids.to(self._device), sequences=tuple(prepared), rotary=rotary)

    def _query_weights(self, step: SequenceStep, positions: torch.Tensor) -> torch.Tensor:
        wide = wide_dtype(self._dtype)
        if step.rule is None:
            return torch.ones(step.num_tokens, dtype=wide, device=self._device)
        age = step.start + step.num_tokens - 1 - positions
        return torch.where(positions >= step.rule.observe_from, step.rule.decay ** age.to(wide), 0.0)

    def forward(self, pool: ReferencePool, step: ReferenceStep) -> torch.Tensor:
        """Embed and run all layers."""
        return run_layers(self, pool, step)

    def embed(self, step: ReferenceStep) -> torch.Tensor:
        """Look the tokens up: [num_tokens, hidden_size]."""
        hidden = embed_part(step.token_ids, self.spec, self.shard, lambda indices: self._weights["embed"][indices])
        return hidden * self.spec.embedding_scale if self.spec.embedding_scale != 1.0 else hidden

    def attention_block(
        self, hidden: torch.Tensor, layer: int, pool: ReferencePool, step: ReferenceStep
    ) -> torch.Tensor:
        """Norm, QKV, RoPE, write, attend, update scores and victims, project."""
        normed = self._norm(hidden, f"layers.{layer}.attn_norm")
        queries = self._project(normed, layer, "q").view(len(hidden), -1, self.spec.head_dim)
        keys = self._project(normed, layer, "k").view(len(hidden), -1, self.spec.head_dim)
        values = self._project(normed, layer, "v").view(len(hidden), -1, self.spec.head_dim)
        if self.spec.qk_norm:
            queries = self._norm(queries, f"layers.{layer}.q_norm")
            keys = self._norm(keys, f"layers.{layer}.k_norm")
        cos, sin = step.rotary[self.spec.layers[layer].rope]
        queries = rotate(queries, cos, sin) * self.spec.attention_scale
        keys = rotate(keys, cos, sin)
        outputs = [
            self._attend_sequence(
                queries[sequence.rows], keys[sequence.rows], values[sequence.rows], layer, pool, sequence
            )
            for sequence in step.sequences
        ]
        return self._project(torch.cat(outputs).flatten(1), layer, "o")

    def _attend_sequence(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: int,
        pool: ReferencePool,
        sequence: PreparedSequence,
    ) -> torch.Tensor:
        """Write K and V [num_tokens, num_kv_heads, head_dim], attend; returns [num_tokens, num_heads, head_dim]."""
        step = sequence.step
        self._write(keys, values, layer, pool, sequence)
        gathered = pool.kv[layer].index_select(0, sequence.table).permute(1, 2, 0, 3, 4).flatten(2, 3)
        # [num_kv_heads, num_slots, head_dim] each, and their positions [num_kv_heads, num_slots]
        all_keys, all_values = gathered[:, :, : sequence.num_slots].unbind(0)
        positions = _gather(pool.positions[layer], sequence)
        grouped = queries.view(len(queries), self.shard.num_kv_heads, -1, self.spec.head_dim).permute(1, 2, 0, 3)
        window = self.spec.layers[layer].sliding_window

        outputs, lses = [], []
        for first, last in query_tiles(step.start, step.num_tokens):
            # Slots of later tokens are cut off, so that a tile computes the same whatever follows it in the chunk.
            num_slots = step.num_slots + (0 if step.replace else last)
            seen = visible(positions[:, :num_slots], sequence.positions[first:last], window)
            output, lse, probabilities = attend(
                grouped[:, :, first:last], all_keys[:, :num_slots], all_values[:, :num_slots], seen
            )
            outputs.append(output)
            lses.append(lse)

        if step.rule is not None:
            if step.num_tokens == 1:
                received = (probabilities * sequence.weights[:, None]).sum(dim=(1, 2))
            else:
                seen = visible(positions, sequence.positions, window)
                received = column_sums(grouped, all_keys, torch.cat(lses, dim=-1), seen, sequence.weights)
            self._update_scores(received, layer, pool, sequence)
        return torch.cat(outputs, dim=2).permute(2, 0, 1, 3).flatten(1, 2)

    def _write(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, pool: ReferencePool, sequence: PreparedSequence
    ) -> None:
        step = sequence.step
        heads = torch.arange(self.shard.num_kv_heads, device=self._device)
        if step.replace:
            assert step.num_tokens == 1, "victims make room for one token"
            slots = pool.victims[layer, step.row][None]
        else:
            slots = torch.arange(step.num_slots, sequence.num_slots, device=self._device)[:, None]
        blocks, offsets = sequence.table[slots // pool.block_size], slots % pool.block_size
        if step.replace:
            pool.victims[layer, step.row] = NO_VICTIM
        pool.kv[layer, blocks, :, heads, offsets] = torch.stack((keys, values), dim=2)
        pool.positions[layer, blocks, heads, offsets] = sequence.positions[:, None]
        pool.scores[layer, blocks, heads, offsets] = 0.0

    def _update_scores(
        self, received: torch.Tensor, layer: int, pool: ReferencePool, sequence: PreparedSequence
    ) -> None:
        """Add the mass received [num_kv_heads, num_slots], then choose victims where the step asks for them."""
        step = sequence.step
        assert step.rule is not None
        scores = _gather(pool.scores[layer], sequence) * step.rule.decay**step.num_tokens + received
        _scatter(pool.scores[layer], sequence, scores)
        if step.choose_victims:
            positions = _gather(pool.positions[layer], sequence)
            pool.victims[layer, step.row] = choose_victims(step.rule, scores, positions, newest=sequence.newest)

    def mlp_block(self, hidden: torch.Tensor, layer: int, _step: ReferenceStep) -> torch.Tensor:
        """Norm, gate and up, activation, down."""
        normed = self._norm(hidden, f"layers.{layer}.mlp_norm")
        gate = activate(self._project(normed, layer, "gate"), self.spec.activation)
        return self._project(gate * self._project(normed, layer, "up"), layer, "down")

    def add_residual(self, hidden: torch.Tensor, partial: torch.Tensor, layer: int, *, after_mlp: bool) -> torch.Tensor:
        """Add a reduced half-layer result, through the post-norm where the model has one."""
        if self.spec.sandwich_norms:
            partial = self._norm(partial, f"layers.{layer}.{'post_mlp_norm' if after_mlp else 'post_attn_norm'}")
        return hidden + partial

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: [num_rows, vocab] in float32 or wider."""
        head = self._weights["embed" if self.spec.tied_embeddings else "lm_head"]
        logits = linear(self._norm(hidden, "final_norm"), head)
        return logits.to(wide_dtype(self._dtype))

    def copy_blocks(self, pool: ReferencePool, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks with scores and positions."""
        pool_ops.copy_blocks(pool, sources, targets)

    def shrink(self, pool: ReferencePool, request: ShrinkRequest) -> None:
        """Keep the best slots of each (layer, KV head) in the target blocks."""
        pool_ops.shrink(pool, request)

    def view_slots(self, pool: ReferencePool, row: int, block_table: Sequence[int], num_slots: int) -> SlotView:
        """Gather positions, scores and life of a sequence's slots."""
        return pool_ops.view_slots(pool, row, block_table, num_slots)

    def read_scores(self, pool: ReferencePool, block_table: Sequence[int], num_slots: int) -> torch.Tensor:
        """Return a copy of the scores of a sequence's first slots."""
        return pool_ops.read_scores(pool, block_table, num_slots)

    def write_scores(self, pool: ReferencePool, block_table: Sequence[int], scores: torch.Tensor) -> None:
        """Overwrite the scores of a sequence's first slots."""
        pool_ops.write_scores(pool, block_table, scores)

    def export_slots(self, pool: ReferencePool, block_table: Sequence[int], num_slots: int) -> HostBlocks:
        """Copy a sequence's slots to host memory."""
        slots = pool_ops.export_slots(pool, block_table, num_slots)
        return HostBlocks(slots.keys.cpu(), slots.values.cpu(), slots.positions.cpu(), slots.scores.cpu())

    def import_slots(self, pool: ReferencePool, block_table: Sequence[int], blocks: HostBlocks) -> None:
        """Write exported slots into the first slots of other blocks."""
        pool_ops.import_slots(pool, block_table, blocks)

    def clear_victims(self, pool: ReferencePool, row: int) -> None:
        """Forget a row's pending victims."""
        pool.victims[:, row] = NO_VICTIM

    def set_victims(self, pool: ReferencePool, row: int, victims: torch.Tensor) -> None:
        """Make slots a row's pending victims."""
        pool.victims[:, row] = victims

    def _norm(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(inputs, self._weights[name], eps=self.spec.rms_norm_eps, offset=self.spec.norm_offset)

    def _project(self, inputs: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        prefix = f"layers.{layer}.{name}"
        return linear(inputs, self._weights[prefix], self._weights.get(f"{prefix}_bias"))


def _gather(blocks: torch.Tensor, sequence: PreparedSequence) -> torch.Tensor:
    """Return a sequence's slots [num_kv_heads, num_slots] of one layer's [num_blocks, num_kv_heads, block_size]."""
    return blocks.index_select(0, sequence.table).transpose(0, 1).flatten(1)[:, : sequence.num_slots]


def _scatter(blocks: torch.Tensor, sequence: PreparedSequence, slots: torch.Tensor) -> None:
    """Write slots [num_kv_heads, num_slots] back; what lies behind them in the last block is set to zero."""
    padding = len(sequence.table) * blocks.shape[-1] - sequence.num_slots
    padded = torch.nn.functional.pad(slots, (0, padding))
    blocks[sequence.table] = padded.view(blocks.shape[1], -1, blocks.shape[-1]).transpose(0, 1)


def query_tiles(start: int, num_tokens: int) -> list[tuple[int, int]]:
    """Cut queries at positions start .. start + num_tokens - 1 at multiples of QUERY_TILE, as index ranges."""
    cuts = range(QUERY_TILE - start % QUERY_TILE, num_tokens, QUERY_TILE)
    edges = [0, *cuts, num_tokens]
    return list(pairwise(edges))
