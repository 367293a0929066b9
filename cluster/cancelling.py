"""Cancelled tasks whose last await failed with another error."""

from __future__ import annotations

import asyncio


def end_if_cancelled() -> None:
    """Raise CancelledError where gRPC, whose call failed at that moment, raised its own error instead."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
