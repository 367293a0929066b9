"""The one interface of every back end: half-layer operations over a paged KV pool.

A layer is two calls, `attention_block` and `mlp_block`; a tensor-parallel all-reduce of the returned partial sums
falls exactly between them, and `add_residual` closes each half. What a block looks like in memory is the back end's
business: callers know block ids, slot counts and nothing else.

A slot is one token's place in a sequence's blocks: slot s lives in block `block_table[s // block_size]` at offset
`s % block_size`. After an eviction the same slot holds different tokens in different (layer, KV head) pairs, so the
pool keeps a position and a score for each slot of each pair; all pairs use the same number of slots.

Eviction in decode: a sequence held to a budget uses budget + 1 slots. The step that fills the last one chooses, for
each (layer, KV head), a victim: the lowest-ranked slot. It stays readable until the next step overwrites it
(`replace`), so a caller may still let it live by appending instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch

from kvorum.kernels.plan import SequenceStep, ShrinkRequest
from kvorum.kernels.spec import DecoderSpec, Shard

PoolT = TypeVar("PoolT")
StepT = TypeVar("StepT")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A linear weight as blocks of 32 inputs, as a GGUF file has them.

    blocks: [out_features, bytes of a row] uint8. A block is
      Q8_0: half scale, 32 int8; value = scale * q.
      Q4_0: half scale, 16 bytes of nibbles; value = scale * (q - 8).
      Q4_1: half scale, half minimum, 16 bytes of nibbles; value = scale * q + minimum.
    Byte i of the nibbles holds inputs i (low) and i + 16.
    """

    blocks: torch.Tensor
    quantization: Literal["Q8_0", "Q4_0", "Q4_1"]

    @property
    def shape(self) -> tuple[int, int]:
        """out_features, in_features."""
        rows, row_bytes = self.blocks.shape
        return rows, row_bytes // BLOCK_BYTES[self.quantization] * 32


BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}

Weight = torch.Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True)
class SlotView:
    """One sequence's slots, gathered: [num_layers, num_kv_heads, num_slots] each.

    positions int64; scores float; alive bool: False for pending victims.
    """

    positions: torch.Tensor
    scores: torch.Tensor
    alive: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """One sequence's slots in host memory, in slot order, detached from any block id.

    keys, values: [num_layers, num_kv_heads, num_slots, head_dim]; positions, scores: [num_layers, num_kv_heads,
    num_slots].
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor

    @property
    def num_slots(self) -> int:
        """Slots held."""
        return self.positions.shape[-1]


class Backend(Protocol[PoolT, StepT]):
    """Computes one rank's part of a decoder over its own kind of pool (PoolT) and prepared step (StepT)."""

    spec: DecoderSpec
    shard: Shard

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Pack the weights that `spec.weight_names` lists, already sliced to the shard."""

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes one block takes on this rank over all layers, scores and positions included."""

    def allocate_pool(self, *, num_blocks: int, block_size: int, max_num_seqs: int) -> PoolT:
        """Allocate the pool; block contents are unspecified."""

    def prepare(self, pool: PoolT, token_ids: torch.Tensor, sequences: Sequence[SequenceStep]) -> StepT:
        """Turn a step into what the layers need. token_ids: [num_tokens] int64, sequence after sequence."""

    def forward(self, pool: PoolT, step: StepT) -> torch.Tensor:
        """Embed and run all layers of a whole model: the last hidden states [num_tokens, hidden_size], not normed."""

    def embed(self, step: StepT) -> torch.Tensor:
        """Look this rank's rows of the vocabulary up, zeros for others' tokens: [num_tokens, hidden_size]."""

    def attention_block(self, hidden: torch.Tensor, layer: int, pool: PoolT, step: StepT) -> torch.Tensor:
        """Norm, QKV, RoPE, write K and V, attend, update scores and victims, project; this rank's partial sum."""

    def mlp_block(self, hidden: torch.Tensor, layer: int, step: StepT) -> torch.Tensor:
        """Norm, gate and up, activation, down; this rank's partial sum [num_tokens, hidden_size]."""

    def add_residual(self, hidden: torch.Tensor, partial: torch.Tensor, layer: int, *, after_mlp: bool) -> torch.Tensor:
        """Add a reduced half-layer result to the residual stream, through the post-norm where the model has one."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and this rank's rows of the output head: [num_rows, vocab] float32."""

    def copy_blocks(self, pool: PoolT, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks with scores and positions; sources and targets are disjoint."""

    def shrink(self, pool: PoolT, request: ShrinkRequest) -> None:
        """Keep the best `keep` slots of each (layer, KV head), in slot order, in the target blocks."""

    def view_slots(self, pool: PoolT, row: int, block_table: Sequence[int], num_slots: int) -> SlotView:
        """Gather positions, scores and life of a sequence's slots."""

    def read_scores(self, pool: PoolT, block_table: Sequence[int], num_slots: int) -> torch.Tensor:
        """Return a copy of the scores of a sequence's first slots: [num_layers, num_kv_heads, num_slots]."""

    def write_scores(self, pool: PoolT, block_table: Sequence[int], scores: torch.Tensor) -> None:
        """Overwrite the scores of a sequence's first slots: [num_layers, num_kv_heads, num_slots]."""

    def export_slots(self, pool: PoolT, block_table: Sequence[int], num_slots: int) -> HostBlocks:
        """Copy a sequence's slots to host memory."""

    def import_slots(self, pool: PoolT, block_table: Sequence[int], blocks: HostBlocks) -> None:
        """Write exported slots into the first slots of other blocks."""

    def clear_victims(self, pool: PoolT, row: int) -> None:
        """Forget a row's pending victims, so that they live on (or so that a new sequence can take the row)."""

    def set_victims(self, pool: PoolT, row: int, victims: torch.Tensor) -> None:
        """Make slots [num_layers, num_kv_heads] int64 a row's pending victims, as a step that chooses them does."""


def run_layers(
    backend: Backend[PoolT, StepT],
    pool: PoolT,
    step: StepT,
    *,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda partial: partial,
) -> torch.Tensor:
    """Run a step half a layer at a time; returns the last hidden states [num_tokens, hidden_size].

    add_up: returns the sum of all ranks' partial results; called once for the embedding and twice for each layer.
    """
    hidden = add_up(backend.embed(step))
    for layer in range(backend.spec.num_layers):
        partial = add_up(backend.attention_block(hidden, layer, pool, step))
        hidden = backend.add_residual(hidden, partial, layer, after_mlp=False)
        partial = add_up(backend.mlp_block(hidden, layer, step))
        hidden = backend.add_residual(hidden, partial, layer, after_mlp=True)
    return hidden


def embed_part(
    token_ids: torch.Tensor, spec: DecoderSpec, shard: Shard, look_up: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Look the tokens of a shard's vocabulary up and leave zeros for the others: [num_tokens, hidden_size].

    look_up: returns a new tensor of rows for indices into the shard's vocabulary.
    """
    first, last = shard.vocab
    if last - first == spec.vocab_size:
        return look_up(token_ids)
    elsewhere = (token_ids < first) | (token_ids >= last)
    return look_up((token_ids - first).masked_fill(elsewhere, 0)).masked_fill_(elsewhere[:, None], 0.0)
