"""Waiting for something to become true, without sleeping longer than it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 15.0) -> None:
    """Return once condition() holds; fail when it does not within timeout_s."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
