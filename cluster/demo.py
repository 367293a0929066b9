"""`kvorum demo`: a small cluster on this machine, an answer token by token, and what eviction did to its KV cache."""

from __future__ import annotations

import argparse
import contextlib
import time

from rich.console import Console
from rich.table import Table

from kvorum.client import Client, Options
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.launcher import running_cluster
from kvorum.cluster.progress_view import ProgressView

_QUESTION = "What is the capital of France, and what is it known for? Answer in three sentences."
_LONG_QUESTION = (
    "Here are my notes from a walk through Paris. In the morning we crossed the Seine and looked at the towers of "
    "Notre-Dame. Then we went up to Montmartre, where painters sell their pictures on the square, and had lunch in a "
    "small place that serves onion soup. In the afternoon we saw the Mona Lisa in the Louvre, behind a great crowd, "
    "and in the evening the lights of the Eiffel Tower from the Trocadero. Write a short letter to a friend about it."
)
_MAX_TOKENS = 64
_RECEIPT_ROWS = ("kv_budget", "kv_tokens_held", "kv_tokens_evicted", "retained_mass", "kv_page_seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what may be changed about the demo."""
    parser.add_argument("--model", default="smollm2-135m", metavar="TEXT", help="model to show [%(default)s]")


def run(args: argparse.Namespace) -> int:
    """Start, ask, compare, stop."""
    config = ClusterConfig(model=args.model, port=0, grpc_port=0, max_num_seqs=4, max_model_len=1024)
    console = Console()
    with contextlib.ExitStack() as stack:
        with ProgressView() as view:
            cluster = stack.enter_context(
                running_cluster(config, address=None, on_phase=view.show_phase, on_progress=view.show_load)
            )
        client = stack.enter_context(Client(cluster.grpc_targets[0]))
        console.print(f"{args.model} is up at {cluster.http_urls[0]} and grpc://{cluster.grpc_targets[0]}\n")
        _show_answer(client, console)
        _show_receipts(client, console)
    console.print("stopped")
    return 0


def _show_answer(client: Client, console: Console) -> None:
    console.print(f"[bold]> {_QUESTION}[/bold]", soft_wrap=True)
    num_tokens, first_s, last_s = 0, 0.0, 0.0
    started_s = time.monotonic()
    with client.stream_chat(_QUESTION, Options(max_tokens=_MAX_TOKENS, temperature=0.0)) as pieces:
        for piece in pieces:
            console.print(piece.text, end="", markup=False, highlight=False, soft_wrap=True)
            last_s = time.monotonic()
            first_s = first_s or last_s
            num_tokens += len(piece.token_ids)
    rate = (num_tokens - 1) / (last_s - first_s) if num_tokens > 1 else 0.0
    console.print(f"\n\n{num_tokens} tokens, first after {first_s - started_s:.2f} s, then {rate:.1f} tokens/s\n")


def _show_receipts(client: Client, console: Console) -> None:
    options = {
        "full": Options(max_tokens=_MAX_TOKENS, temperature=0.0, policy="full"),
        "h2o, a quarter kept": Options(max_tokens=_MAX_TOKENS, temperature=0.0, policy="h2o", kv_budget=0.25),
    }
    receipts = {name: client.chat(_LONG_QUESTION, each).completion.receipt for name, each in options.items()}
    table = Table("receipt of one prompt", *receipts, title="What the KV cache held")
    for row in _RECEIPT_ROWS:
        table.add_row(row, *(_format(getattr(receipt, row)) for receipt in receipts.values()))
    console.print(table)


def _format(value: object) -> str:
    if value is None:
        return "no limit"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
