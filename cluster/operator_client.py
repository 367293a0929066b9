"""What operators' commands know of a cluster: its state over HTTP, whole and then by changes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from kvorum.cluster.bench_client import ServerError
from kvorum.cluster.manager.types import ClusterView, EngineView, TenantView
from kvorum.cluster.manager.watching import ViewChange, apply

_CONNECT_TIMEOUT_S = 5.0


async def watch_cluster(url: str, *, api_key: str | None) -> AsyncIterator[ClusterView]:
    """Yield the cluster's state now and with each change; raises ServerError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    route = f"{url.rstrip('/')}/operator/cluster/watch"
    view = ClusterView()
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.get(route) as response,
        ):
            if response.status != 200:
                raise ServerError(f"GET {route}: {response.status}: {await _error_text(response)}")
            async for line in response.content:
                if line.startswith(b"data: "):
                    view = apply(view, _change(json.loads(line.removeprefix(b"data: "))))
                    yield view
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"no kvorum answers at {url}: {str(error) or type(error).__name__}") from None


def _change(event: dict[str, Any]) -> ViewChange:
    if "error" in event:
        raise ServerError(str(event["error"]["message"]))
    return ViewChange(
        engines=tuple(EngineView(**engine) for engine in event["engines"]),
        tenants=tuple(TenantView(**tenant) for tenant in event["tenants"]),
        gone_engines=tuple(event["gone_engines"]),
        gone_tenants=tuple(event["gone_tenants"]),
        price=event["price"],
        drift_blocks=event["drift_blocks"],
        oldest_lease_s=event["oldest_lease_s"],
    )


async def _error_text(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    try:
        return str(json.loads(text)["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return text[:200]
