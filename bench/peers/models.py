"""The embedded model in the forms that peers read: GGUF in float32 and float16, and a folder in Hugging Face's layout.

All are made from the Q4_1 file, so that all peers compute with the same weights: the float32 forms hold the very
numbers that the quantised one stands for, the float16 one those numbers rounded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from environments import PEERS
from gguf import GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize
from safetensors.torch import save_file

from kvorum.kernels.spec import Shard
from kvorum.workers.checkpoint.gguf_tokenizer import build_tokenizer
from kvorum.workers.checkpoint.resolve import DEMO_MODEL, Checkpoint, resolve
from kvorum.workers.checkpoint.weights import iter_weights

_FILE_TYPES = {"f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16}
_HF_NAMES = {
    "embed": "embed_tokens",
    "final_norm": "norm",
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def quantised_gguf() -> Path:
    """Return the model as it is embedded: Q4_1 layers, Q8_0 embedding."""
    return resolve(DEMO_MODEL).path


def float_gguf(element: Literal["f32", "f16"]) -> Path:
    """Return a GGUF file with the same metadata and its matrices in float32 or float16; written on first use."""
    path = PEERS / "models" / f"smollm2-135m-{element}.gguf"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(quantised_gguf())
    partial = path.with_suffix(".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(skipped):
            subtype = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], subtype)
    writer.add_file_type(_FILE_TYPES[element])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        is_half = element == "f16" and values.ndim > 1  # norms stay float32 in float16 files
        writer.add_tensor(tensor.name, values.astype(np.float16) if is_half else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(path)


def float32_folder() -> Path:
    """Return a folder with config.json, tokenizer and float32 safetensors; written on first use."""
    folder = PEERS / "models" / "smollm2-135m-f32"
    if (folder / "model.safetensors").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = resolve(DEMO_MODEL)
    assert checkpoint.gguf, "the embedded model is a GGUF file"
    (folder / "config.json").write_text(json.dumps(_config(checkpoint), indent=1))
    build_tokenizer(checkpoint.gguf.metadata).save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    weights = {
        _hf_name(name): tensor
        for name, tensor in iter_weights(checkpoint, Shard.whole(checkpoint.spec), dtype=torch.float32)
    }
    partial = folder / "model.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
    return folder


def _hf_name(weight: str) -> str:
    prefix, _, kind = weight.rpartition(".")
    return ".".join(part for part in ("model", prefix, _HF_NAMES[kind], "weight") if part)


def _config(checkpoint: Checkpoint) -> dict[str, object]:
    spec, gguf = checkpoint.spec, checkpoint.gguf
    assert gguf, "the embedded model is a GGUF file"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": gguf.metadata.number("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "bos_token_id": checkpoint.bos_token_id,
        "eos_token_id": checkpoint.eos_token_ids[0],
        "dtype": "float32",
    }
