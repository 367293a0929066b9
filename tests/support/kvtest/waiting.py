"""Waiting for something to become true, without sleeping longer than it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_NAP_S = 0.002
# A machine that stood still for a while tells nothing about what is waited for.
_LONGEST_COUNTED_S = 0.5


async def eventually(condition: Callable[[], bool], *, timeout_s: float = 15.0) -> None:
    """Return once condition() holds; fail, naming all tasks, when it does not within timeout_s."""
    waited_s, before = 0.0, time.monotonic()
    while not condition():
        if waited_s > timeout_s:
            tasks = "\n".join(map(repr, asyncio.all_tasks()))
            raise TimeoutError(f"not true after {timeout_s} s, in which these were running:\n{tasks}")
        await asyncio.sleep(_NAP_S)
        now = time.monotonic()
        waited_s, before = waited_s + min(now - before, _LONGEST_COUNTED_S), now
