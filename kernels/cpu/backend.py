"""The CPU back end: half-layer operations, or a whole forward pass, in one call into C++.

1. `load` packs the weights into panels (weights.py) and makes the native decoder, which points into them.
2. `prepare` turns a step into the arrays that the kernels walk: sequences, panels of slots, rotary tables.
3. `forward` computes a step in one parallel region; the half-layer operations do the same a half at a time, for when a
   reduction over ranks stands between them.

A row's result depends neither on the rows beside it, nor on the number of threads, nor on how its prompt was cut into
chunks of more than one token.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from kvorum.kernels.backend import HostBlocks, SlotView, Weight, embed_part
from kvorum.kernels.cpu import pool as pool_ops
from kvorum.kernels.cpu.library import SEQUENCE, CConfig, CLayer, CLinear, load_library
from kvorum.kernels.cpu.pool import KV_DTYPES, LANES, CpuPool, panels_of
from kvorum.kernels.cpu.weights import Format, Packer
from kvorum.kernels.plan import EvictionRule, SequenceStep, ShrinkRequest
from kvorum.kernels.reference.layers import rotary_table
from kvorum.kernels.reference.pool import NO_VICTIM
from kvorum.kernels.spec import DecoderSpec, Shard, weight_names

# native/attention.cc, MAX_GROUP.
MAX_GROUP_SIZE = 256

_NO_RULE = EvictionRule(recent_tokens=0)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CpuStep:
    """A prepared step. handle: the native step, freed with this; rotary: the tables that it points into."""

    token_ids: torch.Tensor
    handle: c_void_p
    rotary: tuple[torch.Tensor, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return len(self.token_ids)


def supports(spec: DecoderSpec, *, block_size: int) -> bool:
    """Say whether heads and blocks divide into vectors of 16, and groups are not larger than the kernels' scratch."""
    return spec.head_dim % LANES == 0 and block_size % LANES == 0 and spec.group_size <= MAX_GROUP_SIZE


@dataclass(frozen=True, slots=True)
class CpuTypes:
    """How numbers are stored and multiplied; sums are float32.

    weights: of the linears; weights that come in GGUF blocks keep theirs. kv: float32, bfloat16 or int8.
    byte_prompts: while a prompt is read, activations meet quantised weights as 8 bits instead of 16, on processors with
    AVX2 or AVX512-VNNI.
    """

    weights: Format = Format.F32
    kv: torch.dtype = torch.float32
    byte_prompts: bool = False

    def __post_init__(self) -> None:
        assert self.kv in KV_DTYPES, f"kv must be one of {KV_DTYPES}"


class CpuBackend:
    """Backend[CpuPool, CpuStep] over compiled kernels."""

    def __init__(self, spec: DecoderSpec, shard: Shard, *, types: CpuTypes, num_threads: int) -> None:
        self.spec = spec
        self.shard = shard
        self._types = types
        self._num_threads = num_threads
        self._library = load_library()
        self._packer = Packer(self._library, types.weights)
        self._ropes = tuple(dict.fromkeys(layer.rope for layer in spec.layers))
        self._decoder = c_void_p()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the linears that every step reads; an untied embedding, of which it reads a few rows, included."""
        return self._packer.panel_bytes

    @property
    def is_quantized(self) -> bool:
        """Whether the linears are multiplied as integers."""
        return self._types.weights == Format.Q8

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Pack the weights a layer at a time; every name of `weight_names` must come, layer after layer."""
        layers = (CLayer * self.spec.num_layers)()
        outer: dict[str, Weight] = {}
        pending: dict[str, Weight] = {}
        missing = set(weight_names(self.spec))
        for name, weight in weights:
            missing.remove(name)
            scope, _, leaf = name.rpartition(".")
            if not scope:
                outer[leaf] = weight
                continue
            pending[leaf] = weight
            index = int(scope.removeprefix("layers."))
            if not any(other.startswith(f"{scope}.") for other in missing):
                layers[index] = self._layer(index, pending)
                pending = {}
        assert not missing, f"weights missing: {sorted(missing)}"
        embedding = self._packer.linear([outer["embed"]])
        head = embedding if self.spec.tied_embeddings else self._packer.linear([outer["lm_head"]])
        self._create(layers, embedding, head, self._norm(outer["final_norm"]))

    def _layer(self, index: int, weights: dict[str, Weight]) -> CLayer:
        pack, spec = self._packer, self.spec.layers[index]
        plain = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
        return CLayer(
            qkv=pack.linear([weights[name] for name in "qkv"], [plain.get(f"{name}_bias") for name in "qkv"]),
            output=pack.linear([weights["o"]], [plain.get("o_bias")]),
            gate_up=pack.gated(weights["gate"], weights["up"], [plain.get("gate_bias"), plain.get("up_bias")]),
            down=pack.linear([weights["down"]], [plain.get("down_bias")]),
            **{
                name: self._norm(plain.get(name))
                for name in ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm")
            },
            rotary=self._ropes.index(spec.rope),
            window=spec.sliding_window or 0,
        )

    def _norm(self, weight: Weight | None) -> int | None:
        if weight is None:
            return None
        assert isinstance(weight, torch.Tensor), "norms are not quantised"
        return self._packer.vector(weight.float() + self.spec.norm_offset)

    def _create(self, layers: object, embedding: CLinear, head: CLinear, final_norm: int | None) -> None:
        config = CConfig(
            hidden_size=self.spec.hidden_size,
            intermediate_size=self.shard.mlp[1] - self.shard.mlp[0],
            num_heads=self.shard.num_heads,
            num_kv_heads=self.shard.num_kv_heads,
            head_dim=self.spec.head_dim,
            num_layers=self.spec.num_layers,
            gelu=self.spec.activation == "gelu_tanh",
            num_threads=self._num_threads,
            eps=self.spec.rms_norm_eps,
            attention_scale=self.spec.attention_scale,
            embedding_scale=self.spec.embedding_scale,
            byte_prompts=self._types.byte_prompts,
        )
        handle = self._library.kvorum_decoder_new(byref(config), layers, byref(embedding), byref(head), final_norm)
        self._decoder = c_void_p(handle)
        self._num_logits = head.num_outputs
        weakref.finalize(self, self._library.kvorum_decoder_delete, self._decoder)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block over all layers, scores and positions included."""
        return pool_ops.block_bytes(self.spec, self.shard, block_size=block_size, dtype=self._types.kv)

    def allocate_pool(self, *, num_blocks: int, block_size: int, max_num_seqs: int) -> CpuPool:
        """Allocate the pool."""
        return pool_ops.allocate(
            self.spec,
            self.shard,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            dtype=self._types.kv,
        )

    def prepare(self, pool: CpuPool, token_ids: torch.Tensor, sequences: Sequence[SequenceStep]) -> CpuStep:
        """Lay the step out for the kernels and cut its attention into tasks."""
        panels_per_block = pool.block_size // LANES
        rows: list[tuple[float | int, ...]] = []
        block_ids: list[int] = []
        first_token = 0
        for step in sequences:
            num_blocks = -(-step.num_slots_after // pool.block_size)
            assert num_blocks <= len(step.block_table), "block table is too short"
            assert not step.replace or step.num_tokens == 1, "victims make room for one token"
            rows.append(_sequence_row(step, first_token=first_token, first_panel=len(block_ids) * panels_per_block))
            block_ids += step.block_table[:num_blocks]
            first_token += step.num_tokens
        assert first_token == len(token_ids), "token_ids and sequences disagree"
        array = np.array(rows, SEQUENCE)
        table = panels_of(np.array(block_ids, np.int32), panels_per_block)
        positions = torch.cat([torch.arange(step.start, step.start + step.num_tokens) for step in sequences])
        rotary = tuple(
            each.contiguous() for rope in self._ropes for each in rotary_table(rope, positions, torch.float32)
        )
        handle = c_void_p(
            self._library.kvorum_step_new(
                self._decoder,
                byref(pool.struct),
                array.ctypes.data,
                len(array),
                table.ctypes.data,
                len(table),
                (c_void_p * len(rotary))(*[each.data_ptr() for each in rotary]),
                len(self._ropes),
            )
        )
        prepared = CpuStep(token_ids.to(torch.int64).contiguous(), handle, rotary)
        weakref.finalize(prepared, self._library.kvorum_step_delete, handle)
        return prepared

    def forward(self, pool: CpuPool, step: CpuStep) -> torch.Tensor:
        """Embed and run all layers in one call."""
        hidden = torch.empty(step.num_tokens, self.spec.hidden_size)
        self._library.kvorum_forward(
            self._decoder, step.handle, byref(pool.struct), step.token_ids.data_ptr(), hidden.data_ptr()
        )
        return hidden

    def embed(self, step: CpuStep) -> torch.Tensor:
        """Look the tokens up: [num_tokens, hidden_size]."""
        return embed_part(step.token_ids, self.spec, self.shard, self._look_up)

    def _look_up(self, indices: torch.Tensor) -> torch.Tensor:
        hidden = torch.empty(len(indices), self.spec.hidden_size)
        self._library.kvorum_embed(self._decoder, indices.data_ptr(), len(indices), hidden.data_ptr())
        return hidden

    def attention_block(self, hidden: torch.Tensor, layer: int, pool: CpuPool, step: CpuStep) -> torch.Tensor:
        """Norm, QKV, RoPE, write K and V, attend, update scores and victims, project."""
        partial = torch.empty_like(hidden)
        self._library.kvorum_attention(
            self._decoder, step.handle, byref(pool.struct), layer, hidden.data_ptr(), partial.data_ptr()
        )
        return partial

    def mlp_block(self, hidden: torch.Tensor, layer: int, step: CpuStep) -> torch.Tensor:
        """Norm, gate and up, activation, down."""
        assert len(hidden) == step.num_tokens, "hidden states and step disagree"
        partial = torch.empty_like(hidden)
        self._library.kvorum_mlp(self._decoder, step.handle, layer, hidden.data_ptr(), partial.data_ptr())
        return partial

    def add_residual(self, hidden: torch.Tensor, partial: torch.Tensor, layer: int, *, after_mlp: bool) -> torch.Tensor:
        """Add a reduced half-layer result, through the post-norm where the model has one."""
        total = hidden.clone()
        self._library.kvorum_add_residual(
            self._decoder, layer, after_mlp, total.data_ptr(), partial.contiguous().data_ptr(), len(total)
        )
        return total

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and output head: [num_rows, vocab] float32."""
        hidden = hidden.contiguous()
        logits = torch.empty(len(hidden), self._num_logits)
        self._library.kvorum_logits(self._decoder, hidden.data_ptr(), len(hidden), logits.data_ptr())
        return logits

    def copy_blocks(self, pool: CpuPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks with scores and positions."""
        pool_ops.copy_blocks(pool, sources, targets)

    def shrink(self, pool: CpuPool, request: ShrinkRequest) -> None:
        """Keep the best slots of each (layer, KV head) in the target blocks."""
        pool_ops.shrink(self._library, pool, request)

    def view_slots(self, pool: CpuPool, row: int, block_table: Sequence[int], num_slots: int) -> SlotView:
        """Gather positions, scores and life of a sequence's slots."""
        return pool_ops.view_slots(pool, row, block_table, num_slots)

    def read_scores(self, pool: CpuPool, block_table: Sequence[int], num_slots: int) -> torch.Tensor:
        """Return a copy of the scores of a sequence's first slots."""
        return pool_ops.gather(pool.scores, pool.panels(block_table, num_slots), num_slots)

    def write_scores(self, pool: CpuPool, block_table: Sequence[int], scores: torch.Tensor) -> None:
        """Overwrite the scores of a sequence's first slots."""
        pool_ops.scatter(pool.scores, pool.panels(block_table, scores.shape[-1]), scores)

    def export_slots(self, pool: CpuPool, block_table: Sequence[int], num_slots: int) -> HostBlocks:
        """Copy a sequence's slots out of the pool."""
        return pool_ops.export_slots(self._library, pool, block_table, num_slots)

    def import_slots(self, pool: CpuPool, block_table: Sequence[int], blocks: HostBlocks) -> None:
        """Write exported slots into the first slots of other blocks."""
        pool_ops.import_slots(self._library, pool, block_table, blocks)

    def clear_victims(self, pool: CpuPool, row: int) -> None:
        """Forget a row's pending victims."""
        pool.victims[:, row] = NO_VICTIM

    def set_victims(self, pool: CpuPool, row: int, victims: torch.Tensor) -> None:
        """Make slots a row's pending victims."""
        pool.victims[:, row] = victims


def _sequence_row(step: SequenceStep, *, first_token: int, first_panel: int) -> tuple[float | int, ...]:
    """Return a step as a row of SEQUENCE."""
    rule = step.rule or _NO_RULE
    return (
        rule.decay,
        step.row,
        step.start,
        step.num_tokens,
        step.num_slots_after,
        first_token,
        first_panel,
        step.replace,
        step.choose_victims,
        step.rule is not None,
        rule.recent_tokens,
        rule.sink_tokens,
        rule.by_age,
        rule.per_lifetime,
        rule.observe_from,
    )
