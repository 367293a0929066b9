"""Tiny random decoders."""

from __future__ import annotations

import torch

from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.spec import DecoderSpec, LayerSpec, RopeSpec, Shard, weight_names


def tiny_spec(
    *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 8, num_layers: int = 2, window: int | None = None
) -> DecoderSpec:
    """Return a Llama-like spec; odd layers have the sliding window, if any."""
    rope = RopeSpec(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)))
    return DecoderSpec(
        vocab_size=64,
        hidden_size=num_heads * head_dim,
        intermediate_size=48,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerSpec(rope, window if layer % 2 else None) for layer in range(num_layers)),
        max_position=512,
        rms_norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
        tied_embeddings=True,
    )


def random_weights(spec: DecoderSpec, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return float64 weights, large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (spec.vocab_size, spec.hidden_size),
        "q": (heads, spec.hidden_size),
        "k": (kv_heads, spec.hidden_size),
        "v": (kv_heads, spec.hidden_size),
        "o": (spec.hidden_size, heads),
        "gate": (spec.intermediate_size, spec.hidden_size),
        "up": (spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "lm_head": (spec.vocab_size, spec.hidden_size),
        "q_bias": (heads,),
        "k_bias": (kv_heads,),
        "v_bias": (kv_heads,),
        "gate_bias": (spec.intermediate_size,),
        "up_bias": (spec.intermediate_size,),
        "q_norm": (spec.head_dim,),
        "k_norm": (spec.head_dim,),
    }
    return {
        name: torch.randn(
            shapes.get(name.rsplit(".", 1)[-1], (spec.hidden_size,)), generator=generator, dtype=torch.float64
        )
        * (0.4 if "." in name else 1.0)
        for name in weight_names(spec)
    }


def reference_backend(
    spec: DecoderSpec, weights: dict[str, torch.Tensor], *, dtype: torch.dtype = torch.float64
) -> ReferenceBackend:
    """Return a loaded reference back end."""
    backend = ReferenceBackend(spec, Shard.whole(spec), dtype=dtype, device=torch.device("cpu"))
    backend.load(weights.items())
    return backend
