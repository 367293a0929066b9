"""A Hugging Face `config.json` as a DecoderSpec.

A family is a row of `_FAMILIES`: what transformers assumes where the file is silent, and the function that builds the
spec. Whatever a file asks for and no back end computes is refused here, by name, before a byte of weights is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvorum.kernels.spec import Activation, DecoderSpec, LayerSpec
from kvorum.workers.checkpoint.fields import Fields
from kvorum.workers.checkpoint.rope import rope_from_parameters

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SHARED_DEFAULTS: Mapping[str, object] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
_QWEN_DEFAULTS: Mapping[str, object] = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# The published multimodal Gemma 3 checkpoints leave most of their text model's shape to these.
_GEMMA3_DEFAULTS: Mapping[str, object] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


@dataclass(frozen=True, slots=True)
class _Family:
    defaults: Mapping[str, object]
    build: Callable[[Fields], DecoderSpec]


def decoder_spec(config: Fields) -> DecoderSpec:
    """Return what the model of this config.json computes."""
    if config.has("quantization_config"):
        raise config.error("quantization_config", "is not supported; use the unquantised weights or a GGUF file")
    names = config.texts("architectures")
    family = _FAMILIES.get(names[0]) if len(names) == 1 else None
    if family is None:
        raise config.error("architectures", f"is not supported; supported are {', '.join(_FAMILIES)}")
    return family.build(text_config(config).over({**_SHARED_DEFAULTS, **family.defaults}))


def text_config(config: Fields) -> Fields:
    """Return the language model's fields: those that text_config gives, if there is one, before the file's own."""
    if not config.has("text_config"):
        return config
    text = config.section("text_config")
    given = {name: value for name, value in text.values.items() if value is not None}
    return Fields(text.source, {**config.values, **given})


def _llama(config: Fields) -> DecoderSpec:
    bias = config.flag("attention_bias")
    spec = _plain_spec(config, (_FULL,) * config.size("num_hidden_layers"))
    return replace(spec, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))


def _mistral(config: Fields) -> DecoderSpec:
    if config.has("layer_types"):
        raise config.error("layer_types", "is not supported for MistralForCausalLM")
    kind = _SLIDING if config.has("sliding_window") else _FULL
    return _plain_spec(config, (kind,) * config.size("num_hidden_layers"))


def _qwen2(config: Fields) -> DecoderSpec:
    return replace(_plain_spec(config, _qwen_layer_kinds(config)), qkv_bias=True)


def _qwen3(config: Fields) -> DecoderSpec:
    bias = config.flag("attention_bias")
    return replace(_plain_spec(config, _qwen_layer_kinds(config)), qk_norm=True, qkv_bias=bias, output_bias=bias)


def _gemma3(config: Fields) -> DecoderSpec:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.has(name):
            raise config.error(name, "is not supported")
    if config.has("use_bidirectional_attention") and config.flag("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "is not supported")
    bias = config.flag("attention_bias")
    return replace(
        _plain_spec(config, _gemma3_layer_kinds(config)),
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        norm_offset=1.0,
        embedding_scale=_gemma3_embedding_scale(config),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        sandwich_norms=True,
    )


_GEMMA3 = _Family(_GEMMA3_DEFAULTS, _gemma3)
_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family({}, _llama),
    "MistralForCausalLM": _Family({"num_key_value_heads": 8, "sliding_window": 4096}, _mistral),
    "Qwen2ForCausalLM": _Family(_QWEN_DEFAULTS, _qwen2),
    "Qwen3ForCausalLM": _Family({**_QWEN_DEFAULTS, "head_dim": 128}, _qwen3),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
}


def _plain_spec(config: Fields, layer_kinds: tuple[str, ...]) -> DecoderSpec:
    """Return what all families share, with no variant switched on."""
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads != 0:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads, {num_heads}")
    head_dim = _head_dim(config, num_heads)
    max_position = config.size("max_position_embeddings")
    by_kind = {kind: _layer(config, kind, head_dim, max_position) for kind in set(layer_kinds)}
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        intermediate_size=config.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=tuple(by_kind[kind] for kind in layer_kinds),
        max_position=max_position,
        rms_norm_eps=config.number("rms_norm_eps"),
        activation=_activation(config),
        attention_scale=head_dim**-0.5,
        tied_embeddings=config.flag("tie_word_embeddings"),
    )


def _head_dim(config: Fields, num_heads: int) -> int:
    if not config.has("head_dim") and config.size("hidden_size") % num_heads != 0:
        raise config.error("hidden_size", f"must be a multiple of num_attention_heads, {num_heads}")
    head_dim = config.size("head_dim", config.size("hidden_size") // num_heads)
    if head_dim % 2 != 0:
        raise config.error("head_dim", f"gives heads of {head_dim} numbers, but rotation needs an even number")
    return head_dim


def _activation(config: Fields) -> Activation:
    name = "hidden_activation" if config.has("hidden_activation") else "hidden_act"
    activation = _ACTIVATIONS.get(config.text(name))
    if activation is None:
        raise config.error(name, f"is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return activation


def _layer(config: Fields, kind: str, head_dim: int, max_position: int) -> LayerSpec:
    if kind not in (_FULL, _SLIDING):
        raise config.error("layer_types", f"has an unknown kind of layer, {kind!r}")
    rope = rope_from_parameters(_rope_fields(config, kind), head_dim=head_dim, max_position=max_position)
    return LayerSpec(rope=rope, sliding_window=config.size("sliding_window") if kind == _SLIDING else None)


def _rope_fields(config: Fields, kind: str) -> Fields:
    """Return the rotary parameters of one kind of layer, from either spelling.

    transformers 5 writes `rope_parameters`, flat or with one entry a kind. Before, there were `rope_theta` and
    `rope_scaling`, and for Gemma 3's sliding layers `rope_local_base_freq`, which no scaling applied to.
    """
    parameters = config.section("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    has_own_theta = kind == _SLIDING and config.has("rope_local_base_freq")
    if parameters.has(kind):
        parameters = parameters.section(kind)
    elif has_own_theta:
        parameters = Fields(config.source, {})
    shared = ("partial_rotary_factor", "original_max_position_embeddings")
    outside = {name: config.values[name] for name in shared if config.has(name)}
    theta = config.number("rope_local_base_freq" if has_own_theta else "rope_theta")
    return parameters.over({**outside, "rope_theta": theta})


def _qwen_layer_kinds(config: Fields) -> tuple[str, ...]:
    num_layers = config.size("num_hidden_layers")
    has_window = config.flag("use_sliding_window") and config.has("sliding_window")
    if config.has("layer_types"):
        kinds = _listed_layer_kinds(config, num_layers)
        if _SLIDING in kinds and not has_window:
            raise config.error("layer_types", "has sliding layers, but use_sliding_window is off")
        return kinds
    num_full = config.integer("max_window_layers") if has_window else num_layers
    return tuple(_FULL if index < num_full else _SLIDING for index in range(num_layers))


def _gemma3_layer_kinds(config: Fields) -> tuple[str, ...]:
    num_layers = config.size("num_hidden_layers")
    if config.has("layer_types"):
        return _listed_layer_kinds(config, num_layers)
    period = config.size("sliding_window_pattern")
    return tuple(_SLIDING if (index + 1) % period else _FULL for index in range(num_layers))


def _listed_layer_kinds(config: Fields, num_layers: int) -> tuple[str, ...]:
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers:
        raise config.error("layer_types", f"must have one entry for each of the {num_layers} layers")
    return kinds


def _gemma3_embedding_scale(config: Fields) -> float:
    """Return sqrt(hidden_size), rounded to the dtype of the checkpoint as transformers does when it loads it so."""
    scale = np.sqrt(np.float32(config.size("hidden_size")))
    name = "dtype" if config.has("dtype") else "torch_dtype"
    match config.text(name, "float32"):
        case "float32":
            return float(scale)
        case "float16":
            return float(scale.astype(np.float16))
        case "bfloat16":
            return _round_to_bfloat16(scale)
    raise config.error(name, "is not supported; supported are float32, float16, bfloat16")


def _round_to_bfloat16(value: np.float32) -> float:
    bits = int(value.view(np.uint32))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(np.uint32(rounded).view(np.float32))
