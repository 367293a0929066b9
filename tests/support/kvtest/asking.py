"""Both clients behind one face, so that a test of one is a test of the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from kvorum.client import Answer, AsyncClient, Client, Model, Options, Piece, RetryPolicy
from kvorum.client.messages import Messages, Prompt

OnPiece = Callable[[Piece], Awaitable[None]]
HASTY = RetryPolicy(max_retries=40, first_wait_s=0.01, longest_wait_s=0.05)


class Asker(Protocol):
    """What either client does; a stream calls on_piece with each piece and returns all."""

    async def chat(self, messages: Messages, options: Options = ..., *, timeout_s: float | None = None) -> Answer: ...
    async def complete(self, prompt: Prompt, options: Options = ..., *, timeout_s: float | None = None) -> Answer: ...
    async def tokenize(self, prompt: Messages) -> tuple[int, ...]: ...
    async def models(self) -> tuple[Model, ...]: ...
    async def abort(self, request_id: str) -> None: ...
    async def stream(self, prompt: Prompt, options: Options, on_piece: OnPiece) -> list[Piece]: ...


class Asynchronous(AsyncClient):
    """The asyncio client."""

    async def stream(self, prompt: Prompt, options: Options, on_piece: OnPiece) -> list[Piece]:
        pieces: list[Piece] = []
        async with self.stream_complete(prompt, options) as stream:
            async for piece in stream:
                pieces.append(piece)
                await on_piece(piece)
        return pieces


class Blocking:
    """The blocking client, in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def chat(self, *given: Any, **named: Any) -> Answer:  # noqa: ANN401  # handed on
        return await asyncio.to_thread(self._client.chat, *given, **named)

    async def complete(self, *given: Any, **named: Any) -> Answer:  # noqa: ANN401  # handed on
        return await asyncio.to_thread(self._client.complete, *given, **named)

    async def tokenize(self, prompt: Messages) -> tuple[int, ...]:
        return await asyncio.to_thread(self._client.tokenize, prompt)

    async def models(self) -> tuple[Model, ...]:
        return await asyncio.to_thread(self._client.models)

    async def abort(self, request_id: str) -> None:
        await asyncio.to_thread(self._client.abort, request_id)

    async def stream(self, prompt: Prompt, options: Options, on_piece: OnPiece) -> list[Piece]:
        loop = asyncio.get_running_loop()
        return await asyncio.to_thread(self._read, prompt, options, on_piece, loop)

    def _read(
        self, prompt: Prompt, options: Options, on_piece: OnPiece, loop: asyncio.AbstractEventLoop
    ) -> list[Piece]:
        async def hear(piece: Piece) -> None:
            await on_piece(piece)

        pieces: list[Piece] = []
        with self._client.stream_complete(prompt, options) as stream:
            for piece in stream:
                pieces.append(piece)
                asyncio.run_coroutine_threadsafe(hear(piece), loop).result()
        return pieces


Connect = Callable[..., contextlib.AbstractAsyncContextManager[Asker]]


@contextlib.asynccontextmanager
async def asynchronous(target: str, *, api_key: str | None = None) -> AsyncIterator[Asker]:
    async with Asynchronous(target, api_key=api_key, retry=HASTY) as client:
        yield client


@contextlib.asynccontextmanager
async def blocking(target: str, *, api_key: str | None = None) -> AsyncIterator[Asker]:
    with Client(target, api_key=api_key, retry=HASTY) as client:
        yield Blocking(client)
