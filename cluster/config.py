"""The one schema of kvorum's settings: YAML file, command-line flags and Serve arguments are all read through it.

`config_flags.py` reads files and flags.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from kvorum.cluster.tenants import Tenant, TenantName
from kvorum.kvstore.errors import InvalidRequestError, KvorumError
from kvorum.kvstore.policies import parse_policy, resolve_budget
from kvorum.kvstore.pricing import DEFAULT_RULE_TEXT, parse_rule

Port = Annotated[int, Field(ge=0, le=65535)]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LogFormat = Literal["text", "json"]

# Nothing that a client sends is larger, over HTTP or gRPC.
MAX_REQUEST_BYTES = 64 * 2**20


class ConfigError(KvorumError):
    """A setting is unknown or has a value that cannot be used."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelSection(_Section):
    """Which model, and how it is computed."""

    model: str = Field(
        default="smollm2-135m",
        min_length=1,
        description="Folder, .gguf file, Hugging Face id, or smollm2-135m for the embedded model.",
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Name that clients use; default: the name of the model."
    )
    dtype: DType = Field(
        default="auto", description="Type of weights and activations; auto takes what suits the device."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where the model runs.")
    backend: Literal["auto", "reference", "cpu", "triton"] = Field(
        default="auto",
        description="What computes: cpu is compiled C++, triton is for GPUs, reference is plain torch; auto takes the "
        "fast one of the device.",
    )
    quantization: Literal["auto", "none", "gguf", "int8"] = Field(
        default="auto",
        description="Weights on CPUs: gguf computes with a GGUF file's own blocks, int8 rounds to 8 bits with a scale "
        "for 32 numbers, none takes dtype; auto is gguf for GGUF files unless dtype is given, else none.",
    )
    prompt_activations: Literal["int16", "int8"] = Field(
        default="int16",
        description="What activations are rounded to before quantised weights on CPUs while a prompt is read; int8 is "
        "up to 1.7 times as fast and costs a KL of about 0.002.",
    )
    max_model_len: int | None = Field(
        default=None, ge=1, description="Longest prompt plus answer, in tokens; default: what the model was made for."
    )
    chat_template: Path | None = Field(
        default=None, description="File with a Jinja chat template to use instead of the model's own."
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Seeds the seeds of requests that bring none, for reproducible runs; default: unpredictable.",
    )


class CacheSection(_Section):
    """How much memory the KV cache has and what may be evicted from it."""

    kv_cache_memory_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Bytes of the KV pool on each rank; default: worked out from gpu_memory_utilization.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = Field(
        default="auto",
        description="Type of cached keys and values; auto is bfloat16 beside quantised weights, else dtype.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of the device's memory for weights and KV pool together."
    )
    block_size: int = Field(default=16, ge=1, le=256, description="Tokens a KV block holds.")
    enable_prefix_caching: bool = Field(default=True, description="Share the KV blocks of equal prompt beginnings.")
    default_policy: str = Field(
        default="full", description="Eviction policy of requests that name none; full never evicts."
    )
    default_kv_budget: int | float | None = Field(
        default=None,
        description="KV budget of requests that name none: tokens per KV head, or at most 1 for a fraction of prompt "
        "and answer; default: no limit.",
    )

    kv_offload_bytes: int = Field(
        default=2**30,
        ge=0,
        description="Bytes of host memory on each rank for the KV of sequences that had to make room; 0 computes them "
        "again instead.",
    )

    @field_validator("default_policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        try:
            parse_policy(value)
        except InvalidRequestError as error:
            raise ValueError(str(error)) from error
        return value

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        try:
            policy = parse_policy(self.default_policy)
            resolve_budget(policy, budget_from_number(self.default_kv_budget), context_tokens=1)
        except InvalidRequestError as error:
            raise ValueError(f"default_kv_budget: {error}") from error
        return self


class SchedulerSection(_Section):
    """How many requests run, and how many wait."""

    max_num_seqs: int = Field(default=64, ge=1, description="Sequences that an engine runs at once.")
    max_num_batched_tokens: int = Field(
        default=2048, ge=1, description="Tokens of prompts and answers that one step computes at most."
    )
    max_num_waiting: int = Field(default=256, ge=0, description="Sequences that may wait in an engine; beyond: 503.")


class FrontDoorSection(_Section):
    """What clients connect to."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 for all.")
    port: Port = Field(
        default=8000, description="HTTP port; 0 takes a free one. Router i on a node listens on port + i."
    )
    grpc_port: Port = Field(
        default=9000, description="gRPC port; 0 takes a free one. Router i on a node: grpc_port + i."
    )
    api_key: str | None = Field(
        default=None, min_length=1, description="Key that clients must send; default: none needed."
    )
    api_key_file: Path | None = Field(
        default=None, description="File with the key that clients must send, instead of api_key."
    )
    request_timeout_s: float = Field(
        default=600.0, gt=0, description="Seconds after which a request is ended, waiting included."
    )
    max_resumes: int = Field(
        default=3, ge=0, description="How often a request that lost its engine goes on with another."
    )
    resume_timeout_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that a request which lost its engine, or finds none alive, waits for one with room.",
    )


class GovernanceSection(_Section):
    """Who may use how much of the KV cache."""

    cache_manager: bool = Field(
        default=True,
        description="Run the global cache manager; without it each router admits by itself and no tenant has a limit.",
    )
    allocation: str = Field(
        default=DEFAULT_RULE_TEXT,
        description="How a short pool is shared among sequences that may be shrunk: same_cap, proportional, or "
        "price:alpha=A.",
    )
    control_tls: Path | None = Field(
        default=None,
        description="Folder with ca.crt, tls.crt and tls.key for the control plane's mutual TLS (kvorum certs makes "
        "one); default: plain.",
    )
    tenants: dict[TenantName, Tenant] = Field(
        default_factory=dict, description="Tenants by name, in the configuration file only; see docs/tenants.md."
    )

    @field_validator("allocation")
    @classmethod
    def _check_allocation(cls, value: str) -> str:
        parse_rule(value)
        return value

    @field_validator("tenants")
    @classmethod
    def _check_keys(cls, value: dict[str, Tenant]) -> dict[str, Tenant]:
        owners: dict[str, str] = {}
        for name, tenant in value.items():
            for digest in tenant.api_key_sha256:
                if owners.setdefault(digest, name) != name:
                    raise ValueError(f"{name} and {owners[digest]} have the same API key")
        return value


class ObservabilitySection(_Section):
    """What is told of requests beside /metrics."""

    log_format: LogFormat = Field(
        default="text",
        description="How routers, engines and the cache manager write their logs; json: an object a line.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+$",
        description="Collector of OpenTelemetry traces that speaks OTLP over gRPC, such as http://127.0.0.1:4317; "
        "default: no traces.",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_tracing(cls, value: str | None) -> str | None:
        if value is not None and not _has_opentelemetry():
            raise ValueError("needs OpenTelemetry: pip install 'kvorum[otel]'")
        return value


class ClusterSection(_Section):
    """How many processes, and where."""

    num_routers: int = Field(default=1, ge=1, le=100, description="Processes that clients connect to.")
    router_resource: str | None = Field(
        default=None,
        min_length=1,
        description="Custom Ray resource of nodes that routers may run on; default: any.",
    )
    num_engines: int = Field(default=1, ge=1, description="Replicas of the model; the fewest, with max_engines.")
    max_engines: int | None = Field(
        default=None,
        ge=1,
        description="Engines are added up to this many while KV pools or batches fill, and taken away again; default: "
        "num_engines, always.",
    )
    upscale_delay_s: float = Field(default=10.0, ge=0, description="Seconds of high load before an engine is added.")
    downscale_delay_s: float = Field(
        default=300.0, ge=0, description="Seconds of low load before an engine is taken away."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="Ranks that share one replica.")
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="How Ray places an engine's ranks: PACK on few nodes, SPREAD on many; STRICT_ allows nothing else.",
    )
    num_cpus_per_rank: int | None = Field(
        default=None,
        ge=1,
        description="Cores that a rank computes on; default: on CPUs an equal share of the cluster's, on GPUs one.",
    )
    executor: Literal["ray", "fake"] = Field(
        default="ray", description="ray computes; fake echoes the prompt without a model, to try what stands around it."
    )
    fake_step_delay_s: float = Field(default=0.0, ge=0, description="Seconds that a step of the fake executor takes.")
    startup_timeout_s: float = Field(default=600.0, gt=0, description="Seconds within which everything must be ready.")
    drain_timeout_s: float = Field(default=5.0, ge=0, description="Seconds that running requests get at shutdown.")


# What only one of the two kinds of process looks at. A change of the others' settings restarts none of them.
ONLY_ENGINES = frozenset(
    (
        *("dtype", "device", "backend", "quantization", "prompt_activations"),
        *("kv_cache_memory_bytes", "kv_cache_dtype", "gpu_memory_utilization", "block_size", "enable_prefix_caching"),
        *SchedulerSection.model_fields,
        *("kv_offload_bytes", "allocation"),
        *("num_engines", "max_engines", "upscale_delay_s", "downscale_delay_s"),
        *("tensor_parallel_size", "placement_strategy", "num_cpus_per_rank", "executor", "fake_step_delay_s"),
    )
)
ONLY_ROUTERS = frozenset(
    (
        *FrontDoorSection.model_fields,
        *("default_policy", "default_kv_budget", "chat_template", "seed", "num_routers", "otlp_endpoint"),
    )
)
# What is changed in running processes without starting any of them anew.
CHANGED_IN_PLACE = frozenset(("tenants",))


class ClusterConfig(
    ModelSection,
    CacheSection,
    SchedulerSection,
    FrontDoorSection,
    GovernanceSection,
    ObservabilitySection,
    ClusterSection,
):
    """All settings of one kvorum cluster; see each section."""

    def for_engines(self) -> ClusterConfig:
        """Return the settings that engines look at; all others have their defaults."""
        return self._without(ONLY_ROUTERS | CHANGED_IN_PLACE)

    def for_routers(self) -> ClusterConfig:
        """Return the settings that routers look at; all others have their defaults."""
        return self._without(ONLY_ENGINES)

    def fixed(self) -> ClusterConfig:
        """Return the settings that no running process can change; all others have their defaults."""
        return self._without(CHANGED_IN_PLACE)

    def _without(self, names: Collection[str]) -> ClusterConfig:
        return ClusterConfig.model_construct(**{k: v for k, v in dict(self).items() if k not in names})

    @model_validator(mode="after")
    def _check_engines(self) -> Self:
        if self.max_engines is not None and self.max_engines < self.num_engines:
            raise ValueError(f"max_engines: must be at least num_engines, {self.num_engines}, got {self.max_engines}")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.port and self.grpc_port and abs(self.port - self.grpc_port) < self.num_routers:
            raise ValueError(
                f"grpc_port: {self.grpc_port} collides with port {self.port} (each is the first of {self.num_routers})"
            )
        return self

    @model_validator(mode="after")
    def _check_keys_for_all(self) -> Self:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("api_key_file: api_key is given too")
        for name in ("api_key", "api_key_file"):
            if self.tenants and getattr(self, name) is not None:
                raise ValueError(f"{name}: with tenants, each has keys of its own (api_key_sha256)")
        return self

    @model_validator(mode="after")
    def _check_tenants(self) -> Self:
        if self.tenants and not self.cache_manager:
            raise ValueError("cache_manager: tenants have limits only with the cache manager")
        return self

    @model_validator(mode="after")
    def _check_step(self) -> Self:
        if self.max_num_batched_tokens < self.block_size:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than block_size {self.block_size}, "
                "and prompts are computed by whole blocks"
            )
        return self


def budget_from_number(number: int | float | None) -> int | float | None:
    """Read a budget as people write it: at most 1 is a fraction, whole numbers above are tokens.

    Raises:
        InvalidRequestError: naming `kvorum.kv_budget`.
    """
    if number is None:
        return None
    if number <= 1:
        return float(number)
    if not math.isfinite(number) or number != int(number):
        raise InvalidRequestError(
            f"kv_budget is a fraction up to 1 or a whole number of tokens, got {number}", param="kvorum.kv_budget"
        )
    return int(number)


def read_api_key(config: ClusterConfig) -> str | None:
    """Return the key that clients must send, out of its file where it is in one; raises ConfigError."""
    if config.api_key_file is None:
        return config.api_key
    try:
        key = config.api_key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {config.api_key_file}: cannot be read: {error}") from None
    if not key:
        raise ConfigError(f"api_key_file: {config.api_key_file}: is empty")
    return key


def _has_opentelemetry() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:
        return False
