"""`kvorum eval` says what a policy would cost on a text of the user's."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvorum.cluster.config import budget_from_number
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.kvstore.policies import parse_policy, policy_names, resolve_budget
from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.config import EngineConfig
from kvorum.workers.request import KVParams

if TYPE_CHECKING:
    from kvorum.workers.evaluate import Cost, Window


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--text", type=Path, required=True, help="plain text file to read and predict")
    parser.add_argument("--model", default="smollm2-135m", help="folder, .gguf file, hub id or smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="tokens read before the first prediction")
    parser.add_argument("--tokens", type=int, default=128, help="tokens predicted after the prompt, at least 2")
    parser.add_argument("--windows", type=int, default=1, help="disjoint pieces of the text to average over")
    parser.add_argument(
        "--policy",
        action="append",
        help=f"one of {', '.join(policy_names())}, with options as in h2o_avg:recent=0.1; may be given again",
    )
    parser.add_argument(
        "--kv-budget",
        type=float,
        action="append",
        help="tokens kept per KV head, or a fraction of prompt + predicted tokens when <= 1; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print; returns the exit status."""
    cases = _cases(args)
    windows = _windows(args)
    from kvorum.workers.evaluate import evaluate

    config = EngineConfig(
        model=args.model,
        model_name=args.model,
        dtype="float32",
        max_model_len=None,
        kv_cache_memory_bytes=_pool_bytes(args, num_cases=len(cases) + 1),
    )
    costs = asyncio.run(evaluate(config, windows, cases))
    if args.json:
        print(json.dumps({"windows": len(windows), "cases": [asdict(cost) for cost in costs]}, indent=2))
    else:
        Console().print(_table(costs, windows))
    return 0


def _cases(args: argparse.Namespace) -> list[KVParams]:
    """Return each policy at each budget; raises InvalidRequestError for what no request could ask."""
    cases = []
    for policy in args.policy or ["h2o_avg"]:
        for number in args.kv_budget or [0.25]:
            budget = budget_from_number(number)
            resolve_budget(parse_policy(policy), budget, context_tokens=args.prompt_tokens + args.tokens)
            cases.append(KVParams(policy, budget))
    return cases


def _windows(args: argparse.Namespace) -> list[Window]:
    from kvorum.workers.evaluate import cut_windows

    for flag, value, least in (
        ("--prompt-tokens", args.prompt_tokens, 1),
        ("--tokens", args.tokens, 2),
        ("--windows", args.windows, 1),
    ):
        if value < least:
            raise InvalidRequestError(f"{flag} must be at least {least}, got {value}", param=flag)
    try:
        text = args.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--text {args.text}: {error}", param="--text") from None
    tokens = resolve(args.model).load_tokenizer().encode(text)
    windows = cut_windows(tokens, prompt_tokens=args.prompt_tokens, num_tokens=args.tokens, windows=args.windows)
    if not windows:
        raise InvalidRequestError(
            f"--text {args.text} has {len(tokens)} tokens, a window needs {args.prompt_tokens + args.tokens}",
            param="--text",
        )
    if len(windows) < args.windows:
        print(f"the text has room for {len(windows)} of {args.windows} windows", file=sys.stderr)
    return windows


def _pool_bytes(args: argparse.Namespace, *, num_cases: int) -> int:
    """Return a pool in which every case fits whole, so that nothing but the policy evicts."""
    tokens: int = num_cases * (args.prompt_tokens + args.tokens + 64)
    return 2 * tokens * resolve(args.model).spec.kv_bytes_per_token(element_bytes=4)


def _table(costs: list[Cost], windows: list[Window]) -> Table:
    prompt, predicted = len(windows[0].prompt), costs[0].predictions
    table = Table(title=f"{predicted} predictions after {prompt} tokens of prompt, against the full cache")
    for heading in (
        "policy",
        "budget",
        "kept",
        "perplexity",
        "KL",
        "top-1 agreement",
        "mass kept",
    ):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for cost in costs:
        table.add_row(
            cost.kv.policy,
            "-" if cost.kv.kv_budget is None else f"{cost.kv.kv_budget:g}",
            f"{cost.kv_tokens_held:.0f}",
            f"{cost.perplexity:.2f}",
            f"{cost.kl:.4f}",
            f"{100 * cost.agreement:.1f} %",
            f"{cost.retained_mass:.3f}",
        )
    return table
