"""What is noted of HTTP calls."""

from __future__ import annotations

import asyncio

from kvtest.servers import http_client
from kvtest.stack import running_stack


def test_a_method_that_asks_for_nothing_is_no_failed_answer() -> None:
    async def main() -> None:
        async with running_stack() as stack, http_client(stack) as client:
            assert (await client.get("/v1/chat/completions")).status_code == 405
            assert (await client.options("/v1/completions")).status_code == 405
            text = (await client.get("/metrics")).text
            assert "kvorum_request_failures_total{" not in text
            assert 'method="/v1/completions"' not in text

    asyncio.run(main())
