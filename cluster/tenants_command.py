"""`kvorum tenants`: what each tenant of a running cluster has, and new API keys."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console

from kvorum.cluster.operator_client import watch_cluster
from kvorum.cluster.tenants import hash_key, new_key
from kvorum.cluster.top_view import tenant_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to do, and where the cluster is."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "new-key"),
        default="list",
        help="list what tenants hold and may have [default], or make a key and print what to configure",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a router's HTTP address [%(default)s]")
    parser.add_argument("--api-key", metavar="TEXT", help="an operator's key")


def run(args: argparse.Namespace) -> int:
    """Print."""
    if args.action == "new-key":
        key = new_key()
        print(f"key (shown only now): {key}\napi_key_sha256:       {hash_key(key)}")
    else:
        asyncio.run(_list(args.url, api_key=args.api_key))
    return 0


async def _list(url: str, *, api_key: str | None) -> None:
    Console().print(tenant_table((await anext(watch_cluster(url, api_key=api_key))).tenants))
