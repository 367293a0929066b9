"""Tiny random models on disk, in every family and format, made with the libraries that define them.

Every parameter is drawn at random, norms and biases too: a loader that forgets one cannot pass by luck.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
# num_heads, num_kv_heads.
ATTENTIONS: Mapping[str, tuple[int, int]] = {"mha": (4, 4), "gqa": (6, 3), "mqa": (4, 1)}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CLASSES: Mapping[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
    "gemma3": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
    },
}
# What a GGUF file cannot say, or llama.cpp does not compute.
_GGUF_CHANGES: Mapping[str, Mapping[str, object]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma3": {"query_pre_attn_scalar": 16},
}
_GGUF_LEAVES: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_GEMMA3_LEAVES: Mapping[str, str] = {
    **_GGUF_LEAVES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tiny_model(family: str, *, num_heads: int, num_kv_heads: int, **changes: object) -> PreTrainedModel:
    """Make a random model of three layers in float32, the same one each time; changes go to its transformers config."""
    return _tiny_model(family, num_heads, num_kv_heads, changes)


def tiny_checkpoint(
    family: str, folder: Path, *, num_heads: int, num_kv_heads: int, max_shard_size: str = "1GB", **changes: object
) -> PreTrainedModel:
    """Save a tiny_model in Hugging Face's layout; a max_shard_size such as "20KB" spreads it over several files."""
    model = _tiny_model(family, num_heads, num_kv_heads, changes)
    save_model(model, folder, max_shard_size=max_shard_size)
    return model


def save_model(model: PreTrainedModel, folder: Path, *, max_shard_size: str = "1GB") -> None:
    """Save a model without a word on the terminal."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def model_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's parameters under the names of kernels/spec.py, found by attribute rather than by name."""
    whole: Any = model
    decoder = whole.model
    weights: dict[str, torch.Tensor] = {"embed": decoder.embed_tokens.weight, "final_norm": decoder.norm.weight}
    if not whole.config.tie_word_embeddings:
        weights["lm_head"] = whole.lm_head.weight
    for index, layer in enumerate(decoder.layers):
        attention, mlp = layer.self_attn, layer.mlp
        linears = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj}
        linears |= {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
        norms = {"attn_norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm}
        if hasattr(layer, "pre_feedforward_layernorm"):
            norms |= {"mlp_norm": layer.pre_feedforward_layernorm, "post_attn_norm": layer.post_attention_layernorm}
            norms |= {"post_mlp_norm": layer.post_feedforward_layernorm}
        if hasattr(attention, "q_norm"):
            norms |= {"q_norm": attention.q_norm, "k_norm": attention.k_norm}
        for leaf, module in {**linears, **norms}.items():
            weights[f"layers.{index}.{leaf}"] = module.weight
            if getattr(module, "bias", None) is not None:
                weights[f"layers.{index}.{leaf}_bias"] = module.bias
    return {name: weight.detach() for name, weight in weights.items()}


def tiny_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Save a byte-level tokenizer of 276 tokens and no merges, with special tokens and a chat template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = tokenizers.Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_gguf(
    path: Path,
    *,
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[NDArray[Any], GGMLQuantizationType]],
) -> None:
    """Write a GGUF file. A tensor's numbers come as they are stored, quantised ones as bytes.

    metadata must hold general.architecture; a value's type says how it is stored.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if key != "general.architecture":
            _add_value(writer, key, value)
    for name, (stored, quantization) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_gguf(
    path: Path,
    family: str,
    *,
    num_heads: int,
    num_kv_heads: int,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, object] | None = None,
    **changes: object,
) -> PreTrainedModel:
    """Write a tiny_model as llama.cpp's converter would, and return the model. Mistral is written as llama there.

    quantization: of the matrices; norms and biases are F32. metadata: goes into the file too.
    """
    model = _tiny_model(family, num_heads, num_kv_heads, {**_GGUF_CHANGES.get(family, {}), **changes})
    arch = "llama" if family == "mistral" else family
    tensors = {}
    for name, parameter in model.named_parameters():
        numbers = _convert(arch, name, parameter.detach().numpy(), num_heads=num_heads, num_kv_heads=num_kv_heads)
        kind = quantization if numbers.ndim == 2 else GGMLQuantizationType.F32
        tensors[_gguf_name(arch, name)] = (quantize(numbers, kind), kind)
    rope_factors = _rope_factors(model)
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = (rope_factors, GGMLQuantizationType.F32)
    write_gguf(path, metadata={**_gguf_metadata(arch, model), **(metadata or {})}, tensors=tensors)
    return model


def _tiny_model(family: str, num_heads: int, num_kv_heads: int, changes: Mapping[str, object]) -> PreTrainedModel:
    config_class, model_class = _CLASSES[family]
    shape: dict[str, object] = {
        "vocab_size": 96,
        "hidden_size": 16 * num_heads,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": family == "gemma3",
    }
    model: PreTrainedModel = model_class(config_class(**{**shape, **_CHANGES[family], **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2, generator=generator)
    model.train(False)
    return model


def _add_value(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list | tuple)
        writer.add_array(key, list(value))


def _gguf_metadata(arch: str, model: PreTrainedModel) -> dict[str, object]:
    config: Any = model.config
    rope = config.rope_parameters
    theta = (rope["full_attention"] if arch == "gemma3" else rope)["rope_theta"]
    keys: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(theta),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if arch == "gemma3":
        keys |= {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": 2}
    elif rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


def _rope_factors(model: PreTrainedModel) -> NDArray[np.float32] | None:
    config: Any = model.config
    if config.rope_parameters.get("rope_type") != "llama3":
        return None
    base: Any = config.rope_parameters["rope_theta"]
    unscaled = 1.0 / base ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    scaled: Any = model.get_submodule("model.rotary_emb").inv_freq
    factors: NDArray[np.float32] = (unscaled / scaled).numpy()
    return factors


def _gguf_name(arch: str, name: str) -> str:
    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name == "lm_head.weight":
        return "output.weight"
    if name in outside:
        return outside[name]
    _, _, index, rest = name.split(".", 3)
    leaf, _, kind = rest.rpartition(".")
    return f"blk.{index}.{(_GGUF_GEMMA3_LEAVES if arch == 'gemma3' else _GGUF_LEAVES)[leaf]}.{kind}"


def _convert(
    arch: str, name: str, numbers: NDArray[np.float32], *, num_heads: int, num_kv_heads: int
) -> NDArray[np.float32]:
    if arch == "gemma3" and name.endswith("norm.weight"):
        return numbers + np.float32(1.0)
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = num_heads if "q_proj" in name else num_kv_heads
        halves = numbers.reshape(heads, 2, numbers.shape[0] // heads // 2, *numbers.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)
    return np.ascontiguousarray(numbers)
