"""Which back end computes a model, in which types: decided from the configuration, the model and the machine."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from kvorum.kernels.backend import Weight
from kvorum.kernels.cpu.backend import MAX_GROUP_SIZE, CpuBackend, CpuTypes, supports
from kvorum.kernels.cpu.build import CompilerError
from kvorum.kernels.cpu.library import load_library
from kvorum.kernels.cpu.pool import KV_DTYPES
from kvorum.kernels.cpu.weights import Format
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.spec import Shard
from kvorum.kvstore.errors import UnsupportedError
from kvorum.workers.checkpoint.resolve import Checkpoint
from kvorum.workers.checkpoint.weights import iter_stored_weights, iter_weights
from kvorum.workers.config import EngineConfig

if TYPE_CHECKING:
    from kvorum.kernels.triton.backend import TritonBackend

Progress = Callable[[int, int], None]

_log = logging.getLogger(__name__)
_CPU_DTYPES = ("auto", "float32", "bfloat16")
_KV_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def load_backend(
    config: EngineConfig, checkpoint: Checkpoint, shard: Shard, *, on_progress: Progress | None = None
) -> ReferenceBackend | CpuBackend | TritonBackend:
    """Choose a back end and load a shard of the model's weights into it.

    Raises:
        CheckpointError: the weights cannot be read.
        UnsupportedError: names the setting that cannot be had.
    """
    device = choose_device(config.device)
    if _runs_on_cpu_kernels(config, checkpoint, device):
        return _load_cpu(config, checkpoint, shard, on_progress)
    if config.quantization in ("gguf", "int8"):
        raise UnsupportedError(f"quantization {config.quantization}: only the CPU back end computes with it")
    if config.prompt_activations != "int16":
        raise UnsupportedError(f"prompt_activations {config.prompt_activations}: only the CPU back end rounds them")
    if _runs_on_triton(config, device):
        return _load_triton(config, checkpoint, shard, on_progress)
    return _load_reference(config, checkpoint, shard, on_progress)


def choose_device(name: str) -> torch.device:
    """Return the torch device of a name; auto is cuda when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a name; auto is float32 on CPUs, bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _runs_on_cpu_kernels(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> bool:
    """Say whether the C++ kernels compute; warns where they should and cannot."""
    if config.backend in ("reference", "triton") or (config.backend == "auto" and device.type != "cpu"):
        return False
    reason = _why_not_cpu_kernels(config, checkpoint, device)
    if reason is None:
        return True
    if config.backend == "cpu":
        raise UnsupportedError(f"backend cpu: {reason}")
    _log.warning("the reference back end computes, which is slow: %s", reason)
    return False


def _why_not_cpu_kernels(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"device is {device.type}"
    if config.dtype not in _CPU_DTYPES:
        return f"the CPU kernels compute no {config.dtype}; set dtype to one of {', '.join(_CPU_DTYPES)}"
    if not supports(checkpoint.spec, block_size=config.block_size):
        spec = checkpoint.spec
        return (
            f"head_dim {spec.head_dim} and block_size {config.block_size} must be multiples of 16, "
            f"and {spec.group_size} query heads to a KV head at most {MAX_GROUP_SIZE}"
        )
    try:
        load_library()
    except CompilerError as error:
        return str(error)
    return None


def _load_cpu(config: EngineConfig, checkpoint: Checkpoint, shard: Shard, on_progress: Progress | None) -> CpuBackend:
    quantization = config.quantization
    if quantization == "auto":
        quantization = "gguf" if checkpoint.gguf is not None and config.dtype == "auto" else "none"
    if quantization == "gguf" and checkpoint.gguf is None:
        raise UnsupportedError(f"quantization gguf: {checkpoint.path} is not a GGUF file")
    if quantization == "none" and config.prompt_activations == "int8":
        raise UnsupportedError("prompt_activations int8: only quantised weights are multiplied with whole numbers")
    dtype = choose_dtype(config.dtype, torch.device("cpu"))
    format = Format.Q8 if quantization != "none" else Format.BF16 if dtype == torch.bfloat16 else Format.F32
    default = torch.bfloat16 if quantization != "none" else dtype
    kv_dtype = default if config.kv_cache_dtype == "auto" else _KV_TYPES[config.kv_cache_dtype]
    if kv_dtype not in KV_DTYPES:
        raise UnsupportedError(f"kv_cache_dtype {config.kv_cache_dtype}: on CPUs it is float32, bfloat16 or int8")
    weights: Iterator[tuple[str, Weight]] = (
        iter_stored_weights(checkpoint, shard, on_progress=on_progress)
        if quantization == "gguf"
        else iter_weights(checkpoint, shard, dtype=torch.float32, on_progress=on_progress)
    )
    types = CpuTypes(weights=format, kv=kv_dtype, byte_prompts=config.prompt_activations == "int8")
    backend = CpuBackend(checkpoint.spec, shard, types=types, num_threads=torch.get_num_threads())
    backend.load(weights)
    return backend


def _runs_on_triton(config: EngineConfig, device: torch.device) -> bool:
    """Say whether the Triton kernels compute; warns where they should and cannot."""
    if config.backend == "reference" or (config.backend == "auto" and device.type != "cuda"):
        return False
    reason = None
    if device.type != "cuda":
        reason = f"device is {device.type}"
    elif importlib.util.find_spec("triton") is None:
        reason = "the package triton is not installed (pip install kvorum[gpu])"
    if reason is None:
        return True
    if config.backend == "triton":
        raise UnsupportedError(f"backend triton: {reason}")
    _log.warning("the reference back end computes, which is slow: %s", reason)
    return False


def _load_triton(
    config: EngineConfig, checkpoint: Checkpoint, shard: Shard, on_progress: Progress | None
) -> TritonBackend:
    from kvorum.kernels.triton.backend import TritonBackend

    device = choose_device(config.device)
    torch.cuda.set_device(device)
    dtype = choose_dtype(config.dtype, device)
    kv_dtype = None if config.kv_cache_dtype == "auto" else _KV_TYPES[config.kv_cache_dtype]
    try:
        backend = TritonBackend(checkpoint.spec, shard, dtype=dtype, device=device, kv_dtype=kv_dtype)
    except ValueError as error:
        raise UnsupportedError(f"backend triton: {error}") from error
    backend.load(iter_weights(checkpoint, shard, dtype=dtype, on_progress=on_progress))
    return backend


def _load_reference(
    config: EngineConfig, checkpoint: Checkpoint, shard: Shard, on_progress: Progress | None
) -> ReferenceBackend:
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    if config.kv_cache_dtype != "auto" and _KV_TYPES[config.kv_cache_dtype] != dtype:
        raise UnsupportedError(f"kv_cache_dtype {config.kv_cache_dtype}: the reference back end keeps K and V in dtype")
    backend = ReferenceBackend(checkpoint.spec, shard, dtype=dtype, device=device)
    backend.load(iter_weights(checkpoint, shard, dtype=dtype, on_progress=on_progress))
    return backend
