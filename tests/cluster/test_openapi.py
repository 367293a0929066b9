"""The OpenAPI document is true: whatever it allows or forbids, the server answers as it says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi import checks

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.http import create_app
from kvorum.cluster.openai import ChatChoice
from kvtest.servers import http_client, http_server
from kvtest.stack import DEFAULT_INFO, running_stack

KEY = {"Authorization": "Bearer s3cret"}
# Short answers, and room for as many at once as a request may ask for.
INFO = replace(DEFAULT_INFO, max_model_len=64, num_blocks=1024, max_num_seqs=256, max_num_waiting=256)
OPERATIONS = {
    "create_chat_completion",
    "create_completion",
    "list_models",
    "get_model",
    "tokenize",
    "detokenize",
    "get_health",
    "get_version",
    "get_cluster",
    "watch_cluster",
    "get_metrics",
}
BODIES = {"create_chat_completion", "create_completion", "tokenize", "detokenize"}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


def document() -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with running_stack() as stack, http_client(stack) as client:
            found: dict[str, Any] = (await client.get("/openapi.json")).json()
            return found

    return asyncio.run(main())


def against_server(act: Callable[[str], None]) -> None:
    """Run something in a thread, with the address of a server that wants a key."""

    async def main() -> None:
        async with running_stack(ClusterConfig(api_key="s3cret"), info=INFO) as stack:
            async with http_server(create_app(stack.frontend)) as url:
                await asyncio.to_thread(act, url)
            await stack.wait_until_idle()

    asyncio.run(main())


def fuzz(url: str, operation_id: str, mode: GenerationMode, *, max_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operation = schema.find_operation_by_id(operation_id)

    @hypothesis.settings(max_examples=max_examples, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Case[Any]) -> None:
        refusing = [checks.negative_data_rejection] if mode is GenerationMode.NEGATIVE else []
        case.call_and_validate(headers=KEY, checks=[*CHECKS, *refusing], timeout=30)

    one()


def test_the_document_names_every_route_and_its_answers() -> None:
    found = document()
    assert found["info"]["title"] == "kvorum"
    operations = {each["operationId"]: each for path in found["paths"].values() for each in path.values()}
    assert set(operations) == OPERATIONS
    assert not any("422" in each["responses"] for each in operations.values()), "validation is 400"
    chat = operations["create_chat_completion"]
    assert list(chat["responses"]) == ["200", "400", "401", "403", "404", "429", "499", "503", "504"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert chat["responses"]["429"]["headers"] == chat["responses"]["503"]["headers"]
    assert "Retry-After" in chat["responses"]["429"]["headers"]
    secured = {name for name, each in operations.items() if "security" in each}
    assert secured == OPERATIONS - {"get_health", "get_version", "get_metrics"}
    schemas = found["components"]["schemas"]
    assert set(schemas["ChatChoice"]["properties"]) == set(ChatChoice.model_fields)
    assert schemas["KvorumFields"]["additionalProperties"] is False
    assert not {"HTTPValidationError", "ValidationError"} & set(schemas)


# A stream of the cluster's changes has no end.
FUZZED = sorted(OPERATIONS - {"watch_cluster"})


@pytest.mark.parametrize("operation_id", FUZZED)
def test_what_the_document_allows_is_answered_as_it_says(operation_id: str) -> None:
    examples = 40 if operation_id in BODIES else 3
    against_server(lambda url: fuzz(url, operation_id, GenerationMode.POSITIVE, max_examples=examples))


@pytest.mark.parametrize(
    ("operation_id", "asked"),
    [
        ("create_chat_completion", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("create_completion", {"prompt": "Hello"}),
    ],
)
def test_streams_are_what_the_document_says(operation_id: str, asked: dict[str, Any]) -> None:
    def act(url: str) -> None:
        operation = schemathesis.openapi.from_url(f"{url}/openapi.json").find_operation_by_id(operation_id)
        case = operation.Case(body=asked | {"stream": True, "max_tokens": 4}, media_type="application/json")
        answer = case.call_and_validate(headers=KEY, checks=CHECKS)
        assert answer.headers["content-type"][0].startswith("text/event-stream")

    against_server(act)


@pytest.mark.parametrize("operation_id", sorted(BODIES))
def test_what_the_document_forbids_is_refused(operation_id: str) -> None:
    against_server(lambda url: fuzz(url, operation_id, GenerationMode.NEGATIVE, max_examples=40))


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("operation_id", sorted(BODIES))
def test_it_holds_for_many_requests(operation_id: str, mode: GenerationMode) -> None:
    against_server(lambda url: fuzz(url, operation_id, mode, max_examples=1000))


def test_an_answer_that_the_document_does_not_know_is_found() -> None:
    def act(url: str) -> None:
        raw = httpx.get(f"{url}/openapi.json").json()
        del raw["paths"]["/v1/models"]["get"]["responses"]["401"]
        operation = schemathesis.openapi.from_dict(raw).find_operation_by_id("list_models")
        case = operation.Case()
        with pytest.raises(FailureGroup):
            case.call_and_validate(base_url=url, checks=[checks.status_code_conformance])

    against_server(act)
