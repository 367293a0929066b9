"""`kvorum top`: a live view of a running cluster's KV cache, in the terminal, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import time

from rich.console import Console
from rich.live import Live

from kvorum.cluster.operator_client import watch_cluster
from kvorum.cluster.top_view import TopScreen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the cluster is."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a router's HTTP address [%(default)s]")
    parser.add_argument("--api-key", metavar="TEXT", help="an operator's key")
    parser.add_argument("--once", action="store_true", help="print one look and end")


def run(args: argparse.Namespace) -> int:
    """Draw until interrupted."""
    asyncio.run(_watch(args.url, api_key=args.api_key, once=args.once))
    return 0


async def _watch(url: str, *, api_key: str | None, once: bool) -> None:
    screen, console = TopScreen(), Console()
    views = watch_cluster(url, api_key=api_key)
    if once:
        console.print(screen.update(await anext(views), clock=time.strftime("%H:%M:%S")))
        return
    with Live(console=console, screen=console.is_terminal) as live:
        async for view in views:
            live.update(screen.update(view, clock=time.strftime("%H:%M:%S")))
