"""Notes each HTTP request of the API in a Call, from before its body is read until its answer is sent."""

from __future__ import annotations

from typing import Final, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvorum.cluster.calls import Call
from kvorum.cluster.frontend import Frontend

GENERATING: Final = frozenset(("/v1/chat/completions", "/v1/completions"))
_OTHERS: Final = frozenset(
    (*("/v1/models", "/tokenize", "/detokenize"), *("/operator/cluster", "/operator/cluster/watch", "/console/stream"))
)
# Calls of these paths and of all below them are counted as one.
_FAMILIES: Final = ("/v1/models", "/console/learn")


class NoteCalls:
    """ASGI middleware; what is no call of the API (probes, scrapes, unknown paths) passes it unnoted."""

    def __init__(self, app: ASGIApp, frontend: Frontend) -> None:
        self._app = app
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application inside a Call."""
        method = _method_of(scope["path"]) if scope["type"] == "http" else None
        if method is None:
            await self._app(scope, receive, send)
            return
        headers = dict(Headers(scope=scope))
        with self._frontend.call("http", method, generates=method in GENERATING, headers=headers) as call:
            scope.setdefault("state", {})["call"] = call
            await self._app(scope, receive, send)


def call_of(http: Request) -> Call:
    """Return the Call of a request for one of the API's routes."""
    return cast("Call", http.state.call)


def _method_of(path: str) -> str | None:
    """Return what calls of a path are counted as; paths that clients make up are none."""
    if path in GENERATING or path in _OTHERS:
        return path
    return next((family for family in _FAMILIES if path.startswith(f"{family}/")), None)
