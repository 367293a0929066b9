"""`kvorum sim`: replay a trace of requests over many modelled engines, under the real cache manager and without it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvorum.cluster.bench_trace import parse_trace
from kvorum.cluster.config import ConfigError
from kvorum.cluster.sim.engine_model import EngineSpec
from kvorum.cluster.sim.simulator import Mode, Setup, default_tenants, simulate
from kvorum.cluster.sim.summary import Summary, summarise

_DEFAULTS = EngineSpec()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the trace, the cluster and what counts as good."""
    parser.add_argument("trace", type=Path, metavar="FILE", help="JSON lines or CSV, as `kvorum bench` reads them")
    parser.add_argument("--engines", type=int, default=64, metavar="N", help="[%(default)s]")
    parser.add_argument("--blocks", type=int, default=_DEFAULTS.num_blocks, metavar="N", help="of 16 tokens, an engine")
    parser.add_argument("--max-num-seqs", type=int, default=_DEFAULTS.max_sequences, metavar="N", help="[%(default)s]")
    parser.add_argument(
        "--speed-up", type=float, default=1.0, metavar="X", help="play the trace so many times as fast [%(default)s]"
    )
    parser.add_argument(
        "--least-tokens", type=int, default=1024, metavar="N", help="elastic requests keep so many [%(default)s]"
    )
    parser.add_argument("--mode", action="append", choices=[*Mode], help="may be given again; default: all")
    parser.add_argument("--ttft-slo-s", type=float, default=5.0, metavar="X", help="good is sooner [%(default)s]")
    parser.add_argument("--least-mass", type=float, default=0.7, metavar="X", help="good keeps more [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the draw of tenants")
    parser.add_argument("--json", action="store_true", help="print one JSON object a mode")


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    for name in ("engines", "blocks", "max_num_seqs", "speed_up", "least_tokens"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')}: must be positive, got {getattr(args, name)}")
    try:
        with args.trace.open(encoding="utf-8") as lines:
            entries = parse_trace(lines, name=str(args.trace))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{args.trace}: cannot be read: {error}") from None
    setup = Setup(
        num_engines=args.engines,
        spec=EngineSpec(num_blocks=args.blocks, max_sequences=args.max_num_seqs),
        tenants=default_tenants(args.least_tokens),
        seed=args.seed,
    )
    entries = [type(e)(e.at_s / args.speed_up, e.prompt_tokens, e.output_tokens, e.block_ids) for e in entries]
    summaries = [
        summarise(simulate(entries, setup, Mode(mode)), setup, ttft_slo_s=args.ttft_slo_s, least_mass=args.least_mass)
        for mode in args.mode or [*Mode]
    ]
    if args.json:
        print("\n".join(json.dumps(asdict(summary)) for summary in summaries))
    else:
        Console().print(_table(summaries, num_engines=args.engines))
    return 0


def _table(summaries: Sequence[Summary], *, num_engines: int) -> Table:
    table = Table(title=f"{summaries[0].requests} requests over {num_engines} modelled engines")
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.mode, justify="right")
    for name in Summary.__dataclass_fields__:
        if name not in ("mode", "requests"):
            values = [getattr(summary, name) for summary in summaries]
            table.add_row(name, *(f"{value:.3f}" if isinstance(value, float) else str(value) for value in values))
    return table
