"""What is noted of HTTP calls, and what their answers say of themselves."""

from __future__ import annotations

import asyncio

from kvtest.servers import http_client
from kvtest.stack import running_stack


def test_an_answer_names_its_request_as_the_client_does_or_as_the_server_does() -> None:
    async def main() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            body = {"prompt": "abc", "max_tokens": 2}
            named = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-7"})
            assert named.headers["x-request-id"] == "mine-7"
            streamed = await client.post("/v1/completions", json=body | {"stream": True})
            assert streamed.headers["x-request-id"]
            refused = await client.post("/v1/completions", json={}, headers={"X-Request-Id": "mine-8"})
            assert (refused.status_code, refused.headers["x-request-id"]) == (400, "mine-8")

    asyncio.run(main())


def test_a_method_that_asks_for_nothing_is_no_failed_answer() -> None:
    async def main() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            assert (await client.get("/v1/chat/completions")).status_code == 405
            assert (await client.options("/v1/completions")).status_code == 405
            text = (await client.get("/metrics")).text
            assert "kvorum_request_failures_total{" not in text
            assert 'method="/v1/completions"' not in text

    asyncio.run(main())
