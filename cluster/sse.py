"""Server-sent events as answers of the HTTP API.

The headers of a stream leave only with its first event, so that what fails before has a real status.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvorum.cluster.calls import Call
from kvorum.cluster.errors import UnforeseenError, http_error_body
from kvorum.kvstore.errors import KvorumError

logger = logging.getLogger(__name__)


def event_text(body: Mapping[str, object]) -> str:
    """Write one event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def event_stream(events: AsyncGenerator[str], call: Call) -> StreamingResponse:
    """Return the answer to a call that streams events, once there is a first one; raises what came instead of it."""
    return _EventStream(_guard(await anext(events), events, call), source=events)


class _EventStream(StreamingResponse):
    """Server-sent events whose source is closed when the client hangs up, not when the garbage collector comes by."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], *, source: AsyncGenerator[str]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._source.aclose()


async def _guard(first: str, rest: AsyncIterator[str], call: Call) -> AsyncIterator[str]:
    """Pass events on; a failure becomes the last event, without the [DONE] that would claim completeness."""
    yield first
    try:
        async for event in rest:
            yield event
    except KvorumError as error:
        call.fail(error)
        yield event_text(http_error_body(error))
    except Exception:
        logger.exception("stream failed")
        call.fail(UnforeseenError())
        yield event_text(http_error_body(UnforeseenError()))
