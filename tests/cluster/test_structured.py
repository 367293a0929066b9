"""What answers must look like is checked at the edge, and reaches the engine as one grammar."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from kvorum.cluster.structured import MAX_GRAMMAR_CHARS, StructuredOutputs, form_of
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvtest.servers import assert_refused, grpc_stub, http_client
from kvtest.stack import Stack, running_stack
from kvtest.tiny_model import byte_tokenizer

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def grammars_of(stack: Stack) -> list[str]:
    return [sequence.request.sampling.grammar for sequence in stack.host.engine.scheduler.sequences()]


async def post(client: httpx.AsyncClient, **fields: object) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3} | fields)


GIVEN = [
    ({"response_format": {"type": "json_object"}}, '"object"'),
    ({"response_format": FORMAT}, "age"),
    ({"structured_outputs": {"json": SCHEMA}}, "age"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "age"),
    ({"structured_outputs": {"regex": "[0-9]+"}}, "[0-9]+"),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, "yes|n"),
    ({"response_format": {"type": "text"}}, None),
    ({}, None),
]


@pytest.mark.parametrize(("fields", "part"), GIVEN)
def test_each_way_of_asking_becomes_a_grammar_that_can_be_followed(fields: dict[str, Any], part: str | None) -> None:
    async def main() -> None:
        async with running_stack(step_delay_s=0.02) as stack, http_client(stack) as client:
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3} | fields
            asked = [
                asyncio.create_task(post(client, **fields)),
                asyncio.create_task(client.post("/v1/chat/completions", json=chat)),
            ]
            while len(grammars := grammars_of(stack)) < 2:
                await asyncio.sleep(0)
            for grammar in grammars:
                assert (part in grammar) if part else grammar == ""
                assert not grammar or LLMatcher.validate_grammar(grammar) == ""
            for response in await asyncio.gather(*asked):
                assert response.status_code == 200, response.text
            await stack.wait_until_idle()

    asyncio.run(main())


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_schema"}}, "response_format", "only then"),
    (
        {"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}},
        "response_format",
        "only then",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
        "response_format.json_schema.schema",
        "strin",
    ),
    ({"structured_outputs": {"json": {"if": {}}}}, "structured_outputs.json", "cannot be followed"),
    ({"structured_outputs": {"json": "{nope"}}, "structured_outputs.json", "no JSON schema"),
    *(
        ({"structured_outputs": {"json": text}}, "structured_outputs.json", "")
        for text in ("[1]", "true", '"x"', "NaN", "[" * 5000, '{"minimum": 1e999}', '{"a": "\\ud800"}')
    ),
    ({"structured_outputs": {"json": {"minimum": 10**400}}}, "structured_outputs.json", ""),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", "at least 1"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-ahead"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs", "combined"),
    ({"structured_outputs": {"regex": "a" * MAX_GRAMMAR_CHARS}}, "structured_outputs.regex", "more than"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens", "structured answer"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "structured answer"),
]


def test_choices_that_are_too_long_are_not_even_written_as_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLMatcher, "grammar_from_regex", lambda _: pytest.fail("was written"))
    texts = ["x" * (MAX_GRAMMAR_CHARS // 2), "y" * (MAX_GRAMMAR_CHARS // 2 + 1)]
    with pytest.raises(InvalidRequestError, match="at least 32769 characters") as caught:
        form_of(None, StructuredOutputs(choice=texts))
    assert caught.value.param == "structured_outputs.choice"


@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(fields: dict[str, Any], param: str, text: str) -> None:
    async def main() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            response = await post(client, **fields)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param
            assert text in error["message"]

    asyncio.run(main())


HARD = [
    {"type": "integer", "multipleOf": 9_999_991},
    {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}.*"} for n in range(17)]},
]


@pytest.mark.parametrize("schema", HARD)
def test_a_schema_that_takes_too_long_is_refused_and_holds_nobody_up(schema: dict[str, Any]) -> None:
    async def main() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            asked = asyncio.create_task(post(client, structured_outputs={"json": schema}))
            answered = 0
            while not asked.done():
                answered += (await client.get("/health")).status_code == 200
                await asyncio.sleep(0.01)
            assert asked.result().status_code == 400
            assert asked.result().json()["error"]["param"] == "structured_outputs.json"
            assert answered > 10
            good = await post(client, structured_outputs={"choice": ["yes"]})
            assert good.status_code == 200, "the next one is tried by a new process"

    asyncio.run(main())


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4))
def test_choices_of_any_characters_are_just_those(texts: list[str]) -> None:
    form = form_of(None, StructuredOutputs(choice=texts))
    tokenizer = byte_tokenizer()
    vocabulary = LLTokenizer(tokenizer.to_json(), eos_token=256)
    for text in texts:
        matcher = LLMatcher(vocabulary, form.grammar, log_level=0)
        assert matcher.consume_tokens(list(text.encode()))
        assert matcher.is_accepting()
    other = LLMatcher(vocabulary, form.grammar, log_level=0)
    wrong = texts[0].encode() + b"~~~~~~~"
    assert not other.consume_tokens(list(wrong))


def test_grpc_has_the_same_ways_and_refusals() -> None:
    ways = [
        (pb.StructuredOutputs(json=json.dumps(SCHEMA)), "age"),
        (pb.StructuredOutputs(regex="[0-9]+"), "[0-9]+"),
        (pb.StructuredOutputs(choice=pb.Choice(texts=["yes", "no"])), "yes"),
        (pb.StructuredOutputs(), ""),
    ]

    async def main() -> None:
        async with running_stack(step_delay_s=0.02) as stack, grpc_stub(stack) as stub:
            for structured, part in ways:
                request = pb.GenerateRequest(text="abc", structured_outputs=structured)
                request.sampling.max_tokens = 3
                call = stub.Generate(request)
                while not (grammars := grammars_of(stack)):
                    await asyncio.sleep(0)
                assert part in grammars[0]
                assert bool(grammars[0]) == bool(part)
                while await call.read() is not grpc.aio.EOF:
                    pass
                await stack.wait_until_idle()
            broken = pb.GenerateRequest(text="abc", structured_outputs=pb.StructuredOutputs(regex="(a"))
            call = stub.Generate(broken)
            await assert_refused(call, grpc.StatusCode.INVALID_ARGUMENT, param="structured_outputs.regex")

    asyncio.run(main())
