"""Log lines: for people and for programs, each with the request that it is about."""

from __future__ import annotations

import asyncio
import contextvars
import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvorum.cluster.logs import CONTEXT, JsonFormatter, LogContext, TextFormatter
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvtest.servers import grpc_stub, http_client
from kvtest.stack import running_stack


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """What kvorum's loggers write with the formatter that the test is given."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(request.param())
    logger = logging.getLogger("kvorum")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)


def log_within(context: LogContext, message: str, *, exc_info: bool = False) -> None:
    def log() -> None:
        CONTEXT.set(context)
        logging.getLogger("kvorum.test").warning(message, exc_info=exc_info)

    contextvars.copy_context().run(log)


@pytest.mark.parametrize("lines", [TextFormatter], indirect=True)
def test_text_lines_end_with_request_and_tenant(lines: io.StringIO) -> None:
    logging.getLogger("kvorum.test").warning("alone")
    log_within(LogContext("r1", "acme"), "together")
    log_within(LogContext("two\nlines", "é"), "careful")
    alone, together, careful = lines.getvalue().splitlines()
    assert alone.endswith(" WARNING kvorum.test: alone")
    assert together.endswith(" WARNING kvorum.test: together request_id=r1 tenant=acme")
    assert careful.endswith('careful request_id="two\\nlines" tenant="\\u00e9"')


@pytest.mark.parametrize("lines", [JsonFormatter], indirect=True)
def test_json_lines_are_objects_whatever_they_hold(lines: io.StringIO) -> None:
    logging.getLogger("kvorum.test").info("alone %s", "with\na break")
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        log_within(LogContext("r1", "acme"), "together", exc_info=True)
    alone, together = map(json.loads, lines.getvalue().splitlines())
    assert set(alone) == {"time", "level", "logger", "message"}
    assert (alone["level"], alone["logger"], alone["message"]) == ("INFO", "kvorum.test", "alone with\na break")
    assert (together["request_id"], together["tenant"]) == ("r1", "acme")
    assert together["exception"].endswith("RuntimeError: broken")
    assert alone["time"].endswith("+00:00")


@pytest.mark.parametrize("lines", [JsonFormatter], indirect=True)
def test_lines_about_requests_name_them_and_hold_nothing_of_prompts(lines: io.StringIO) -> None:
    async def main() -> None:
        async with running_stack() as stack, http_client(stack) as http, grpc_stub(stack) as stub:
            body = {"prompt": "a secret prompt", "max_tokens": 3}
            await http.post("/v1/completions", json=body | {"colour": 1}, headers={"X-Request-Id": "mine"})
            await http.post("/v1/completions", json=body | {"smell": 1}, headers={"X-Request-Id": "m" * 9000})
            stack.frontend.plan = None  # type: ignore[assignment]  # whatever nobody foresaw
            message = pb.GenerateRequest(text="a secret prompt", request_id="yours")
            assert await stub.Generate(message).code() is not None
            assert (await http.post("/v1/completions", json=body)).status_code == 500

    asyncio.run(main())
    entries = [json.loads(line) for line in lines.getvalue().splitlines()]
    found = {entry["message"]: entry for entry in entries if entry.get("request_id")}
    assert found['ignored unknown fields ["colour"]']["request_id"] == "mine"
    assert found['ignored unknown fields ["colour"]']["tenant"] == "default"
    assert len(found['ignored unknown fields ["smell"]']["request_id"]) == 256
    assert found["call failed"]["request_id"] == "yours"
    assert len(found["request failed"]["request_id"]) == 32
    assert "secret" not in lines.getvalue()
