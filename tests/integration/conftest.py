"""One Ray cluster for all integration tests: real routers and engines, a fake model, real sockets."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import grpc
import httpx
import pytest

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.launcher import running_cluster
from kvorum.cluster.tenants import Tenant, hash_key
from kvtest.cluster import API_KEY, VISITOR_KEY, ClusterUnderTest

MAX_NUM_SEQS = 16
MAX_NUM_WAITING = 16
REQUEST_TIMEOUT_S = 4.0
# 256 blocks of 16 tokens in all, less than the 8,192 tokens of the model's context.
POOL_BYTES = 256 * 16 * 46_080


@pytest.fixture(scope="package")
def cluster() -> Iterator[ClusterUnderTest]:
    config = ClusterConfig(
        executor="fake",
        fake_step_delay_s=0.005,
        tenants={
            "test": Tenant(api_key_sha256=(hash_key(API_KEY),), is_operator=True, max_waiting=MAX_NUM_WAITING),
            "visitor": Tenant(api_key_sha256=(hash_key(VISITOR_KEY),), ceiling=64, max_requests_per_minute=1),
        },
        port=0,
        grpc_port=0,
        kv_cache_memory_bytes=POOL_BYTES,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_waiting=MAX_NUM_WAITING,
        request_timeout_s=REQUEST_TIMEOUT_S,
        startup_timeout_s=180.0,
        resume_timeout_s=0.5,
    )
    with contextlib.ExitStack() as stack:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own, while it is imported and started
            running = stack.enter_context(
                running_cluster(config, address=None, on_phase=lambda _: None, on_progress=lambda _, __: None)
            )
        http = stack.enter_context(
            httpx.Client(base_url=running.http_urls[0], headers={"Authorization": f"Bearer {API_KEY}"}, timeout=30)
        )
        channel = stack.enter_context(grpc.insecure_channel(running.grpc_targets[0]))
        yield ClusterUnderTest(running, http, channel)
