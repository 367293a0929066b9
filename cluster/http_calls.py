"""Notes each HTTP request of the API in a Call, from before its body is read until its answer is sent."""

from __future__ import annotations

from typing import Final, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvorum.cluster.calls import Call
from kvorum.cluster.frontend import Frontend

GENERATING: Final = frozenset(("/v1/chat/completions", "/v1/completions"))
# Each with all that is below it.
_OTHERS: Final = ("/v1/models", "/tokenize", "/detokenize", "/operator", "/console/stream", "/console/learn")


class NoteCalls:
    """ASGI middleware; what is no call of the API (probes, scrapes, unknown paths) passes it unnoted."""

    def __init__(self, app: ASGIApp, frontend: Frontend) -> None:
        self._app = app
        self._frontend = frontend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application inside a Call."""
        method = method_of(scope["path"]) if scope["type"] == "http" else None
        # One that does not post asks for nothing, and is told so.
        if method is None or (method in GENERATING and scope["method"] != "POST"):
            await self._app(scope, receive, send)
            return
        headers = dict(Headers(scope=scope))
        with self._frontend.call("http", method, generates=method in GENERATING, headers=headers) as call:
            scope.setdefault("state", {})["call"] = call
            await self._app(scope, receive, send)


def call_of(http: Request) -> Call:
    """Return the Call of a request for one of the API's routes."""
    return cast("Call", http.state.call)


def method_of(path: str) -> str | None:
    """Return what calls of a path are counted as; None for what is no call, and for paths that clients make up."""
    if path in GENERATING:
        return path
    return next((known for known in _OTHERS if path == known or path.startswith(f"{known}/")), None)
