"""`kvorum generate`: ask a running cluster over gRPC, stream the text, print the receipt."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from kvorum.client import Client, Options
from kvorum.kvstore.errors import InvalidRequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prompt and what may be said about the answer."""
    parser.add_argument("prompt", nargs="?", metavar="TEXT", help="what to ask; - or nothing reads standard input")
    parser.add_argument("--target", default="127.0.0.1:9000", metavar="HOST:PORT", help="gRPC address [%(default)s]")
    parser.add_argument("--api-key", metavar="TEXT", help="key to send")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of answering it as a chat")
    parser.add_argument("--model", metavar="TEXT", help="model to ask; default: the one served")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer; default: what the context holds")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy [1]")
    parser.add_argument("--top-p", type=float, metavar="X", help="share of probability to draw from [1]")
    parser.add_argument("--seed", type=int, metavar="N", help="makes the answer reproducible")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; may be repeated")
    parser.add_argument("--policy", metavar="NAME", help="eviction policy; default: the server's")
    parser.add_argument(
        "--kv-budget", type=float, metavar="X", help="tokens kept per KV head, or a fraction of the context up to 1"
    )
    parser.add_argument("--min-retained-mass", type=float, metavar="X", help="quality floor, 0 to 1")


def run(args: argparse.Namespace) -> int:
    """Ask, print the text as it comes, then the receipt on standard error."""
    prompt = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    if not prompt:
        raise InvalidRequestError("nothing to ask: give a prompt")
    options = _options(args)
    with Client(args.target, api_key=args.api_key) as client:
        stream = client.stream_complete if args.raw else client.stream_chat
        with stream(prompt, options) as pieces:
            for piece in pieces:
                print(piece.text, end="", flush=True)
    print()
    if piece.completion:
        receipt = asdict(piece.completion.receipt)
        lines = (f"{name} {value}" for name, value in receipt.items() if value is not None)
        print("\n".join(lines), file=sys.stderr)
    return 0


def _options(args: argparse.Namespace) -> Options:
    return Options(
        model=args.model,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        stop=tuple(args.stop),
        policy=args.policy,
        kv_budget=args.kv_budget,
        min_retained_mass=args.min_retained_mass,
    )
