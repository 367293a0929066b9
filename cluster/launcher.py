"""Brings a cluster up and down again: ports, Ray, Serve, engines, in this order and back.

Ray and Serve read their settings from the environment when they are first imported, so this module sets them and
imports Ray only afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvorum.cluster.addresses import check_reachable, choose_ports, url_host
from kvorum.cluster.config import MAX_REQUEST_BYTES, ClusterConfig, ConfigError, read_api_key
from kvorum.cluster.manager.tls import read_tls
from kvorum.kernels.cpu.build import CompilerError, library_path
from kvorum.kvstore.errors import DeadlineError, KvorumError

if TYPE_CHECKING:
    from kvorum.cluster.engine_deployment import LoadProgress

GRPC_SERVICERS = (
    "kvorum.protos.inference.v1.inference_pb2_grpc.add_InferenceServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
    "smg_grpc_proto.generated.vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server",
)
# Loopback, but not the address that Ray silently replaces.
_LOCAL_NODE_IP = "127.0.0.2"
_LOCAL_OBJECT_STORE_BYTES = 100 * 2**20
_POLL_S = 0.1
_CONTROL_TIMEOUT_S = 10.0
# Clients know the routers, and everybody the cache manager, by these.
_PORTS = ("port", "grpc_port")
_FIXED_WHILE_RUNNING = (*_PORTS, "host", "num_routers", "cache_manager", "control_tls")


class StartupError(KvorumError):
    """The cluster did not come up."""


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Where clients reach a cluster that is up: one URL and one gRPC target for each router."""

    config: ClusterConfig
    http_urls: tuple[str, ...]
    grpc_targets: tuple[str, ...]


OnPhase = Callable[[str], None]
OnProgress = Callable[["LoadProgress", str], None]


@contextlib.contextmanager
def running_cluster(
    config: ClusterConfig, *, address: str | None, on_phase: OnPhase, on_progress: OnProgress
) -> Iterator[RunningCluster]:
    """Start a cluster, and stop it when the context ends, however it ends.

    Args:
        config: what to run.
        address: of a Ray cluster that is up and has no Serve yet, `auto` for this machine's; None starts one for us
            alone.
        on_phase: told what goes on, in words.
        on_progress: told how far an engine has loaded, with the engine's name.
    """
    # What is wrong with these is said before anything is started.
    read_api_key(config)
    if config.control_tls is not None:
        read_tls(config.control_tls)
    ports = choose_ports(
        config.host, wanted=(config.port, config.grpc_port), count=config.num_routers, names=("port", "grpc_port")
    )
    config = config.model_copy(update={"port": ports[0], "grpc_port": ports[1]})
    with contextlib.ExitStack() as cleanup:
        if address is None and config.executor == "ray":
            _prepare_kernels(config, on_phase)
        on_phase("starting Ray")
        cleanup.enter_context(_ray(config, address))
        on_phase("starting routers and engines")
        cleanup.enter_context(_serve(config, is_local=address is None))
        on_phase("loading the model")
        _wait_until_ready(config, on_progress)
        host = url_host(config.host)
        yield RunningCluster(
            config,
            tuple(f"http://{host}:{config.port + index}" for index in range(config.num_routers)),
            tuple(f"{host}:{config.grpc_port + index}" for index in range(config.num_routers)),
        )


def update_cluster(cluster: RunningCluster, config: ClusterConfig) -> RunningCluster:
    """Roll new settings out over a running cluster, an engine at a time, so that requests go on; return when done.

    Raises:
        ConfigError: a setting cannot be changed while the cluster runs.
        StartupError: the new engines do not come up; those that were not replaced yet go on.
    """
    from ray import serve

    from kvorum.cluster.app import APP_NAME, build_app

    for name in _FIXED_WHILE_RUNNING:
        old, new = getattr(cluster.config, name), getattr(config, name)
        was_any = new == 0 and name in _PORTS
        if new != old and not was_any:
            raise ConfigError(f"{name}: cannot be changed from {old} to {new} while the cluster runs")
    config = config.model_copy(update={name: getattr(cluster.config, name) for name in _FIXED_WHILE_RUNNING})
    try:
        serve.run(build_app(config, replaces_another=True), name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise StartupError(f"the new settings do not work: {error}") from error
    return replace(cluster, config=config)


def _prepare_kernels(config: ClusterConfig, on_phase: OnPhase) -> None:
    """Compile here, where it is seen, what ranks on this machine would compile."""
    if config.device == "cuda" or config.backend not in ("auto", "cpu"):
        return
    on_phase("preparing the CPU kernels")
    try:
        library_path()
    except CompilerError as error:
        logging.getLogger(__name__).warning("the slow reference back end will compute: %s", error)


@contextlib.contextmanager
def _ray(config: ClusterConfig, address: str | None) -> Iterator[None]:
    os.environ.update(serve_environment(config))
    if address is None:
        # All of this cluster's processes belong to one user on one machine and listen on the loopback.
        os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    try:
        if address is None:
            ray.init(
                include_dashboard=False,
                object_store_memory=_LOCAL_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=_LOCAL_NODE_IP,
            )
        else:
            _join(address)
        yield
    finally:
        ray.shutdown()


def _join(address: str) -> None:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    if address != "auto":
        check_reachable(address)  # Ray itself would try for many minutes
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise StartupError(f"cannot join the Ray cluster at {address}: {error}") from error
    with contextlib.suppress(ValueError):
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        raise StartupError(
            f"Ray Serve runs at {address} already, with ports that cannot be changed; shut it down first"
        )


@contextlib.contextmanager
def _serve(config: ClusterConfig, *, is_local: bool) -> Iterator[None]:
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions

    from kvorum.cluster.app import APP_NAME, build_app
    from kvorum.cluster.manager.actor import kill_manager

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        # Clients reach the routers' own ports (direct ingress). The proxy that Serve starts all the same gets any; that
        # of gRPC must have a number, or Serve takes gRPC to be off.
        proxy_grpc_port = choose_ports(config.host, wanted=(0,), count=1, names=("grpc_port",))[0]
        serve.start(
            proxy_location=ProxyLocation.HeadOnly,
            http_options=HTTPOptions(host=config.host, port=0),
            grpc_options=gRPCOptions(port=proxy_grpc_port, grpc_servicer_functions=list(GRPC_SERVICERS)),
            logging_config={"log_level": "ERROR", "enable_access_log": False},
            controller_options={"runtime_env": {"env_vars": serve_environment(config)}},
        )
        serve.run(build_app(config), name=APP_NAME, route_prefix="/")
        yield
        _drain(config)
    finally:
        if config.cache_manager:
            kill_manager()
        # Our own Ray takes everything with it when it stops; in another's, nothing of ours may stay.
        if not is_local:
            serve.delete(APP_NAME)
            if not serve.status().applications:
                serve.shutdown()


def serve_environment(config: ClusterConfig) -> dict[str, str]:
    """Return Serve's settings that exist only as environment variables; every node of the cluster must have them."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Handles carry control only here, also from this process, which has no event loop for them to run in.
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
        # Ranges end before their maximum.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(config.port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(config.port + config.num_routers),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(config.grpc_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(config.grpc_port + config.num_routers),
        # A router that is started anew must get the only port there is, at once.
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
        # Routers are drained by us before Serve stops them.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
        # Serve reads a message whole before it has seen any key.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(MAX_REQUEST_BYTES),
        "PYTHONSAFEPATH": "1",
    }


def _wait_until_ready(config: ClusterConfig, on_progress: OnProgress) -> None:
    from ray import serve

    from kvorum.cluster.app import APP_NAME, ENGINE_NAME, ROUTER_NAME

    deadline_s = time.monotonic() + config.startup_timeout_s
    engines = serve.get_deployment_handle(ENGINE_NAME, APP_NAME)
    num_ready = 0
    while num_ready < config.num_engines:
        loads: list[LoadProgress] = engines.broadcast("progress").results(timeout_s=_CONTROL_TIMEOUT_S)
        loads.sort(key=lambda load: load.engine_id)
        for index, load in enumerate(loads):
            if load.error:
                raise StartupError(f"engine: {load.error}")
            on_progress(load, f"engine {index}")
        num_ready = sum(load.is_ready for load in loads)
        _pause(deadline_s, config)
    routers = serve.get_deployment_handle(ROUTER_NAME, APP_NAME)
    while routers.broadcast("is_ready").results(timeout_s=_CONTROL_TIMEOUT_S) != [True] * config.num_routers:
        _pause(deadline_s, config)


def _drain(config: ClusterConfig) -> None:
    from ray import serve

    from kvorum.cluster.app import APP_NAME, ROUTER_NAME

    routers = serve.get_deployment_handle(ROUTER_NAME, APP_NAME)
    with contextlib.suppress(TimeoutError):
        routers.broadcast("drain", config.drain_timeout_s).results(
            timeout_s=config.drain_timeout_s + _CONTROL_TIMEOUT_S
        )


def _pause(deadline_s: float, config: ClusterConfig) -> None:
    if time.monotonic() > deadline_s:
        raise DeadlineError(f"the cluster was not ready within startup_timeout_s = {config.startup_timeout_s:g} s")
    time.sleep(_POLL_S)
