"""The benchmark's client against servers of every manner, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvorum.cluster.bench_client import PromptForm, ServerError, Target, find_model, send_closed_loop, send_open_loop
from kvorum.cluster.bench_summary import RequestResult
from kvorum.cluster.bench_workload import BenchRequest, Tenant

TENANT = Tenant("t", "secret")


@dataclass
class Server:
    """Answers every completion with what `writes` writes, and notes what it was asked."""

    writes: Sequence[bytes | float] = ()
    status: int = 200
    models: object = field(default_factory=lambda: {"data": [{"id": "first"}, {"id": "second"}]})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def complete(self, http: web.Request) -> web.StreamResponse:
        self.bodies.append(await http.json())
        self.paths.append(http.path)
        self.keys.append(http.headers.get("Authorization"))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        response = web.StreamResponse(status=self.status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for write in self.writes:
            if isinstance(write, float):
                await asyncio.sleep(write)
            else:
                await response.write(write)
        self.running -= 1
        return response

    async def list_models(self, http: web.Request) -> web.Response:
        self.keys.append(http.headers.get("Authorization"))
        return web.Response(text=self.models if isinstance(self.models, str) else json.dumps(self.models))


@contextlib.asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/{route:.*}", server.complete)
    app.router.add_get("/v1/models", server.list_models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def event(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "text": value}])


USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"


def request(due_s: float = 0.0) -> BenchRequest:
    return BenchRequest((7, 8, 9), 4, TENANT, due_s)


def ask(
    server: Server,
    *,
    prompt_form: PromptForm = "ids",
    timeout_s: float = 30.0,
    extra: Mapping[str, object] | None = None,
) -> RequestResult:
    """Send one request and return what became of it."""

    async def main() -> RequestResult:
        async with listening(server) as url:
            target = Target(url, "m", prompt_form, timeout_s, extra or {})
            (result,) = await send_closed_loop(target, [request()], concurrency=1, on_done=lambda _: None)
            return result

    return asyncio.run(main())


def test_text_is_timed_and_tokens_are_the_servers_count() -> None:
    opening = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    result = ask(Server([opening, 0.05, text("a"), 0.1, text("bcd"), USAGE, DONE]))
    assert (result.error, result.output_tokens, result.prompt_tokens, result.asked_tokens) == (None, 4, 3, 4)
    assert result.is_counted
    first, second = result.text_times_s
    assert result.ttft_s >= 0.05
    assert 0.09 < second - first < 0.5
    assert len(result.itls_s) == 3
    assert result.end_s >= second


def test_a_server_without_usage_has_its_pieces_counted() -> None:
    result = ask(Server([text("a"), 0.02, text("b"), DONE]))
    assert (result.output_tokens, result.is_counted, result.prompt_tokens) == (2, False, 3)


def test_events_may_come_in_pieces_with_comments_and_other_line_ends() -> None:
    stream = b": ping\r\n\r\nevent: x\r\n" + text("a").replace(b"\n", b"\r\n") + b"id: 1\n" + text("b") + USAGE + DONE
    writes: list[bytes | float] = []
    for byte in stream:
        writes += [bytes([byte]), 0.0]
    result = ask(Server(writes))
    assert (result.error, len(result.text_times_s), result.output_tokens) == (None, 2, 4)


def test_the_last_event_needs_no_empty_line() -> None:
    assert ask(Server([text("a"), b"data: [DONE]"])).error is None


def test_a_reason_to_finish_is_an_end_as_well() -> None:
    result = ask(Server([text("a"), event(choices=[{"index": 0, "text": "b", "finish_reason": "length"}])]))
    assert (result.error, len(result.text_times_s)) == (None, 2)


def test_a_chat_is_sent_as_words_and_read_from_deltas() -> None:
    server = Server([event(choices=[{"index": 0, "delta": {"content": "a"}}]), DONE])
    result = ask(server, prompt_form="chat")
    assert len(result.text_times_s) == 1
    assert server.paths == ["/v1/chat/completions"]
    (message,) = server.bodies[0]["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 3


def test_a_request_says_all_that_was_asked() -> None:
    server = Server([DONE])
    ask(server, extra={"ignore_eos": True, "kvorum": {"policy": "h2o"}})
    assert server.paths == ["/v1/completions"]
    assert server.keys == ["Bearer secret"]
    assert server.bodies == [
        {
            "model": "m",
            "prompt": [7, 8, 9],
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "kvorum": {"policy": "h2o"},
        }
    ]


def test_text_prompts_go_to_the_completions_route() -> None:
    server = Server([DONE])
    ask(server, prompt_form="text")
    assert server.paths == ["/v1/completions"]
    assert len(server.bodies[0]["prompt"].split()) == 3


def test_a_receipt_is_kept() -> None:
    receipt = {"policy": "h2o", "retained_mass": 0.5}
    assert ask(Server([text("a"), event(choices=[], kvorum=receipt), DONE])).receipt == receipt


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (Server([b'{"error": {"message": "full", "code": "x"}}'], status=503), "503: full"),
        (Server([b"<html>\n gateway </html>"], status=502), "502: <html> gateway </html>"),
        (Server([b'{"detail": "Not Found"}'], status=404), '404: {"detail": "Not Found"}'),
        (Server([b"x" * 1000], status=500), f"500: {'x' * 200}…"),
        (Server([text("a"), event(error={"message": "engine lost"})]), "engine lost"),
        (Server([text("a"), event(error="gone")]), "gone"),
        (Server([text("a")]), "the stream ended early"),
        (Server([b"data: {broken\n\n", DONE]), "the stream is not JSON"),
    ],
)
def test_what_goes_wrong_is_the_result(server: Server, error: str) -> None:
    result = ask(server)
    assert result.error
    assert result.error.startswith(error)


def test_a_server_that_says_nothing_is_given_up() -> None:
    assert ask(Server([text("a"), 1.0, DONE]), timeout_s=0.2).error == "TimeoutError"


def test_nobody_listening_is_a_result_too() -> None:
    async def main() -> None:
        (result,) = await send_closed_loop(
            Target("http://127.0.0.1:1", "m"), [request()], concurrency=1, on_done=lambda _: None
        )
        assert result.error
        assert "Cannot connect" in result.error

    asyncio.run(main())


def test_a_closed_loop_keeps_just_so_many_running() -> None:
    server, seen = Server([0.02, text("a"), DONE]), list[RequestResult]()

    async def main() -> None:
        async with listening(server) as url:
            results = await send_closed_loop(Target(url, "m"), [request()] * 10, concurrency=3, on_done=seen.append)
            assert results == seen

    asyncio.run(main())
    assert server.most_running == 3
    assert len(seen) == 10


def test_an_open_loop_sends_when_due_and_counts_from_then() -> None:
    server, seen = Server([0.3, text("a"), DONE]), list[RequestResult]()

    async def main() -> None:
        async with listening(server) as url:
            requests = [request(0.0), request(0.05), request(0.2)]
            await send_open_loop(Target(url, "m"), requests, on_done=seen.append)

    asyncio.run(main())
    assert server.most_running == 3
    first, second, third = sorted(seen, key=lambda result: result.start_s)
    assert second.start_s - first.start_s == pytest.approx(0.05)
    assert third.start_s - first.start_s == pytest.approx(0.2)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_first_model_served_is_found(suffix: str) -> None:
    server = Server()

    async def main() -> None:
        async with listening(server) as url:
            assert await find_model(url + suffix, api_key="k") == "first"

    asyncio.run(main())
    assert server.keys == ["Bearer k"]


@pytest.mark.parametrize("models", [{"data": []}, {}, [], "", {"data": [3]}])
def test_a_server_that_names_no_model_is_said_to(models: object) -> None:
    async def main() -> None:
        async with listening(Server(models=models)) as url:
            with pytest.raises(ServerError, match="names no model; is this an OpenAI-compatible server"):
                await find_model(url, api_key=None)

    asyncio.run(main())


def test_a_server_that_is_not_there_is_said_to_be_not() -> None:
    with pytest.raises(ServerError, match=r"no server answers at http://127.0.0.1:1: "):
        asyncio.run(find_model("http://127.0.0.1:1", api_key=None))
