"""Weights from disk to one rank's tensors: named as kernels/spec.py names them, cut to the rank's shard.

1. `_layout` says for each kind of weight its whole shape and the range of one axis that the shard takes.
2. A source (safetensors or GGUF) finds every tensor and compares its shape, before anything is read.
3. Each tensor's range is read from the file, alone, and yielded in the asked dtype.

o_bias and down_bias are added to a sum over ranks: the first rank has them, the others have zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from kvorum.kernels.backend import BLOCK_BYTES, QuantizedWeight, Weight
from kvorum.kernels.spec import DecoderSpec, Shard, weight_names
from kvorum.kvstore.errors import CheckpointError
from kvorum.workers.checkpoint.fields import Fields
from kvorum.workers.checkpoint.gguf_file import GgufFile, read_blocks, read_rows, tensor_name
from kvorum.workers.checkpoint.resolve import Checkpoint

_NumberT = TypeVar("_NumberT", np.float32, np.uint8)
_BLOCK = 32  # numbers that share a scale in BLOCK_BYTES' formats
_SUMMED_BIASES = ("o_bias", "down_bias")
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
# Where the language model begins in a checkpoint: alone, inside a multimodal one, and that as transformers 5 saves it.
_HF_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
_HF_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
_HF_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
_HF_SANDWICH_NAMES: Mapping[str, str] = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class _Cut:
    """The part [start, stop) along one axis of a weight of this shape."""

    shape: tuple[int, ...]
    axis: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape) // self.shape[self.axis] * (self.stop - self.start)


class _Source(Protocol):
    def read_blocks(self, weight: str, cut: _Cut) -> QuantizedWeight | None:
        """Read the part of a checked tensor as the blocks it is stored in; None where it has none, or they are cut."""

    def check(self, weight: str, cut: _Cut) -> None:
        """Raise CheckpointError unless the tensor is there in the shape and a type that can be read."""

    def read(self, weight: str, cut: _Cut) -> torch.Tensor:
        """Read the part of a checked tensor."""


def iter_weights(
    checkpoint: Checkpoint,
    shard: Shard,
    *,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of the shard, in the order of weight_names.

    Args:
        checkpoint: the model.
        shard: what this rank holds.
        dtype: of the tensors yielded.
        on_progress: called after each weight with the bytes yielded so far and in all.

    Raises:
        CheckpointError: on the first step, if a tensor is missing or has another shape; it names the file and both
            shapes.
    """

    def read(source: _Source, name: str, cut: _Cut) -> torch.Tensor:
        return _read_part(source, name, cut, shard).to(dtype).contiguous()

    return _read_all(checkpoint, shard, read, dtype=dtype, on_progress=on_progress)


def iter_stored_weights(
    checkpoint: Checkpoint, shard: Shard, *, on_progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, Weight]]:
    """Yield what iter_weights does, but the blocks of quantised matrices as they are and all else in float32."""

    def read(source: _Source, name: str, cut: _Cut) -> Weight:
        blocks = source.read_blocks(name, cut)
        return _read_part(source, name, cut, shard).to(torch.float32).contiguous() if blocks is None else blocks

    return _read_all(checkpoint, shard, read, dtype=torch.float32, on_progress=on_progress)


def _read_part(source: _Source, name: str, cut: _Cut, shard: Shard) -> torch.Tensor:
    if name.endswith(_SUMMED_BIASES) and not shard.adds_biases:
        return torch.zeros(cut.shape)
    return source.read(name, cut)


WeightT = TypeVar("WeightT")


def _read_all(
    checkpoint: Checkpoint,
    shard: Shard,
    read: Callable[[_Source, str, _Cut], WeightT],
    *,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, WeightT]]:
    """Check every tensor, then read one after the other. dtype: what progress is counted in."""
    layout = _layout(checkpoint.spec, shard)
    cuts = {name: layout[name.rpartition(".")[2]] for name in weight_names(checkpoint.spec)}
    total_bytes = sum(cut.num_elements for cut in cuts.values()) * dtype.itemsize
    done_bytes = 0
    with ExitStack() as open_files:
        source = _source(checkpoint, open_files)
        for name, cut in cuts.items():
            source.check(name, cut)
        for name, cut in cuts.items():
            yield name, read(source, name, cut)
            done_bytes += cut.num_elements * dtype.itemsize
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)


def _layout(spec: DecoderSpec, shard: Shard) -> dict[str, _Cut]:
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q = (shard.q_heads[0] * head_dim, shard.q_heads[1] * head_dim)
    kv = (shard.kv_heads[0] * head_dim, shard.kv_heads[1] * head_dim)
    q_size, kv_size, mlp_size = spec.num_heads * head_dim, spec.num_kv_heads * head_dim, spec.intermediate_size
    whole = _Cut((hidden,), 0, 0, hidden)
    head_norm = _Cut((head_dim,), 0, 0, head_dim)
    return {
        "embed": _Cut((spec.vocab_size, hidden), 0, *shard.vocab),
        "lm_head": _Cut((spec.vocab_size, hidden), 0, *shard.vocab),
        "q": _Cut((q_size, hidden), 0, *q),
        "k": _Cut((kv_size, hidden), 0, *kv),
        "v": _Cut((kv_size, hidden), 0, *kv),
        "o": _Cut((hidden, q_size), 1, *q),
        "q_bias": _Cut((q_size,), 0, *q),
        "k_bias": _Cut((kv_size,), 0, *kv),
        "v_bias": _Cut((kv_size,), 0, *kv),
        "gate": _Cut((mlp_size, hidden), 0, *shard.mlp),
        "up": _Cut((mlp_size, hidden), 0, *shard.mlp),
        "down": _Cut((hidden, mlp_size), 1, *shard.mlp),
        "gate_bias": _Cut((mlp_size,), 0, *shard.mlp),
        "up_bias": _Cut((mlp_size,), 0, *shard.mlp),
        "q_norm": head_norm,
        "k_norm": head_norm,
        **dict.fromkeys(("final_norm", "attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm"), whole),
        **dict.fromkeys(_SUMMED_BIASES, whole),
    }


def _source(checkpoint: Checkpoint, open_files: ExitStack) -> _Source:
    if checkpoint.gguf is not None:
        return _GgufSource(checkpoint.gguf, checkpoint.spec.head_dim)
    return _SafetensorsSource(checkpoint.path, checkpoint.spec, open_files)


class _TensorSlice(Protocol):
    """What safetensors gives for a tensor before it is read."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, index: slice | tuple[slice, slice]) -> torch.Tensor: ...


class _SafetensorsSource:
    """A folder of safetensors files. Opening one reads its header; slicing a tensor reads the slice."""

    def __init__(self, folder: Path, spec: DecoderSpec, open_files: ExitStack) -> None:
        self._folder = folder
        self._open_files = open_files
        self._handles: dict[Path, safe_open] = {}
        self._files = self._locate()
        embeds = {prefix: f"{prefix}embed_tokens.weight" for prefix in _HF_PREFIXES}
        prefix = next((prefix for prefix, name in embeds.items() if name in self._files), None)
        if prefix is None:
            raise CheckpointError(f"{folder}: tensor {embeds[_HF_PREFIXES[0]]} is missing")
        self._prefix = prefix
        self._layer_names = {**_HF_LAYER_NAMES, **(_HF_SANDWICH_NAMES if spec.sandwich_norms else {})}

    def check(self, weight: str, cut: _Cut) -> None:
        name = self._name(weight)
        if name not in self._files:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        stored = self._slice(name)
        _check_shape(self._files[name], name, expected=cut.shape, found=tuple(stored.get_shape()))
        if stored.get_dtype() not in _FLOAT_TYPES:
            raise CheckpointError(
                f"{self._files[name]}: tensor {name} is of type {stored.get_dtype()}, which is not supported; "
                f"supported are {', '.join(_FLOAT_TYPES)}"
            )

    def read(self, weight: str, cut: _Cut) -> torch.Tensor:
        part = slice(cut.start, cut.stop)
        return self._slice(self._name(weight))[part if cut.axis == 0 else (slice(None), part)]

    def read_blocks(self, _weight: str, _cut: _Cut) -> None:
        """Safetensors files hold plain numbers."""

    def _locate(self) -> dict[str, Path]:
        """Return the file of every tensor, from the index or, without one, from the only file."""
        index_path = self._folder / "model.safetensors.index.json"
        if index_path.is_file():
            weight_map = Fields.read(index_path).section("weight_map")
            return {name: self._folder / weight_map.text(name) for name in weight_map.values}
        path = self._folder / "model.safetensors"
        return dict.fromkeys(cast("list[str]", self._handle(path).keys()), path)  # type: ignore[no-untyped-call]

    def _handle(self, path: Path) -> safe_open:
        if path not in self._handles:
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; weights must be in safetensors files")
            try:
                handle = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
            self._handles[path] = self._open_files.enter_context(handle)
        return self._handles[path]

    def _slice(self, name: str) -> _TensorSlice:
        path = self._files[name]
        try:
            return cast("_TensorSlice", self._handle(path).get_slice(name))  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise CheckpointError(f"{path}: tensor {name} is missing, though the index says it is there") from error

    def _name(self, weight: str) -> str:
        if weight == "lm_head":
            return next((name for name in _HF_HEAD_NAMES if name in self._files), _HF_HEAD_NAMES[0])
        if weight in ("embed", "final_norm"):
            return f"{self._prefix}{'embed_tokens' if weight == 'embed' else 'norm'}.weight"
        _, index, leaf = weight.split(".")
        return f"{self._prefix}layers.{index}.{self._layer_names[leaf]}"


class _GgufSource:
    """A GGUF file. Quantised columns do not come apart, so where columns are cut all of them are read."""

    def __init__(self, file: GgufFile, head_dim: int) -> None:
        self._file = file
        self._head_dim = head_dim
        self._is_interleaved = file.metadata.text("general.architecture") == "llama"

    def check(self, weight: str, cut: _Cut) -> None:
        name = tensor_name(weight)
        tensor = self._file.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self._file.path}: tensor {name} is missing")
        _check_shape(self._file.path, name, expected=cut.shape, found=tensor.shape)
        self._file.require_readable(name)

    def read(self, weight: str, cut: _Cut) -> torch.Tensor:
        part, name = slice(cut.start, cut.stop), tensor_name(weight)
        if cut.axis == 1:
            return torch.from_numpy(read_rows(self._file, name)[:, part])
        return torch.from_numpy(self._in_order(weight, read_rows(self._file, name, part)))

    def read_blocks(self, weight: str, cut: _Cut) -> QuantizedWeight | None:
        name = tensor_name(weight)
        quantization = self._file.tensors[name].quantization
        if quantization not in BLOCK_BYTES or len(cut.shape) != 2:
            return None
        if cut.axis == 0:
            blocks = self._in_order(weight, read_blocks(self._file, name, slice(cut.start, cut.stop)))
        elif cut.start % _BLOCK == 0 and cut.stop % _BLOCK == 0:
            ends = (edge // _BLOCK * BLOCK_BYTES[quantization] for edge in (cut.start, cut.stop))
            blocks = read_blocks(self._file, name, slice(None))[:, slice(*ends)]
        else:
            return None
        return QuantizedWeight(
            torch.from_numpy(np.ascontiguousarray(blocks)), cast("Literal['Q8_0', 'Q4_0', 'Q4_1']", quantization)
        )

    def _in_order(self, weight: str, rows: NDArray[_NumberT]) -> NDArray[_NumberT]:
        if self._is_interleaved and weight.rpartition(".")[2] in ("q", "k", "q_bias", "k_bias"):
            return _halves_apart(rows, self._head_dim)
        return rows


def _halves_apart(rows: NDArray[_NumberT], head_dim: int) -> NDArray[_NumberT]:
    """Put the rows of each head, which alternate between its two rotated halves, back into one half after the other."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _check_shape(path: Path, name: str, *, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if expected != found:
        raise CheckpointError(
            f"{path}: tensor {name} has the shape {list(found)}, but by the model's configuration {list(expected)}"
        )
