"""`kvorum bench`: measure a running server, kvorum or any other that speaks OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from kvorum.cluster.bench_client import Target, find_model, send_closed_loop, send_open_loop
from kvorum.cluster.bench_report import BenchProgress, print_report
from kvorum.cluster.bench_summary import RequestResult, Slo, summarize, summarize_by_tenant
from kvorum.cluster.bench_trace import TraceEntry, parse_trace
from kvorum.cluster.bench_workload import BenchRequest, Tenant, Workload, draw_requests, parse_lengths, parse_tenant
from kvorum.cluster.config import ConfigError, budget_from_number
from kvorum.kvstore.errors import InvalidRequestError, KvorumError

_TRACE_TIMES = "trace"
_LENGTHS = "N, uniform:LOW:HIGH, normal:MEAN:STD or lognormal:MEAN:STD"


class BenchError(KvorumError):
    """Nothing could be measured: no request was answered."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags, grouped by what they are about."""
    server = parser.add_argument_group("The server")
    server.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="its address [%(default)s]")
    server.add_argument("--model", metavar="TEXT", help="model to ask; default: the first one served")
    server.add_argument("--api-key", metavar="TEXT", help="key to send")
    server.add_argument("--timeout-s", default=600.0, type=float, metavar="X", help="limit of a request [%(default)g]")
    _add_work(parser.add_argument_group("The work"))
    _add_load(parser.add_argument_group("The load"))
    cache = parser.add_argument_group("What the KV cache may drop (kvorum only)")
    cache.add_argument("--policy", metavar="NAME", help="eviction policy; default: the server's")
    cache.add_argument("--kv-budget", type=float, metavar="X", help="tokens per KV head, or a fraction up to 1")
    cache.add_argument("--min-retained-mass", type=float, metavar="X", help="quality floor, 0 to 1")
    report = parser.add_argument_group("The report")
    report.add_argument("--slo-ttft-ms", type=float, metavar="X", help="longest good time to first token")
    report.add_argument("--slo-itl-ms", type=float, metavar="X", help="longest good mean time between tokens")
    report.add_argument("--slo-e2e-ms", type=float, metavar="X", help="longest good time to the end")
    report.add_argument("--json", type=Path, metavar="FILE", help="write everything there, each request included")


def _add_work(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-requests", type=int, default=32, metavar="N", help="requests to measure [%(default)s]")
    group.add_argument("--prompt-tokens", default="256", metavar="LENGTHS", help=f"{_LENGTHS} [%(default)s]")
    group.add_argument("--output-tokens", default="128", metavar="LENGTHS", help="the same, for answers [%(default)s]")
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="take lengths (and shared prefixes) from a trace: JSON lines as Mooncake's, CSV as Azure's or BurstGPT's",
    )
    group.add_argument(
        "--max-total-tokens", type=int, metavar="N", help="leave out a trace's requests whose prompt + answer is longer"
    )
    group.add_argument(
        "--shared-prefix-tokens", type=int, default=0, metavar="N", help="tokens that begin every prompt [%(default)s]"
    )
    group.add_argument(
        "--prompts",
        choices=("ids", "text", "chat"),
        default="ids",
        help="send token ids, about as many words, or those words as a chat [%(default)s]",
    )
    group.add_argument(
        "--vocab-size", type=int, default=10_000, metavar="N", help="prompts use token ids below this [%(default)s]"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers of full length, which not every server can",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="names the work exactly [%(default)s]")


def _add_load(group: argparse._ArgumentGroup) -> None:
    load = group.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop: requests that run at once [1]")
    load.add_argument(
        "--request-rate", metavar="X", help="open loop: requests per second (Poisson), or `trace` for the trace's times"
    )
    group.add_argument("--warmup", type=int, default=1, metavar="N", help="unmeasured requests first [%(default)s]")
    group.add_argument(
        "--tenants",
        nargs="+",
        default=[],
        metavar="NAME=KEY[:WEIGHT]",
        help="keys that requests are spread over, in proportion to the weights; reported one by one",
    )


def run(args: argparse.Namespace) -> int:
    """Draw the work, send it, report; returns the exit status."""
    _check_numbers(args)
    work, slo = _workload(args), _slo(args)
    extra = _extra_fields(args)
    requests = draw_requests(work, Random(args.seed))
    if len(requests) < args.num_requests:
        print(f"the trace has {len(requests)} of {args.num_requests} requests", file=sys.stderr)
    # Prompts of their own: what is measured must not be found in a prefix cache.
    warmup = draw_requests(replace(work, num_requests=args.warmup), Random(f"{args.seed} warm-up"))
    _check_writable(args.json)
    target, results = asyncio.run(_measure(args, requests=requests, warmup=warmup, extra=extra))
    if args.json:
        args.json.write_text(json.dumps(_as_json(args, results, slo)) + "\n", encoding="utf-8")
    if all(result.error for result in results):
        raise BenchError(f"none of {len(results)} requests was answered; the first: {results[0].error}")
    print_report(results, slo, console=Console(), title=f"{target.model} at {target.base_url}")
    return 0


async def _measure(
    args: argparse.Namespace,
    *,
    requests: Sequence[BenchRequest],
    warmup: Sequence[BenchRequest],
    extra: Mapping[str, Any],
) -> tuple[Target, list[RequestResult]]:
    model = args.model or await find_model(args.base_url, api_key=requests[0].tenant.api_key)
    target = Target(args.base_url, model, prompt_form=args.prompts, timeout_s=args.timeout_s, extra=extra)
    concurrency = args.concurrency or 1
    await send_closed_loop(target, warmup, concurrency=concurrency, on_done=lambda _: None)
    with BenchProgress(len(requests)) as progress:
        if args.request_rate:
            return target, await send_open_loop(target, requests, on_done=progress.show)
        return target, await send_closed_loop(target, requests, concurrency=concurrency, on_done=progress.show)


def _check_numbers(args: argparse.Namespace) -> None:
    """Raise ConfigError for a number out of its range, naming the option."""
    for option, least in (
        ("num_requests", 1),
        ("concurrency", 1),
        ("warmup", 0),
        ("shared_prefix_tokens", 0),
        ("max_total_tokens", 2),
        ("vocab_size", 4),
        ("timeout_s", 0.001),
        ("slo_ttft_ms", 0.0),
        ("slo_itl_ms", 0.0),
        ("slo_e2e_ms", 0.0),
        ("min_retained_mass", 0.0),
    ):
        value = getattr(args, option)
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"--{option.replace('_', '-')}: must be at least {least}, got {value}")
    if args.max_total_tokens and not args.trace:
        raise ConfigError("--max-total-tokens: is for --trace only; bound the distributions instead")


def _workload(args: argparse.Namespace) -> Workload:
    trace = _read_trace(args.trace, max_total_tokens=args.max_total_tokens) if args.trace else ()
    tenants = tuple(parse_tenant(text, option="--tenants") for text in args.tenants)
    if tenants and args.api_key:
        raise ConfigError("--api-key: cannot be combined with --tenants, which have their own keys")
    return Workload(
        num_requests=args.num_requests,
        prompt_tokens=parse_lengths(args.prompt_tokens, option="--prompt-tokens"),
        output_tokens=parse_lengths(args.output_tokens, option="--output-tokens"),
        vocab_size=args.vocab_size,
        shared_prefix_tokens=args.shared_prefix_tokens,
        request_rate=_request_rate(args),
        tenants=tenants or (Tenant("default", args.api_key),),
        trace=trace,
    )


def _request_rate(args: argparse.Namespace) -> float | None:
    """Return the rate of a Poisson process; None when requests come otherwise."""
    if args.request_rate is None:
        return None
    if args.request_rate == _TRACE_TIMES:
        if not args.trace:
            raise ConfigError("--request-rate: trace needs --trace FILE")
        return None
    try:
        rate = float(args.request_rate)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ConfigError(f"--request-rate: expected requests per second or `trace`, got {args.request_rate!r}")
    return rate


def _read_trace(path: Path, *, max_total_tokens: int | None) -> tuple[TraceEntry, ...]:
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            entries = parse_trace(lines, name=f"--trace {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error}") from None
    longest = max_total_tokens or math.inf
    fitting = tuple(entry for entry in entries if entry.prompt_tokens + entry.output_tokens <= longest)
    if not fitting:
        raise ConfigError(f"--max-total-tokens: no request of {path} is as short as {max_total_tokens}")
    return fitting


def _extra_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return what is asked beyond OpenAI's fields."""
    try:
        budget = budget_from_number(args.kv_budget)
    except InvalidRequestError as error:
        raise ConfigError(f"--kv-budget: {error}") from None
    wanted = {"policy": args.policy, "kv_budget": budget, "min_retained_mass": args.min_retained_mass}
    kvorum = {name: value for name, value in wanted.items() if value is not None}
    return ({"ignore_eos": True} if args.ignore_eos else {}) | ({"kvorum": kvorum} if kvorum else {})


def _slo(args: argparse.Namespace) -> Slo:
    limits = (args.slo_ttft_ms, args.slo_itl_ms, args.slo_e2e_ms)
    return Slo(*(None if limit is None else limit / 1000 for limit in limits))


def _check_writable(path: Path | None) -> None:
    """Find out before the run whether its results can be kept."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error}") from None


def _as_json(args: argparse.Namespace, results: Sequence[RequestResult], slo: Slo) -> dict[str, Any]:
    """Return settings (without keys), summaries and requests as plain data."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    secrets = {"api_key": None, "tenants": [tenant.partition("=")[0] for tenant in args.tenants]}
    return {
        "kvorum_version": version("kvorum"),
        "settings": settings | secrets,
        "summary": summarize(results, slo).as_json(),
        "tenants": {name: each.as_json() for name, each in summarize_by_tenant(results, slo).items()},
        "requests": [result.as_json(began_s=min(each.start_s for each in results)) for result in results],
    }
