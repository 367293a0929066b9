"""A GGUF file: its metadata as a DecoderSpec, the names of its tensors, and their numbers.

What llama.cpp's converter changes on the way into the file, and where it is undone:
 - Architecture `llama` stores q and k for interleaved rotation; `weights.py` puts their rows back.
 - Gemma's norms are stored as 1 + weight, so a spec read from here has norm_offset 0.
 - Llama 3's frequency scaling is a tensor, `rope_freqs.weight`, which the spec's rotary table is divided by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from kvorum.kernels.spec import DecoderSpec, LayerSpec, RopeSpec
from kvorum.kvstore.errors import CheckpointError
from kvorum.workers.checkpoint.fields import Fields
from kvorum.workers.checkpoint.rope import base_inv_freq, rope_spec

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
_QUANTIZATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "post_mlp_norm": "post_ffw_norm.weight",
}
# Tokens that end a turn, for files that do not name theirs.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
# llama.cpp keeps these three for Gemma 3 in its code, not in the file.
_GEMMA3_WINDOW_PERIOD = 6
_GEMMA3_LOCAL_THETA = 10_000.0
_GEMMA3_27B_NUM_LAYERS = 62


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. shape is as torch has it, outermost first; quantization is ggml's name of the type."""

    shape: tuple[int, ...]
    quantization: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Everything in a GGUF file but the tensors' numbers: plain data, so that it travels to the ranks as it is."""

    path: Path
    metadata: Fields
    tensors: Mapping[str, GgufTensor]

    def require_readable(self, name: str) -> None:
        """Raise CheckpointError unless the tensor's type can be turned into numbers."""
        quantization = self.tensors[name].quantization
        if quantization not in _QUANTIZATIONS:
            raise CheckpointError(
                f"{self.path}: tensor {name} is of type {quantization}, which is not supported; "
                f"supported are {', '.join(_QUANTIZATIONS)}"
            )


class _Reader(GGUFReader):
    """GGUFReader over a plain array: slicing a memmap some 100,000 times takes three times as long."""

    @property  # type: ignore[override]  # wider than memmap, which nothing relies on
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = np.asarray(mapped)


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the tensor table of a GGUF file."""
    try:
        reader = _Reader(path)
        values = {name: _plain(field.contents()) for name, field in reader.fields.items()}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}") from error
    metadata = Fields(str(path), values)
    if metadata.integer("split.count", 0) > 1:
        raise metadata.error("split.count", "is not supported; merge the parts into one file")
    tensors = {
        tensor.name: GgufTensor(
            shape=tuple(reversed(tensor.shape.tolist())),
            quantization=tensor.tensor_type.name,
            offset=tensor.data_offset,
            num_bytes=tensor.n_bytes,
        )
        for tensor in reader.tensors
    }
    return GgufFile(path, metadata, tensors)


def tensor_name(weight: str) -> str:
    """Return the GGUF name of one of kvorum's weights (see kernels/spec.py)."""
    if weight in _NAMES:
        return _NAMES[weight]
    _, index, leaf = weight.split(".")
    return f"blk.{index}.{_LAYER_NAMES[leaf]}"


def read_rows(file: GgufFile, name: str, rows: slice = slice(None)) -> NDArray[np.float32]:
    """Return some rows of a tensor as float32, reading only their bytes. A vector's rows are its numbers."""
    file.require_readable(name)
    tensor = file.tensors[name]
    quantization = GGMLQuantizationType[tensor.quantization]
    stored = np.memmap(file.path, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
    if len(tensor.shape) == 1:
        return np.array(dequantize(stored, quantization)[rows])
    return np.array(dequantize(stored.reshape(tensor.shape[0], -1)[rows], quantization))


def read_blocks(file: GgufFile, name: str, rows: slice) -> NDArray[np.uint8]:
    """Return some rows of a quantised matrix as its bytes, [rows, bytes of a row]."""
    tensor = file.tensors[name]
    stored = np.memmap(file.path, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
    return np.array(stored.reshape(tensor.shape[0], -1)[rows])


def decoder_spec(file: GgufFile) -> DecoderSpec:
    """Return what the model in this file computes."""
    fields = file.metadata
    arch = fields.text("general.architecture")
    if arch not in _ARCHITECTURES:
        raise fields.error("general.architecture", f"is not supported; supported are {', '.join(_ARCHITECTURES)}")
    unsupported = ["expert_count", "final_logit_softcapping"]
    unsupported += [] if arch == "gemma3" else ["attention.sliding_window"]
    for name in unsupported:
        if fields.values.get(f"{arch}.{name}"):
            raise fields.error(f"{arch}.{name}", "is not supported")
    spec = _plain_spec(file, arch)
    return _gemma3(file, spec) if arch == "gemma3" else replace(spec, qk_norm=arch == "qwen3")


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end an answer: end of text, and end of turn where the file or its vocabulary has one."""
    fields = file.metadata
    ids = [*fields.integers("tokenizer.ggml.eos_token_id"), *fields.integers("tokenizer.ggml.eot_token_id")]
    if not fields.has("tokenizer.ggml.eot_token_id") and fields.has("tokenizer.ggml.tokens"):
        ids += [index for index, token in enumerate(fields.texts("tokenizer.ggml.tokens")) if token in _TURN_ENDS]
    return tuple(dict.fromkeys(ids))


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _plain_spec(file: GgufFile, arch: str) -> DecoderSpec:
    fields = file.metadata
    num_layers = fields.size(f"{arch}.block_count")
    hidden_size = fields.size(f"{arch}.embedding_length")
    num_heads = fields.size(f"{arch}.attention.head_count")
    num_kv_heads = fields.size(f"{arch}.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads != 0:
        raise fields.error(f"{arch}.attention.head_count_kv", f"must divide the number of heads, {num_heads}")
    head_dim = fields.size(f"{arch}.attention.key_length", hidden_size // num_heads)
    if fields.size(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise fields.error(f"{arch}.attention.value_length", f"must be the length of keys, {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing")
    return DecoderSpec(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.size(f"{arch}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerSpec(_rope(file, arch, head_dim)),) * num_layers,
        max_position=fields.size(f"{arch}.context_length"),
        rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        attention_scale=head_dim**-0.5,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
    )


def _rope(file: GgufFile, arch: str, head_dim: int) -> RopeSpec:
    fields = file.metadata
    if fields.size(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise fields.error(f"{arch}.rope.dimension_count", f"must be the length of a head, {head_dim}")
    inv_freq = base_inv_freq(fields.number(f"{arch}.rope.freq_base", 10_000.0), head_dim)
    match fields.text(f"{arch}.rope.scaling.type", "none"):
        case "none":
            pass
        case "linear":
            inv_freq = inv_freq / np.float32(fields.number(f"{arch}.rope.scaling.factor"))
        case _:
            raise fields.error(f"{arch}.rope.scaling.type", "is not supported; supported are none, linear")
    if "rope_freqs.weight" in file.tensors:
        inv_freq = inv_freq / read_rows(file, "rope_freqs.weight")
    return rope_spec(inv_freq)


def _gemma3(file: GgufFile, spec: DecoderSpec) -> DecoderSpec:
    fields = file.metadata
    local_theta = fields.number("gemma3.rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
    period = fields.size("gemma3.attention.sliding_window_pattern", _GEMMA3_WINDOW_PERIOD)
    local = LayerSpec(
        rope=rope_spec(base_inv_freq(local_theta, spec.head_dim)),
        sliding_window=fields.size("gemma3.attention.sliding_window"),
    )
    scaled_by = spec.hidden_size / spec.num_heads if spec.num_layers == _GEMMA3_27B_NUM_LAYERS else spec.head_dim
    return replace(
        spec,
        layers=tuple(local if (index + 1) % period else layer for index, layer in enumerate(spec.layers)),
        activation="gelu_tanh",
        attention_scale=scaled_by**-0.5,
        embedding_scale=float(np.sqrt(np.float32(spec.hidden_size))),
        qk_norm=True,
        sandwich_norms=True,
    )
