"""Sends a benchmark's requests to any OpenAI-compatible server and notes when each piece of text comes back.

It often shares its cores with the server, so it does little while requests run: bodies are built before, pieces are
read as they come off the socket, and everything is worked out afterwards from the times.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from kvorum.cluster.bench_summary import RequestResult
from kvorum.cluster.bench_workload import BenchRequest, as_text
from kvorum.kvstore.errors import KvorumError

PromptForm = Literal["ids", "text", "chat"]
OnDone = Callable[[RequestResult], None]

_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_CHARS = 200


class ServerError(KvorumError):
    """The server to be measured could not be reached or serves nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and how they are written.

    base_url: as OpenAI's clients take it, with or without /v1. prompt_form: token ids or words to the completions
    route, or words as a chat. extra: fields added to every request, such as ignore_eos and kvorum's own.
    """

    base_url: str
    model: str
    prompt_form: PromptForm = "ids"
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def url(self, route: str) -> str:
        """Return the address of a route below /v1."""
        return f"{_versioned(self.base_url)}/{route}"


async def find_model(base_url: str, *, api_key: str | None) -> str:
    """Ask a server which model it serves; the first when there are several.

    Raises:
        ServerError: it cannot be reached, or names none.
    """
    url = f"{_versioned(base_url)}/models"
    timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, headers=_headers(api_key)) as response,
        ):
            text = await response.text()
        if response.status != 200:
            raise ServerError(f"GET {url}: {response.status}: {_error_text(text)}")
        return str(json.loads(text)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(f"no server answers at {base_url}: {_reason(error)}") from None
    except (json.JSONDecodeError, KeyError, IndexError, TypeError):
        raise ServerError(f"GET {url} names no model; is this an OpenAI-compatible server?") from None


async def send_closed_loop(
    target: Target, requests: Sequence[BenchRequest], *, concurrency: int, on_done: OnDone
) -> list[RequestResult]:
    """Keep `concurrency` requests running until all are done; results are in the order of their ends."""
    results: list[RequestResult] = []
    waiting = iter([(request, _body(target, request)) for request in requests])

    async def work(session: aiohttp.ClientSession) -> None:
        for request, body in waiting:
            result = await _send(session, target, request, body=body, start_s=time.perf_counter())
            results.append(result)
            on_done(result)

    async with _session(target) as session, asyncio.TaskGroup() as workers:
        for _ in range(min(concurrency, len(requests))):
            workers.create_task(work(session))
    return results


async def send_open_loop(target: Target, requests: Sequence[BenchRequest], *, on_done: OnDone) -> list[RequestResult]:
    """Send each request when it is due, however many run; latencies count from then, not from a late start."""
    results: list[RequestResult] = []
    prepared = [(request, _body(target, request)) for request in requests]
    begin_s = time.perf_counter()

    async def send(session: aiohttp.ClientSession, request: BenchRequest, body: bytes) -> None:
        due_s = begin_s + request.due_s
        await asyncio.sleep(due_s - time.perf_counter())
        result = await _send(session, target, request, body=body, start_s=due_s)
        results.append(result)
        on_done(result)

    async with _session(target) as session, asyncio.TaskGroup() as senders:
        for request, body in prepared:
            senders.create_task(send(session, request, body))
    return results


@dataclass(slots=True)
class _Answer:
    """What has been read of one answer."""

    text_times_s: list[float] = field(default_factory=list)
    usage: Mapping[str, Any] = field(default_factory=dict)
    receipt: Mapping[str, Any] | None = None
    error: str | None = "the stream ended early"

    def read(self, event: bytes, now_s: float) -> None:
        """Take in one server-sent event; all but its data is for others."""
        for line in event.splitlines():
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.error = None
            else:
                self._read_chunk(json.loads(payload), now_s)

    def _read_chunk(self, chunk: Mapping[str, Any], now_s: float) -> None:
        if "error" in chunk:
            self.error = _error_text(json.dumps(chunk))
            return
        choices = chunk.get("choices") or ()
        if any(_has_text(choice) for choice in choices):
            self.text_times_s.append(now_s)
        if any(choice.get("finish_reason") for choice in choices):
            self.error = None  # whole, also when the server sends no [DONE]
        self.usage = chunk.get("usage") or self.usage
        self.receipt = chunk.get("kvorum") or self.receipt


async def _send(
    session: aiohttp.ClientSession, target: Target, request: BenchRequest, *, body: bytes, start_s: float
) -> RequestResult:
    """Send one request and read its answer; whatever goes wrong ends up in the result."""
    answer = _Answer()
    url = target.url("chat/completions" if target.prompt_form == "chat" else "completions")
    try:
        async with session.post(url, data=body, headers=_headers(request.tenant.api_key)) as response:
            if response.status != 200:
                answer.error = f"{response.status}: {_error_text(await response.text())}"
            else:
                async for event, now_s in _events(response):
                    answer.read(event, now_s)
    except json.JSONDecodeError as error:
        answer.error = f"the stream is not JSON: {error}"
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = _reason(error)
    prompt_details = answer.usage.get("prompt_tokens_details") or {}
    return RequestResult(
        tenant=request.tenant.name,
        start_s=start_s,
        end_s=time.perf_counter(),
        asked_tokens=request.max_tokens,
        text_times_s=tuple(answer.text_times_s),
        prompt_tokens=answer.usage.get("prompt_tokens", len(request.prompt)),
        cached_tokens=prompt_details.get("cached_tokens") or 0,
        output_tokens=answer.usage.get("completion_tokens", len(answer.text_times_s)),
        is_counted="completion_tokens" in answer.usage,
        receipt=answer.receipt,
        error=answer.error,
    )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[bytes, float]]:
    """Yield each server-sent event and when it came."""
    rest = b""
    async for piece in response.content.iter_any():
        now_s = time.perf_counter()
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            yield event, now_s
    if rest.strip():
        yield rest, time.perf_counter()


def _session(target: Target) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
    # Some servers close a kept connection just when it is used again; a new one each costs less than a lost request.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout)


def _body(target: Target, request: BenchRequest) -> bytes:
    fields: dict[str, Any] = {
        "model": target.model,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    if target.prompt_form == "chat":
        fields["messages"] = [{"role": "user", "content": as_text(request.prompt)}]
    else:
        fields["prompt"] = list(request.prompt) if target.prompt_form == "ids" else as_text(request.prompt)
    return json.dumps(fields).encode()


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    return headers | {"Authorization": f"Bearer {api_key}"} if api_key else headers


def _versioned(base_url: str) -> str:
    url = base_url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _has_text(choice: Mapping[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def _reason(error: Exception) -> str:
    """Return what a connection died of; a time-out has no text of its own."""
    return str(error) or type(error).__name__


def _error_text(body: str) -> str:
    """Return the message of an error in OpenAI's form, or the beginning of whatever else it is."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (json.JSONDecodeError, KeyError, TypeError):
        text = " ".join(body.split())
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}…"
