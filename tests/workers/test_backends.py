"""Which back end is chosen, in which types, and what is said where one cannot be had."""

from __future__ import annotations

import logging

import pytest
import torch

from kvorum.kernels.cpu.backend import CpuBackend
from kvorum.kernels.cpu.build import CompilerError
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.spec import Shard
from kvorum.kvstore.errors import UnsupportedError
from kvorum.workers import backends
from kvorum.workers.backends import load_backend
from kvorum.workers.checkpoint.resolve import Checkpoint, resolve
from kvorum.workers.config import EngineConfig
from kvtest.checkpoints import tiny_checkpoint, tiny_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a model whose heads are 16 long."""
    path = tmp_path_factory.mktemp("folder")
    tiny_checkpoint("llama", path, num_heads=4, num_kv_heads=2)
    return resolve(str(path))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf(path, "llama", num_heads=4, num_kv_heads=2)
    return resolve(str(path))


def load(checkpoint: Checkpoint, **options: object) -> ReferenceBackend | CpuBackend:
    config = EngineConfig(model=str(checkpoint.path), model_name="tiny", device="cpu", **options)  # type: ignore[arg-type]
    backend = load_backend(config, checkpoint, Shard.whole(checkpoint.spec))
    assert isinstance(backend, ReferenceBackend | CpuBackend)
    return backend


def kv_type(backend: ReferenceBackend | CpuBackend) -> torch.dtype:
    return backend.allocate_pool(num_blocks=1, block_size=16, max_num_seqs=1).kv.dtype


def test_on_a_cpu_the_compiled_kernels_compute(folder: Checkpoint) -> None:
    backend = load(folder)
    assert isinstance(backend, CpuBackend)
    assert not backend.is_quantized
    assert kv_type(backend) == torch.float32


def test_a_gguf_file_is_computed_with_as_it_is_unless_a_dtype_is_given(gguf: Checkpoint) -> None:
    as_it_is, plain = load(gguf), load(gguf, dtype="float32")
    assert isinstance(as_it_is, CpuBackend)
    assert isinstance(plain, CpuBackend)
    assert as_it_is.is_quantized
    assert kv_type(as_it_is) == torch.bfloat16
    assert not plain.is_quantized
    assert kv_type(plain) == torch.float32


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_the_cache_has_the_type_asked_for(folder: Checkpoint, kv_cache_dtype: str) -> None:
    backend = load(folder, quantization="int8", kv_cache_dtype=kv_cache_dtype)
    assert kv_type(backend) == getattr(torch, kv_cache_dtype)


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"dtype": "float16"}, {"block_size": 8}], ids=str)
def test_what_the_kernels_cannot_do_the_reference_does_with_a_warning(
    folder: Checkpoint, caplog: pytest.LogCaptureFixture, options: dict[str, object]
) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(folder, **options), ReferenceBackend)
    assert [
        record.message.startswith("the reference back end computes, which is slow") for record in caplog.records
    ] == [True]
    with pytest.raises(UnsupportedError, match="backend cpu"):
        load(folder, backend="cpu", **options)


def test_without_a_compiler_the_reference_computes_and_one_warning_says_what_to_install(
    folder: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise CompilerError("no C++ compiler found: install g++")

    monkeypatch.setattr(backends, "load_library", fail)
    with caplog.at_level(logging.WARNING):
        assert isinstance(load(folder), ReferenceBackend)
    assert ["install g++" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "gguf"}, "quantization gguf: .* is not a GGUF file"),
        ({"prompt_activations": "int8"}, "prompt_activations int8: only quantised"),
        ({"prompt_activations": "int8", "backend": "reference"}, "prompt_activations int8: only the CPU back end"),
        ({"quantization": "int8", "backend": "reference"}, "quantization int8: only the CPU"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"kv_cache_dtype": "bfloat16", "backend": "reference"}, "kv_cache_dtype bfloat16"),
        ({"backend": "triton"}, "backend triton: device is cpu"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_named(folder: Checkpoint, options: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load(folder, **options)
