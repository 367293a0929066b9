"""What an engine and its ranks are built from; `cluster/config.py` checks it and fills it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvorum.kvstore.pricing import DEFAULT_RULE_TEXT

DtypeName = Literal["auto", "float64", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "reference", "cpu", "triton"]
QuantizationName = Literal["auto", "none", "gguf", "int8"]
KVDtypeName = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine.

    model: folder, .gguf file, hub id or `smollm2-135m`. tensor_parallel_size: ranks that share the model.
    placement_strategy: how Ray places them on nodes. dtype: of weights and computation; auto is float32 on CPUs and
    bfloat16 on GPUs. device: a torch device, auto is cuda when there is one. backend: auto is the fast one of the
    device where it can run. quantization: gguf computes with a GGUF file's own blocks, int8 quantises, none takes
    dtype; auto is gguf for a GGUF file on the CPU back end while dtype is auto, else none. prompt_activations: what
    they are rounded to before quantised weights while a prompt is read; decode takes int16. kv_cache_dtype: auto is
    bfloat16 beside quantised weights, else dtype. max_model_len: None is the model's own. kv_cache_memory_bytes: the
    pool's size; None is gpu_memory_utilization of what the GPU has left once the weights are there, and CPU_POOL_BYTES
    on CPUs. kv_offload_bytes: host memory on each rank for sequences that are moved out of the pool. allocation: the
    rule by which elastic sequences share the pool (kvstore/pricing.py). num_cpus: cores that each rank computes on;
    None is a share of the cluster's on CPUs, one on GPUs.
    """

    model: str
    model_name: str
    tensor_parallel_size: int = 1
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    dtype: DtypeName = "auto"
    device: str = "auto"
    backend: BackendName = "auto"
    quantization: QuantizationName = "auto"
    kv_cache_dtype: KVDtypeName = "auto"
    prompt_activations: Literal["int16", "int8"] = "int16"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_offload_bytes: int = 2**30
    allocation: str = DEFAULT_RULE_TEXT
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 256
    enable_prefix_caching: bool = True
    num_cpus: int | None = None


@dataclass(frozen=True, slots=True)
class RankShape:
    """What the engine must know of a loaded rank. max_offloaded_blocks: that its host memory has room for."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    max_offloaded_blocks: int = 0


CPU_POOL_BYTES = 2 * 1024**3

# What a process that computes on CPUs sets before it loads torch. OpenMP's threads spin for milliseconds at the end of
# each parallel region; beside other processes on the same cores that makes a step 10 to 20 times slower.
COMPUTE_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}
