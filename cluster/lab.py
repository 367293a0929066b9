"""`kvorum lab` shows on a real model what the KV cache does: work saved, blocks that come and go, tokens evicted."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.checkpoint.tokenizer import Tokenizer
from kvorum.workers.request import KVParams

if TYPE_CHECKING:
    from kvorum.workers.lab import CountingBackend, EvictionLog, PoolView, TokenCost

PROMPT = "The quick brown fox jumps over the lazy dog because"
TALE = (
    "Once upon a time a miller had three sons. When he died, the eldest got the mill, the second the donkey, and the "
    "youngest nothing but the cat. The youngest was sad, but the cat said: give me a pair of boots and a sack, and you "
    "shall see that you are not so badly off."
)
FREE, CACHED, SHARED = ".", "_", "*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--model", default="smollm2-135m", help="folder, .gguf file, hub id or smollm2-135m")
    parser.add_argument("--tokens", type=int, default=12, help="tokens to generate in each experiment, at least 2")
    parser.add_argument("--kv-budget", type=int, default=32, help="tokens per KV head that H2O may keep")
    parser.add_argument("--layer", type=int, default=0, help="layer whose evictions are logged")
    parser.add_argument("--head", type=int, default=0, help="KV head whose evictions are logged")


def run(args: argparse.Namespace) -> int:
    """Run the three experiments and print them; returns the exit status."""
    checkpoint = resolve(args.model)
    _check(args, num_layers=checkpoint.spec.num_layers, num_kv_heads=checkpoint.spec.num_kv_heads)
    from kvorum.workers.lab import load_backend

    console = Console()
    tokenizer = checkpoint.load_tokenizer()
    with console.status("loading the model …"):
        backend = load_backend(checkpoint)
    _show_caching(console, backend, tokenizer, num_tokens=args.tokens)
    _show_blocks(console, backend, tokenizer, num_tokens=args.tokens, kv_budget=args.kv_budget)
    _show_evictions(console, backend, tokenizer, args)
    return 0


def _check(args: argparse.Namespace, *, num_layers: int, num_kv_heads: int) -> None:
    from kvorum.kvstore.errors import InvalidRequestError
    from kvorum.kvstore.policies import MIN_BUDGET_TOKENS

    for flag, value, least, most in (
        ("--tokens", args.tokens, 2, 1000),
        ("--kv-budget", args.kv_budget, MIN_BUDGET_TOKENS, 10**6),
        ("--layer", args.layer, 0, num_layers - 1),
        ("--head", args.head, 0, num_kv_heads - 1),
    ):
        if not least <= value <= most:
            raise InvalidRequestError(f"{flag} must be in {least}..{most}, got {value}", param=flag)


def _show_caching(console: Console, backend: CountingBackend, tokenizer: Tokenizer, *, num_tokens: int) -> None:
    from kvorum.workers.lab import compare_caching

    costs = compare_caching(backend, tokenizer.encode(PROMPT), num_tokens=num_tokens)
    console.print(_caching_table(costs))
    with_cache = sum(cost.projections_with_cache for cost in costs)
    without = sum(cost.projections_without for cost in costs)
    console.print(f"K/V projections per layer in all: {with_cache} with the cache, {without} without\n")


def _caching_table(costs: list[TokenCost]) -> Table:
    table = Table(title="1. What a token costs, with the cache and without")
    for heading in ("token", "context", "K/V projections", "without", "ms", "ms without"):
        table.add_column(heading, justify="right")
    for index, cost in enumerate(costs, start=1):
        table.add_row(
            str(index),
            str(cost.context_tokens),
            str(cost.projections_with_cache),
            str(cost.projections_without),
            f"{1000 * cost.with_cache_s:.0f}",
            f"{1000 * cost.without_s:.0f}",
        )
    return table


def _show_blocks(
    console: Console, backend: CountingBackend, tokenizer: Tokenizer, *, num_tokens: int, kv_budget: int
) -> None:
    from kvorum.workers.lab import watch_blocks

    tale = tokenizer.encode(TALE)
    requests = [
        ("A", tale, num_tokens, KVParams()),
        ("B", tokenizer.encode(PROMPT), 2 * num_tokens, KVParams()),
        ("C", tale, 2 * num_tokens, KVParams("h2o", kv_budget)),
    ]
    views = watch_blocks(backend, requests, num_blocks=24)
    console.print("[bold]2. The pool, step by step[/bold]")
    console.print(f"A: {len(tale)} tokens. B: a short prompt. C: A's prompt again, h2o at {kv_budget} tokens.")
    console.print(f"{FREE} free   {CACHED} cached for later   {SHARED} held by several\n")
    previous = ""
    for step, view in enumerate(views, start=1):
        strip = block_strip(view)
        if strip != previous:
            console.print(f"{'end' if step == len(views) else f'step {step}':>8}  {strip}", highlight=False)
        previous = strip
    console.print()


def block_strip(view: PoolView) -> str:
    """Draw a pool as one character a block."""
    return "".join(
        SHARED if len(names) > 1 else names[0] if names else CACHED if block_id in view.cached else FREE
        for block_id, names in enumerate(view.holders)
    )


def _show_evictions(console: Console, backend: CountingBackend, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    from kvorum.workers.lab import watch_evictions

    log = watch_evictions(
        backend,
        tokenizer.encode(TALE),
        max_tokens=args.tokens,
        kv=KVParams("h2o", args.kv_budget),
        layer=args.layer,
        head=args.head,
    )
    where = f"layer {args.layer}, KV head {args.head}"
    table = Table(title=f"3. H2O at {args.kv_budget} tokens: what {where} evicts")
    for heading in ("new token", "evicted", "its score", "next lowest"):
        table.add_column(heading, justify="left" if heading in ("new token", "evicted") else "right")
    for event in log.evictions:
        table.add_row(
            _token(tokenizer, log, event.new_position),
            _token(tokenizer, log, event.victim_position),
            f"{event.victim_score:.3f}",
            f"{event.lowest_kept_score:.3f}",
        )
    console.print(table)
    console.print(f"{len(log.cut)} tokens went when the prompt was done. What is left, evicted tokens struck out:\n")
    console.print(_struck_out(tokenizer, log))


def _token(tokenizer: Tokenizer, log: EvictionLog, position: int) -> str:
    return f"{position}: {tokenizer.decode([log.tokens[position]])!r}"


def _struck_out(tokenizer: Tokenizer, log: EvictionLog) -> Text:
    text = Text()
    for position, token_id in enumerate(log.tokens):
        # The last token was drawn but its KV was never written.
        is_kept = position in log.kept or position == len(log.tokens) - 1
        text.append(tokenizer.decode([token_id]), style="bold" if is_kept else "strike dim")
    return text
