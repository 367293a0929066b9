"""The composition root: a configuration becomes a Serve application.

The only module of the control plane that knows engines; it imports them inside the replicas that run them, since they
bring torch along.
"""

from __future__ import annotations

import asyncio
import hashlib
from importlib.metadata import version
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.engine_deployment import EngineReplica, ReportBytes
from kvorum.cluster.model import resolve_checkpoint
from kvorum.cluster.router import TENANTS, IngressRouter
from kvorum.workers.engine_server import Engine

APP_NAME = "kvorum"
ROUTER_NAME = "Router"
ENGINE_NAME = "Engine"
# Serve's own limit must never be the one that turns a client away: admission is ours, with its typed errors.
_NO_LIMIT = 1_000_000
# An engine's ranks are killed in this time once it is drained; one that is stuck takes Ray 5 s.
_STOP_TIMEOUT_S = 8.0
# Over which an engine's load is averaged before engines are added or taken away.
_LOOK_BACK_S = 15.0


def build_app(config: ClusterConfig, *, replaces_another: bool = False) -> serve.Application:
    """Lay out routers and engines.

    replaces_another: this rolls out over an application that serves; an engine then counts as started only when its
    model is loaded, so that the next old one stops no sooner.
    """
    engines = serve.deployment(
        name=ENGINE_NAME,
        max_ongoing_requests=_NO_LIMIT,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=1.0,
        health_check_timeout_s=3.0,
        graceful_shutdown_timeout_s=config.drain_timeout_s + _STOP_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        **_engine_count(config),
    )(EngineReplica)
    routers = serve.deployment(
        name=ROUTER_NAME,
        num_replicas=config.num_routers,
        max_ongoing_requests=_NO_LIMIT,
        ray_actor_options={
            "num_cpus": 0,
            # A trace of the resource, since routers are not counted by it.
            **({"resources": {config.router_resource: 0.001}} if config.router_resource else {}),
        },
        health_check_period_s=1.0,
        health_check_timeout_s=3.0,
        graceful_shutdown_timeout_s=config.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        # What Serve hands to running routers, too.
        user_config={"tenants": TENANTS.dump_python(config.tenants, mode="json")},
    )(IngressRouter)
    bound_engines = _versioned(engines, config.for_engines()).bind(
        config.for_engines(), build_engine, waits_for_model=replaces_another
    )
    fixed = config.for_routers().fixed()
    return _versioned(routers, fixed).bind(fixed, bound_engines)


def _versioned(deployment: serve.Deployment, config: ClusterConfig) -> serve.Deployment:
    """Tell Serve that replicas need not start anew as long as their own settings are the same.

    Serve has an argument for that, but takes it from its own code only; without it every update restarts everything.
    """
    text = f"{version('kvorum')} {config.model_dump_json()}"
    return deployment.options(version=hashlib.sha256(text.encode()).hexdigest()[:16], _internal=True)


def _engine_count(config: ClusterConfig) -> dict[str, Any]:
    """Return Serve's options for how many engines there are."""
    if config.max_engines is None:
        return {"num_replicas": config.num_engines}
    policy = AutoscalingPolicy(policy_function="kvorum.cluster.autoscaling:scale_engines")
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=config.num_engines,
            max_replicas=config.max_engines,
            upscale_delay_s=config.upscale_delay_s,
            downscale_delay_s=config.downscale_delay_s,
            look_back_period_s=_LOOK_BACK_S,
            policy=policy,
        )
    }


async def build_engine(config: ClusterConfig, engine_id: str, report_bytes: ReportBytes) -> Engine:
    """Build the engine that the configuration asks for; runs inside an engine's replica."""
    if config.executor == "fake":
        return await asyncio.to_thread(_build_fake_engine, config, engine_id)
    return await _build_ray_engine(config, engine_id, report_bytes)


async def _build_ray_engine(config: ClusterConfig, engine_id: str, report_bytes: ReportBytes) -> Engine:
    from kvorum.workers.config import EngineConfig
    from kvorum.workers.group import build_ray_engine

    engine_config = EngineConfig(
        model=config.model,
        tensor_parallel_size=config.tensor_parallel_size,
        placement_strategy=config.placement_strategy,
        model_name=config.served_model_name or resolve_checkpoint(config).name,
        dtype=config.dtype,
        device=config.device,
        backend=config.backend,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        prompt_activations=config.prompt_activations,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_waiting=config.max_num_waiting,
        enable_prefix_caching=config.enable_prefix_caching,
        allocation=config.allocation,
        kv_offload_bytes=config.kv_offload_bytes,
        num_cpus=config.num_cpus_per_rank,
    )
    return await build_ray_engine(
        engine_config,
        num_engines=config.max_engines or config.num_engines,
        engine_id=engine_id,
        on_progress=report_bytes,
    )


def _build_fake_engine(config: ClusterConfig, engine_id: str) -> Engine:
    from kvorum.workers.config import CPU_POOL_BYTES
    from kvorum.workers.fake_engine import build_fake_engine
    from kvorum.workers.request import EngineInfo

    checkpoint = resolve_checkpoint(config)
    block_bytes = checkpoint.spec.kv_bytes_per_token(4) * config.block_size
    info = EngineInfo(
        engine_id=engine_id,
        model_name=config.served_model_name or checkpoint.name,
        max_model_len=config.max_model_len or checkpoint.spec.max_position,
        vocab_size=checkpoint.spec.vocab_size,
        num_blocks=max(1, (config.kv_cache_memory_bytes or CPU_POOL_BYTES) // block_bytes),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_waiting=config.max_num_waiting,
    )
    return build_fake_engine(
        info, max_num_batched_tokens=config.max_num_batched_tokens, step_delay_s=config.fake_step_delay_s
    )
