"""What a decoder computes, as plain data: the one description that every back end follows.

One config-driven decoder covers the Llama family and its neighbours; a family is a set of values here, never
a class. This module imports no torch, so that planning tools can use it on machines without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of one layer kind (rotate-half layout, as in Hugging Face checkpoints).

    `inv_freq` holds head_dim / 2 frequencies in radians per position, scaling (linear, llama3) already applied, and
    `attention_factor` multiplies cos and sin (1.0 except for yarn).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ between layers: the rotary table and, for local layers, the attention window in tokens.

    A query at position p sees the keys at positions > p - sliding_window.
    """

    rope: RopeSpec
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and variant of a pre-norm decoder with gated MLP.

    num_heads, num_kv_heads: whole model, whatever a rank holds. MHA: equal; MQA: num_kv_heads == 1; else GQA.
    norm_offset: RMSNorm multiplies by (norm_offset + weight); 1.0 in Gemma, else 0.0.
    attention_scale: what q.k is multiplied by before the softmax.
    sandwich_norms: norms after attention and after the MLP too, before the residual is added (Gemma 3).
    embedding_scale: what embeddings are multiplied by (Gemma: sqrt(hidden_size) rounded to the weights' dtype).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    rms_norm_eps: float
    activation: Activation = "silu"
    attention_scale: float = 1.0
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sandwich_norms: bool = False
    tied_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V of one token over all layers and KV heads, at element_bytes a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds: half-open ranges of heads, MLP columns and vocabulary rows.

    The unit is the GQA group: a rank holds whole groups, except that a group may be replicated on several ranks, which
    then split its query heads. replicas: the ranks that hold the same KV heads, this one included. `sharding.py` deals
    the parts out.
    """

    q_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    mlp: tuple[int, int]
    vocab: tuple[int, int]
    rank: int = 0
    replicas: tuple[int, ...] = (0,)

    @classmethod
    def whole(cls, spec: DecoderSpec) -> Shard:
        """Return the only shard of a model on one rank."""
        return cls(
            q_heads=(0, spec.num_heads),
            kv_heads=(0, spec.num_kv_heads),
            mlp=(0, spec.intermediate_size),
            vocab=(0, spec.vocab_size),
        )

    @property
    def num_heads(self) -> int:
        """Query heads on this rank."""
        return self.q_heads[1] - self.q_heads[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank."""
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def adds_biases(self) -> bool:
        """Say whether this rank adds the biases of the projections whose outputs are summed over ranks."""
        return self.rank == 0


# Names of the weights as back ends take them. Linear weights are [out_features, in_features], as in torch.
#   embed [vocab, hidden]; lm_head [vocab, hidden], absent when tied; final_norm [hidden]
#   layers.{i}.attn_norm [hidden]; q [num_heads*head_dim, hidden]; k, v [num_kv_heads*head_dim, hidden];
#   o [hidden, num_heads*head_dim]; q_bias, k_bias, v_bias, o_bias; q_norm, k_norm [head_dim]; post_attn_norm [hidden];
#   mlp_norm [hidden]; gate, up [intermediate, hidden]; down [hidden, intermediate]; gate_bias, up_bias, down_bias;
#   post_mlp_norm [hidden]
def weight_names(spec: DecoderSpec) -> list[str]:
    """List every weight that a model of this spec has, in load order."""
    per_layer = ["attn_norm", "q", "k", "v", "o"]
    per_layer += ["q_bias", "k_bias", "v_bias"] if spec.qkv_bias else []
    per_layer += ["o_bias"] if spec.output_bias else []
    per_layer += ["q_norm", "k_norm"] if spec.qk_norm else []
    per_layer += ["post_attn_norm"] if spec.sandwich_norms else []
    per_layer += ["mlp_norm", "gate", "up", "down"]
    per_layer += ["gate_bias", "up_bias", "down_bias"] if spec.mlp_bias else []
    per_layer += ["post_mlp_norm"] if spec.sandwich_norms else []
    names = ["embed"]
    names += [f"layers.{i}.{name}" for i in range(spec.num_layers) for name in per_layer]
    names += ["final_norm"] + ([] if spec.tied_embeddings else ["lm_head"])
    return names
