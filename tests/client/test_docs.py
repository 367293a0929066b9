"""What the documentation shows runs as it stands, but for the address."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import types
from pathlib import Path

import pytest

from kvtest.servers import grpc_server
from kvtest.stack import running_stack

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


async def execute(source: str) -> None:
    code = compile(source, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = await asyncio.to_thread(types.FunctionType(code, {}))
    if inspect.iscoroutine(outcome):
        await outcome


SAID = ("user: What is a KV cache?", "Once upon a time", "invalid_value token_ids")


@pytest.mark.parametrize(("block", "said"), list(zip(BLOCKS, SAID, strict=True)))
def test_an_example_says_what_it_should(block: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        async with running_stack() as stack, grpc_server(stack) as target:
            await execute(block.replace("127.0.0.1:9000", target))

    asyncio.run(main())
    assert said in capsys.readouterr().out
