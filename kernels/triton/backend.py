"""The GPU back end: one decoder over a paged pool, cuBLAS linears, Triton for the rest.

A step goes its way without the host: `prepare` sends lengths, block tables and rules to the device in one copy, kernels
find victims and write over them there, and nothing is read back. Steps of decodes alone replay CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional

from kvorum.kernels.backend import HostBlocks, SlotView, embed_part
from kvorum.kernels.plan import SequenceStep, ShrinkRequest
from kvorum.kernels.spec import DecoderSpec, RopeSpec, Shard
from kvorum.kernels.triton import pool as pool_ops
from kvorum.kernels.triton.append import Rotation, append
from kvorum.kernels.triton.copy import copy_blocks
from kvorum.kernels.triton.decode_attention import decode_attention
from kvorum.kernels.triton.fused import gated_activation, residual_norm
from kvorum.kernels.triton.graphs import DecodeGraphs
from kvorum.kernels.triton.pool import TritonPool
from kvorum.kernels.triton.prefill_attention import prefill_attention
from kvorum.kernels.triton.ranking import choose_victims
from kvorum.kernels.triton.records import NO_VICTIM
from kvorum.kernels.triton.shrink import shrink
from kvorum.kernels.triton.step import TritonStep, build_step
from kvorum.kernels.triton.tiles import Architecture, Tiles, programs_at_once
from kvorum.kernels.triton.weights import Weights

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
# NVIDIA GPUs before this compute capability have no conversion from and to float8_e4m3fn.
FLOAT8_CAPABILITY = (8, 9)


class TritonBackend:
    """Backend[TritonPool, TritonStep] on one GPU, or on the CPU in Triton's interpreter.

    dtype: of weights and activations. kv_dtype: of K and V in the pool, dtype when None; float8_e4m3fn halves the pool
    and the bytes that decode reads, with the scale 1 (keys and values of the usual models stay far below its largest
    number, 448; what does not is cut off).
    """

    def __init__(
        self,
        spec: DecoderSpec,
        shard: Shard,
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec
        self.shard = shard
        self._dtype = dtype
        self._kv_dtype = kv_dtype or dtype
        self._device = device
        if self._kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype: {self._kv_dtype} is none of {KV_DTYPES}")
        if self._kv_dtype == torch.float8_e4m3fn and not _converts_float8(device):
            raise ValueError("kv_dtype: this GPU has no float8_e4m3fn; NVIDIA GPUs have it from compute capability 8.9")
        self._group_size = shard.num_heads // shard.num_kv_heads
        self._tiles = Tiles.choose(
            Architecture.of(device),
            num_kv_heads=shard.num_kv_heads,
            group_size=self._group_size,
            head_dim=spec.head_dim,
            kv_itemsize=self._kv_dtype.itemsize,
            programs=programs_at_once(device),
        )
        self._weights = Weights(spec, shard, dtype=dtype, device=device)
        self._rotary = {rope: rotary_table(rope, spec.max_position, device) for rope in {x.rope for x in spec.layers}}
        self._graphs: DecodeGraphs | None = None

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Pack the weights; every name of `weight_names` must come."""
        self._weights.load(weights)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block: K and V, scores and positions over all layers, and one layer's logits."""
        slots = self.shard.num_kv_heads * block_size
        per_slot = 2 * self.spec.head_dim * self._kv_dtype.itemsize + torch.float32.itemsize + torch.int32.itemsize
        return slots * (self.spec.num_layers * per_slot + self._group_size * torch.float32.itemsize)

    def allocate_pool(self, *, num_blocks: int, block_size: int, max_num_seqs: int) -> TritonPool:
        """Allocate the pool; block contents are unspecified."""
        layers, heads, device = self.spec.num_layers, self.shard.num_kv_heads, self._device
        slots = (layers, num_blocks, heads, block_size)
        kv_shape = (layers, num_blocks, 2, heads, block_size, self.spec.head_dim)
        return TritonPool(
            kv=torch.empty(kv_shape, dtype=self._kv_dtype, device=device),
            scores=torch.empty(slots, dtype=torch.float32, device=device),
            positions=torch.empty(slots, dtype=torch.int32, device=device),
            victims=torch.full((layers, max_num_seqs, heads), NO_VICTIM.value, dtype=torch.int32, device=device),
            logits=torch.empty((num_blocks, heads, self._group_size, block_size), dtype=torch.float32, device=device),
        )

    def prepare(self, pool: TritonPool, token_ids: torch.Tensor, sequences: Sequence[SequenceStep]) -> TritonStep:
        """Write the step down as the kernels read it, on the device."""
        return build_step(token_ids, sequences, block_size=pool.block_size, tiles=self._tiles, device=self._device)

    def forward(self, pool: TritonPool, step: TritonStep) -> torch.Tensor:
        """Embed and run all layers: the last hidden states [num_tokens, hidden_size]."""
        if self._device.type != "cuda" or not step.only_decodes:
            return self._run_layers(pool, step)
        if self._graphs is None or self._graphs.pool is not pool:
            self._graphs = self._new_graphs(pool)
        return self._graphs.run(step) if self._graphs.fits(step) else self._run_layers(pool, step)

    def _new_graphs(self, pool: TritonPool) -> DecodeGraphs:
        blocks_per_seq = min(-(-self.spec.max_position // pool.block_size), pool.num_blocks)
        max_table = pool.victims.shape[1] * blocks_per_seq
        return DecodeGraphs(self._run_layers, pool, extra_items=self._tiles.extra_items, max_table=max_table)

    def _run_layers(self, pool: TritonPool, step: TritonStep) -> torch.Tensor:
        """Do what `kernels.backend.run_layers` does, each residual add fused with the norm that follows it."""
        hidden, normed = self._add_and_norm(self.embed(step), None, post=None, norm="layers.0.attn_norm")
        for layer in range(self.spec.num_layers):
            partial = self._attention(normed, layer, pool, step)
            hidden, normed = self._add_and_norm(
                hidden, partial, post=f"layers.{layer}.post_attn_norm", norm=f"layers.{layer}.mlp_norm"
            )
            following = f"layers.{layer + 1}.attn_norm" if layer + 1 < self.spec.num_layers else None
            hidden, normed = self._add_and_norm(
                hidden, self._mlp(normed, layer), post=f"layers.{layer}.post_mlp_norm", norm=following
            )
        return hidden

    def embed(self, step: TritonStep) -> torch.Tensor:
        """Look the tokens up: [num_tokens, hidden_size]."""
        hidden = embed_part(
            step.token_ids,
            self.spec,
            self.shard,
            lambda indices: functional.embedding(indices, self._weights["embed"]),
        )
        return hidden * self.spec.embedding_scale if self.spec.embedding_scale != 1.0 else hidden

    def attention_block(self, hidden: torch.Tensor, layer: int, pool: TritonPool, step: TritonStep) -> torch.Tensor:
        """Norm, QKV, RoPE, write K and V, attend, update scores and victims, project; this rank's partial sum."""
        return self._attention(self._norm(hidden, f"layers.{layer}.attn_norm"), layer, pool, step)

    def mlp_block(self, hidden: torch.Tensor, layer: int, _step: TritonStep) -> torch.Tensor:
        """Norm, gate and up, activation, down; this rank's partial sum [num_tokens, hidden_size]."""
        return self._mlp(self._norm(hidden, f"layers.{layer}.mlp_norm"), layer)

    def add_residual(self, hidden: torch.Tensor, partial: torch.Tensor, layer: int, *, after_mlp: bool) -> torch.Tensor:
        """Add a reduced half-layer result to the residual stream, through the post-norm where the model has one."""
        post = f"layers.{layer}.{'post_mlp_norm' if after_mlp else 'post_attn_norm'}"
        return self._add_and_norm(hidden, partial, post=post, norm=None)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and this rank's rows of the output head: [num_rows, vocab] float32."""
        head = self._weights["embed" if self.spec.tied_embeddings else "lm_head"]
        return functional.linear(self._norm(hidden.contiguous(), "final_norm"), head).float()

    def _attention(self, normed: torch.Tensor, layer: int, pool: TritonPool, step: TritonStep) -> torch.Tensor:
        prefix = f"layers.{layer}"
        spec = self.spec.layers[layer]
        part = pool.layer(layer)
        rotation = Rotation(
            rotary=self._rotary[spec.rope],
            scale=self.spec.attention_scale,
            q_norm=self._weights.get(f"{prefix}.q_norm"),
            k_norm=self._weights.get(f"{prefix}.k_norm"),
            eps=self.spec.rms_norm_eps,
            offset=self.spec.norm_offset,
        )
        queries = append(self._project(normed, f"{prefix}.qkv"), rotation, part, step)
        attended = torch.empty_like(queries)
        window = spec.sliding_window
        prefill_attention(queries, part, step, attended, sliding_window=window, tiles=self._tiles)
        decode_attention(queries, part, step, attended, sliding_window=window, tiles=self._tiles)
        choose_victims(part, step)
        return self._project(attended.flatten(1), f"{prefix}.o")

    def _mlp(self, normed: torch.Tensor, layer: int) -> torch.Tensor:
        gate_up = self._project(normed, f"layers.{layer}.gate_up")
        return self._project(gated_activation(gate_up, self.spec.activation), f"layers.{layer}.down")

    def _add_and_norm(
        self, hidden: torch.Tensor, partial: torch.Tensor | None, *, post: str | None, norm: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return residual_norm(
            hidden,
            partial,
            None if norm is None else self._weights[norm],
            post_weight=None if post is None else self._weights.get(post),
            eps=self.spec.rms_norm_eps,
            offset=self.spec.norm_offset,
        )

    def _norm(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        return self._add_and_norm(inputs, None, post=None, norm=name)[1]

    def _project(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(inputs, self._weights[name], self._weights.get(f"{name}_bias"))

    def copy_blocks(self, pool: TritonPool, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks with scores and positions; sources and targets are disjoint."""
        copy_blocks(pool, sources, targets)

    def shrink(self, pool: TritonPool, request: ShrinkRequest) -> None:
        """Keep the best `keep` slots of each (layer, KV head), in slot order, in the target blocks."""
        shrink(pool, request)

    def view_slots(self, pool: TritonPool, row: int, block_table: Sequence[int], num_slots: int) -> SlotView:
        """Gather positions, scores and life of a sequence's slots."""
        return pool_ops.view_slots(pool, row, block_table, num_slots)

    def read_scores(self, pool: TritonPool, block_table: Sequence[int], num_slots: int) -> torch.Tensor:
        """Return a copy of the scores of a sequence's first slots."""
        return pool_ops.read_scores(pool, block_table, num_slots)

    def write_scores(self, pool: TritonPool, block_table: Sequence[int], scores: torch.Tensor) -> None:
        """Overwrite the scores of a sequence's first slots."""
        pool_ops.write_scores(pool, block_table, scores)

    def export_slots(self, pool: TritonPool, block_table: Sequence[int], num_slots: int) -> HostBlocks:
        """Copy a sequence's slots to host memory."""
        # Not every tensor operation knows float8, and bfloat16 holds each of its numbers.
        dtype = torch.bfloat16 if self._kv_dtype == torch.float8_e4m3fn else self._kv_dtype
        return pool_ops.export_slots(pool, block_table, num_slots, dtype=dtype)

    def import_slots(self, pool: TritonPool, block_table: Sequence[int], blocks: HostBlocks) -> None:
        """Write exported slots into the first slots of other blocks."""
        pool_ops.import_slots(pool, block_table, blocks)

    def clear_victims(self, pool: TritonPool, row: int) -> None:
        """Forget a row's pending victims."""
        pool_ops.clear_victims(pool, row)

    def set_victims(self, pool: TritonPool, row: int, victims: torch.Tensor) -> None:
        """Make slots a row's pending victims."""
        pool.victims[:, row] = victims


def rotary_table(rope: RopeSpec, max_position: int, device: torch.device) -> torch.Tensor:
    """Return cos and sin of every position: [max_position, 2, head_dim / 2] float32."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(max_position, dtype=torch.float32, device=device)[:, None] * inv_freq[None, :]
    return torch.stack((angles.cos(), angles.sin()), dim=1) * rope.attention_factor


def _converts_float8(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY
