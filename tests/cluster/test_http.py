"""The HTTP API, route by route, on an engine whose answers are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.http import create_app
from kvtest.servers import http_client
from kvtest.stack import DEFAULT_INFO, Stack, running_stack
from kvtest.waiting import eventually

Scenario = Callable[[httpx.AsyncClient, Stack], Awaitable[None]]


def run(scenario: Scenario, config: ClusterConfig | None = None, **settings: object) -> None:
    async def main() -> None:
        async with running_stack(config, **cast("Any", settings)) as stack, http_client(stack) as client:
            await scenario(client, stack)
            await stack.wait_until_idle()

    asyncio.run(main())


def events_of(response: httpx.Response) -> list[Any]:
    """Parse a stream of server-sent events; [DONE] stays text."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


async def completion(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5} | fields)


async def chat(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    messages = [{"role": "user", "content": "hi"}]
    return await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8} | fields)


def assert_error(response: httpx.Response, status: int, code: str | None, param: str | None, text: str = "") -> None:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert text in error["message"]


def test_a_completion_has_text_usage_and_receipt() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        body = (await completion(client)).json()
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        assert body["model"] == "tiny"
        assert body["choices"] == [{"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length"}]
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        receipt = body["kvorum"]
        assert receipt.pop("kv_page_seconds") > 0
        assert receipt.pop("queued_ms") > 0
        assert receipt == {
            "engine": "engine-0",
            "policy": "full",
            "kv_budget": None,
            "prompt_tokens_cached": 0,
            "kv_tokens_held": 7,
            "kv_tokens_evicted": 0,
            "retained_mass": 1.0,
            "preemptions": 0,
            "evicted_in_prefill": False,
            "shrinks": 0,
            "offloads": 0,
            "resumes": 0,
        }

    run(scenario)


def test_a_chat_renders_the_template_and_answers_with_a_message() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        body = (await chat(client)).json()
        assert body["object"] == "chat.completion"
        message = {"role": "assistant", "content": "user: hi", "refusal": None}
        assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
        assert body["usage"]["prompt_tokens"] == len("user: hi\nassistant:")

    run(scenario)


def test_a_chat_streams_role_text_reason_and_receipt() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        events = events_of(await chat(client, stream=True, max_tokens=2))
        assert events.pop() == "[DONE]"
        assert len({event["id"] for event in events}) == 1
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert all("usage" not in event for event in events)
        assert [event["choices"][0] for event in events] == [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
            {"index": 0, "delta": {"content": "u"}, "logprobs": None, "finish_reason": None},
            {"index": 0, "delta": {"content": "s"}, "logprobs": None, "finish_reason": None},
            {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"},
        ]
        assert ["kvorum" in event for event in events] == [False, False, False, True]

    run(scenario)


def test_a_stream_with_usage_has_it_null_until_a_chunk_of_its_own() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        response = await completion(client, stream=True, stream_options={"include_usage": True}, max_tokens=2)
        *chunks, usage, done = events_of(response)
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 2
        assert usage["kvorum"]["policy"] == "full"
        assert done == "[DONE]"

    run(scenario)


def test_n_choices_and_several_prompts_come_in_order() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        body = (await completion(client, prompt=["ab", "xyz"], n=2, max_tokens=3)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in body["choices"]] == ["aba", "aba", "xyz", "xyz"]
        assert body["usage"]["prompt_tokens"] == 5
        assert body["usage"]["completion_tokens"] == 12
        assert body["kvorum"]["kv_tokens_held"] == 4 + 4 + 5 + 5

    run(scenario)


def test_prompt_tokens_found_in_the_prefix_cache_are_reported() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        prompts = ["a" * 40, "b" * 40]
        cached = []
        for _again in range(2):
            body = (await completion(client, prompt=prompts, n=2)).json()
            cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[1] == 32 + 32

    run(scenario)


def test_a_stream_of_n_choices_gives_each_a_role_and_a_reason() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        *events, done = events_of(await chat(client, stream=True, n=3, max_tokens=4))
        assert done == "[DONE]"
        for index in range(3):
            choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"].get("content", "") for choice in choices) == "user"
            assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]

    run(scenario)


def test_prompts_may_be_token_ids() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        assert (await completion(client, prompt=[97, 98])).json()["choices"][0]["text"] == "ababa"
        body = (await completion(client, prompt=[[97], [98]], max_tokens=2)).json()
        assert [choice["text"] for choice in body["choices"]] == ["aa", "bb"]

    run(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_left_out(stream: bool) -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        response = await completion(client, prompt="abcdef", max_tokens=100, stop=["zz", "de"], stream=stream)
        if stream:
            *events, done = events_of(response)
            assert done == "[DONE]"
            assert "".join(event["choices"][0]["text"] for event in events) == "abc"
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            choice = response.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
            assert response.json()["usage"]["completion_tokens"] == 5

    run(scenario, step_delay_s=0.005)


def test_an_end_token_ends_the_answer() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        choice = (await completion(client, prompt="ab<end>", max_tokens=9)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
        choice = (await completion(client, prompt="ab<end>", max_tokens=6, ignore_eos=True)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abab", "length")
        fields = {"ignore_eos": True, "skip_special_tokens": False}
        choice = (await completion(client, prompt="ab<end>", max_tokens=4, **fields)).json()["choices"][0]
        assert choice["text"] == "ab<end>a"
        choice = (await completion(client, stop_token_ids=[98])).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")

    run(scenario)


def test_characters_are_never_split() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        *events, _done = events_of(await completion(client, prompt="é😀", max_tokens=6, stream=True))
        texts = [event["choices"][0]["text"] for event in events]
        assert texts == ["é", "😀", ""]
        *events, _done = events_of(await completion(client, prompt="é😀", max_tokens=4, stream=True))
        assert [event["choices"][0]["text"] for event in events] == ["é", "\ufffd", ""]

    run(scenario)


def test_chat_logprobs_report_each_token_and_its_alternatives() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        body = (await chat(client, max_tokens=2, logprobs=True, top_logprobs=2)).json()
        assert body["choices"][0]["logprobs"] == {
            "content": [
                {
                    "token": "u",
                    "logprob": 0.0,
                    "bytes": [117],
                    "top_logprobs": [
                        {"token": "u", "logprob": 0.0, "bytes": [117]},
                    ],
                },
                {
                    "token": "s",
                    "logprob": 0.0,
                    "bytes": [115],
                    "top_logprobs": [
                        {"token": "s", "logprob": 0.0, "bytes": [115]},
                    ],
                },
            ],
            "refusal": None,
        }
        *events, _done = events_of(await chat(client, max_tokens=2, logprobs=True, stream=True))
        content = [event["choices"][0]["logprobs"] for event in events]
        assert [entry and entry["content"][0]["token"] for entry in content] == [None, "u", "s", None]

    run(scenario)


def test_completion_logprobs_have_offsets() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        expected = {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [0.0, 0.0, 0.0],
            "top_logprobs": [{"a": 0.0}, {"b": 0.0}, {"c": 0.0}],
            "text_offset": [0, 1, 2],
        }
        body = (await completion(client, max_tokens=3, logprobs=1)).json()
        assert body["choices"][0]["logprobs"] == expected
        *events, _done = events_of(await completion(client, max_tokens=3, logprobs=1, stream=True))
        logprobs = [event["choices"][0]["logprobs"] for event in events[:-1]]
        assert {key: [value for entry in logprobs for value in entry[key]] for key in expected} == expected

    run(scenario)


def test_echo_puts_the_prompt_first() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        assert (await completion(client, echo=True)).json()["choices"][0]["text"] == "abcabcab"
        *events, _done = events_of(await completion(client, echo=True, stream=True))
        assert events[0]["choices"][0]["text"] == "abc"
        assert "".join(event["choices"][0]["text"] for event in events) == "abcabcab"
        assert_error(await completion(client, echo=True, logprobs=1), 400, "invalid_value", "logprobs")

    run(scenario)


def test_a_completion_without_max_tokens_has_sixteen_or_what_fits() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        body = (await client.post("/v1/completions", json={"prompt": "a"})).json()
        assert body["choices"][0]["text"] == "a" * 16
        body = (await client.post("/v1/completions", json={"prompt": "a" * 30})).json()
        assert body["usage"]["completion_tokens"] == 2
        body = (await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})).json()
        assert body["usage"]["total_tokens"] == 32

    run(scenario, info=replace(DEFAULT_INFO, max_model_len=32))


def test_content_may_come_in_parts_and_developers_are_the_system() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": parts}]
        body = (await chat(client, messages=messages, max_tokens=10)).json()
        assert body["choices"][0]["message"]["content"] == "system: ab"

    run(scenario)


def test_models_are_listed_and_looked_up() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["tiny"]
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 512
        assert_error(await client.get("/v1/models/org/other"), 404, "model_not_found", None)

    run(scenario)


def test_text_is_tokenised_and_back() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        body = (await client.post("/tokenize", json={"prompt": "aé"})).json()
        assert body == {"tokens": [97, 195, 169], "count": 3, "max_model_len": 512}
        chat_body = {"messages": [{"role": "user", "content": "x"}]}
        body = (await client.post("/tokenize", json=chat_body)).json()
        assert bytes(body["tokens"]) == b"user: x\nassistant:"
        body = (await client.post("/detokenize", json={"tokens": [97, 195, 169, 256]})).json()
        assert body == {"prompt": "aé<end>"}
        assert_error(await client.post("/detokenize", json={"tokens": [257]}), 400, "invalid_value", "tokens")
        assert_error(await client.post("/tokenize", json={}), 400, "invalid_value", "prompt")

    run(scenario)


def test_operators_see_health_version_and_metrics() -> None:
    async def scenario(client: httpx.AsyncClient, stack: Stack) -> None:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/version")).json()["version"]
        await completion(client)
        await asyncio.sleep(0.1)
        text = (await client.get("/metrics")).text
        for line in (
            'kvorum_num_requests_running{engine="engine-0"} 0.0',
            'kvorum_kv_cache_usage_perc{engine="engine-0"} 0.0',
            'kvorum_kv_blocks_free{engine="engine-0"} 64.0',
            'kvorum_engine_prompt_tokens_total{engine="engine-0"} 3.0',
            'kvorum_engine_generation_tokens_total{engine="engine-0"} 5.0',
            'kvorum_request_success_total{finished_reason="length"} 1.0',
        ):
            assert line in text
        stack.host.ranks_are_alive = False
        await asyncio.sleep(0.1)
        assert (await client.get("/health")).status_code == 503

    run(scenario)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_key_is_needed_on_every_inference_route_when_one_is_set(tmp_path: Path, in_file: bool) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    config = ClusterConfig(api_key_file=tmp_path / "key") if in_file else ClusterConfig(api_key="s3cret")

    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        inference = [("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")]
        inference += [("GET", "/v1/models/tiny"), ("POST", "/tokenize"), ("POST", "/detokenize")]
        for method, path in inference:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
                response = await client.request(method, path, headers=headers)
                assert_error(response, 401, "invalid_api_key", None)
                assert response.json()["error"]["type"] == "authentication_error"
        client.headers["Authorization"] = "Bearer s3cret"
        assert (await completion(client)).status_code == 200
        del client.headers["Authorization"]
        for path in ("/health", "/version", "/metrics"):
            assert (await client.get(path)).status_code == 200

    run(scenario, config)


def test_unknown_routes_and_methods_have_errors_of_the_same_shape() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        assert_error(await client.get("/v1/nothing"), 404, None, None, "GET /v1/nothing")
        response = await client.get("/v1/completions")
        assert_error(response, 405, None, None)
        assert response.headers["Allow"] == "POST"

    run(scenario)


def test_fields_that_nobody_knows_are_ignored_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        assert (await completion(client, colour="blue", user="me", metadata={"a": 1})).status_code == 200

    with caplog.at_level("INFO", logger="kvorum.cluster.http"):
        run(scenario)
    assert [record.message for record in caplog.records if "colour" in record.message] == [
        'ignored unknown fields ["colour"]'
    ]


def test_an_unforeseen_error_is_a_500_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: httpx.AsyncClient, stack: Stack) -> None:
        def explode(*_: object) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(stack.frontend, "plan", explode)
        response = await completion(client)
        assert_error(response, 500, "internal_error", None)
        assert "secret" not in response.text

    run(scenario)


def test_a_failure_nobody_foresaw_ends_a_stream_without_done(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        def explode(*_: object) -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr("kvorum.cluster.answers.CompletionFormat.closing", explode)
        *chunks, last = events_of(await completion(client, stream=True, max_tokens=2))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        assert last["error"]["code"] == "internal_error"
        assert "secret" not in last["error"]["message"]

    run(scenario)


def test_an_engine_lost_in_mid_stream_is_an_event_without_done() -> None:
    async def scenario(client: httpx.AsyncClient, stack: Stack) -> None:
        streaming = asyncio.create_task(completion(client, stream=True, max_tokens=400))
        await eventually(lambda: stack.host.engine.stats().generation_tokens_total > 3)
        await stack.host.server.stop()
        *chunks, last = events_of(await streaming)
        assert last["error"]["code"] == "engine_lost"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert_error(await completion(client), 503, "engine_lost", None)

    run(scenario, ClusterConfig(resume_timeout_s=0.5), step_delay_s=0.01)


def test_a_full_cluster_and_a_late_answer_have_their_status() -> None:
    async def scenario(client: httpx.AsyncClient, stack: Stack) -> None:
        running = [asyncio.create_task(completion(client, max_tokens=400)) for _ in range(4)]
        await eventually(lambda: stack.host.engine.stats().num_running == 4)
        running += [asyncio.create_task(completion(client, max_tokens=400)) for _ in range(4)]
        await eventually(lambda: stack.frontend.num_running == 8)
        refused = await completion(client)
        assert_error(refused, 503, "kv_capacity_exhausted", None)
        assert refused.headers["Retry-After"] == "1"
        for response in await asyncio.gather(*running):
            assert_error(response, 504, "timeout", None)
        text = (await client.get("/metrics")).text
        assert 'kvorum_admission_rejections_total{reason="kv_capacity_exhausted",tenant="default"} 1.0' in text

    run(scenario, ClusterConfig(request_timeout_s=0.5), step_delay_s=0.02)


def test_evictions_are_counted_by_policy() -> None:
    async def scenario(client: httpx.AsyncClient, _: Stack) -> None:
        body = (await completion(client, max_tokens=40, kvorum={"policy": "h2o", "kv_budget": 16})).json()
        await asyncio.sleep(0.1)
        text = (await client.get("/metrics")).text
        evicted = body["kvorum"]["kv_tokens_evicted"]
        assert f'kvorum_engine_evicted_tokens_total{{engine="engine-0",policy="h2o"}} {evicted}.0' in text

    run(scenario)


def test_a_client_that_hangs_up_while_it_sends_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running_stack() as stack:
            sent: list[Any] = []

            async def receive() -> dict[str, object]:
                return {"type": "http.disconnect"}

            async def send(message: Mapping[str, Any]) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": [], "query_string": b""}
            await create_app(stack.frontend)(scope, receive, send)
            assert sent[0]["status"] == 499

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
