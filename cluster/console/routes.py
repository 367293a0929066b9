"""The console's HTTP routes: its pages, its stream and its lessons.

Pages hold nothing and need no key; what fills them does, that of an operator where tenants are configured. All scripts
and styles come from here, and the browser is told to take them from nowhere else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse
from starlette.exceptions import HTTPException

from kvorum.cluster.console.feed import Focus, check_focus, watch
from kvorum.cluster.console.lesson_room import Teach
from kvorum.cluster.frontend import Frontend
from kvorum.cluster.http_calls import call_of
from kvorum.cluster.sse import event_stream, event_text
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.workers.request import RequestId

STATIC = Path(__file__).parent / "static"
_POLICY = ("default-src 'self'", "base-uri 'none'", "form-action 'self'", "frame-ancestors 'none'")
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
}
# The arguments of each lesson.
_LESSONS: dict[str, tuple[str, ...]] = {"caching": (), "pages": (), "evictions": ("budget", "layer", "kv_head")}


def console_routes(frontend: Frontend, teach: Teach) -> APIRouter:
    """Return the routes below /console."""
    routes = APIRouter(prefix="/console", include_in_schema=False)
    pages = {file.name: file for file in STATIC.iterdir()}

    def operator(http: Request) -> str:
        tenant = call_of(http).tenant = frontend.authenticate(http.headers.get("authorization"))
        frontend.tenants.check_operator(tenant)
        return tenant

    @routes.get("")
    async def redirect_to_page() -> Response:
        # Relative, so that it also works behind a gateway that serves this under a path of its own.
        return RedirectResponse("console/")

    @routes.get("/stream")
    async def stream(http: Request) -> Response:
        tenant, focus = operator(http), _focus(http)
        if focus:
            check_focus(focus, frontend.model.spec)
        return await event_stream(_events(frontend, focus, tenant), call_of(http))

    @routes.get("/learn/{lesson}")
    async def learn(http: Request, lesson: str) -> Response:
        operator(http)
        if lesson not in _LESSONS:
            raise HTTPException(404, "there is no such lesson")
        arguments = {name: _integer(http, name) for name in _LESSONS[lesson]}
        return JSONResponse(await teach(lesson, arguments))

    @routes.get("/{name:path}")
    async def page(name: str) -> Response:
        if (file := pages.get(name or "index.html")) is None:
            raise HTTPException(404, "there is no such page")
        return FileResponse(file, headers=_HEADERS)

    return routes


async def _events(frontend: Frontend, focus: Focus | None, tenant: str) -> AsyncGenerator[str]:
    seen = watch(frontend, focus, tenant=tenant)
    try:
        async for each in seen:
            yield event_text(each)
    finally:
        await seen.aclose()


def _focus(http: Request) -> Focus | None:
    """Return the sequence that the query names, if it names one."""
    engine_id, sequence = http.query_params.get("engine"), http.query_params.get("sequence")
    if engine_id is None or sequence is None:
        return None
    return Focus(engine_id, RequestId(sequence), _integer(http, "layer"), _integer(http, "kv_head"))


def _integer(http: Request, name: str) -> int:
    text = http.query_params.get(name, "0")
    try:
        return int(text)
    except ValueError:
        raise InvalidRequestError(f"{name}: must be a whole number, got {text!r}", param=name) from None
