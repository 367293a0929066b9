"""The same work for kvorum and its peers, one server at a time by turns, with ratios round by round.

    .venv/bin/python -P bench/peers/run.py --workloads w1,w2 --peers kvorum,llamacpp --rounds 3 --json out.json

Peers are installed from the package registry into build/peers/. In each round every peer is started, given each
workload (the same token ids, the same lengths, through the client of `kvorum bench`) and stopped before the next one
starts; the order rotates. What is quoted is the ratio within a round, as a median over rounds. Never part of CI.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from environments import PEERS, alias, ensure, version_of
from peers import PEERS_BY_NAME, Command, Launch, Peer, Precision
from processes import ForeignLoad, Pauses, PeerError, Server, free_port, running
from quality import perplexities
from ratios import Measurement
from report import OURS, print_quality, print_workload
from rich.console import Console
from workloads import WORKLOADS

from kvorum.cluster.bench_client import Target, send_closed_loop
from kvorum.cluster.bench_summary import summarize
from kvorum.cluster.bench_workload import BenchRequest

_WARMUP_TOKENS = 8
_TABLE_WIDTH = 140


@dataclass(frozen=True, slots=True)
class Plan:
    """What was asked for. extra: arguments added to a peer's command line."""

    workloads: tuple[str, ...]
    peers: tuple[str, ...]
    precision: Precision
    rounds: int
    scale: float
    seed: int
    deadline_s: float
    extra: Mapping[str, tuple[str, ...]]

    def command(self, peer: str, *, port: int, pool_tokens: int | None) -> Command:
        """Return the command line of a peer's server."""
        launch = Launch(port, self.precision, os.cpu_count() or 1, _has_bfloat16(), pool_tokens)
        command = PEERS_BY_NAME[peer].command(launch)
        return replace(command, arguments=command.arguments + self.extra.get(peer, ()))


def main() -> None:
    """Install, measure round by round, print, and keep what was measured after every step."""
    args = _parse()
    plan = _plan(args)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the running server is stopped
    console = Console(width=max(_TABLE_WIDTH, Console().width))
    for name in plan.peers:
        _install(PEERS_BY_NAME[name])
    report: dict[str, Any] = {"machine": _machine(), "plan": asdict(plan), "peers": _described(plan)}
    measurements: list[Measurement] = []
    for measurement in _measure_all(plan):
        measurements.append(measurement)
        _print_progress(measurement)
        _keep(args.json, report | {"measurements": [asdict(each) for each in measurements]})
    commands = {peer: plan.command(peer, port=0, pool_tokens=None) for peer in plan.peers}
    for workload in plan.workloads:
        print_workload(measurements, workload, commands, console=console)
    if "w5" in plan.workloads and OURS in plan.peers:
        report["quality"] = perplexities(windows=max(1, round(4 * plan.scale)))
        print_quality(report["quality"], console=console)
    _keep(args.json, report | {"measurements": [asdict(each) for each in measurements]})


def _measure_all(plan: Plan) -> Iterator[Measurement]:
    """Measure every peer in every round; whoever began a round is the last to begin the next."""
    for index in range(plan.rounds):
        turn = index % len(plan.peers)
        for peer in plan.peers[turn:] + plan.peers[:turn]:
            for pool_tokens in dict.fromkeys(WORKLOADS[name].pool_tokens for name in plan.workloads):
                names = [name for name in plan.workloads if WORKLOADS[name].pool_tokens == pool_tokens]
                yield from _measure_server(plan, peer, names, index=index)


def _measure_server(plan: Plan, peer: str, workloads: Sequence[str], *, index: int) -> Iterator[Measurement]:
    """Start a peer's server for workloads that need the same pool, and give it each."""
    port = free_port()
    command = plan.command(peer, port=port, pool_tokens=WORKLOADS[workloads[0]].pool_tokens)
    log = PEERS / "logs" / f"{peer}-{workloads[0]}-{index}.log"
    try:
        with running(command, port=port, log=log) as server:
            for workload in workloads:
                yield _measure(plan, Measurement(index, peer, workload, start_s=server.start_s), server, command)
    except PeerError as error:
        for workload in workloads:
            yield Measurement(index, peer, workload, error=str(error))


def _measure(plan: Plan, blank: Measurement, server: Server, command: Command) -> Measurement:
    """Warm up, then measure one workload; what takes longer than the deadline is given up."""
    workload = WORKLOADS[blank.workload]
    requests = workload.requests(Random(f"{plan.seed} {blank.round} {blank.workload}"), scale=plan.scale)
    others = workload.requests(Random(f"{plan.seed} warm-up {blank.workload}"), scale=plan.scale)
    warmup = [replace(request, max_tokens=_WARMUP_TOKENS) for request in others[: min(2, workload.concurrency)]]
    target = Target(server.base_url, "model", timeout_s=plan.deadline_s, extra=command.request_fields)

    pauses = Pauses()

    async def send(batch: Sequence[BenchRequest]) -> dict[str, Any]:
        async with asyncio.timeout(plan.deadline_s):
            watching = asyncio.create_task(pauses.watch())
            results = await send_closed_loop(target, batch, concurrency=workload.concurrency, on_done=lambda _: None)
            watching.cancel()
        return summarize(results, workload.slo).as_json()

    summary, error, load = None, None, ForeignLoad.begin(server)
    try:
        asyncio.run(send(warmup))
        pauses, load = Pauses(), ForeignLoad.begin(server)
        found = asyncio.run(send(requests))
        error = "; ".join(f"{count} failed: {reason}" for reason, count in found["errors"].items()) or None
        summary = found if found["completed"] else None
    except TimeoutError:
        error = f"not done within {plan.deadline_s:g} s"
    return replace(
        blank,
        summary=summary,
        error=error,
        memory_bytes=server.memory_bytes(),
        foreign_cores=load.cores(server),
        paused_s=pauses.seconds,
    )


def _install(peer: Peer) -> None:
    if peer.environment is None:
        return
    ensure(peer.environment, peer.packages, without=peer.without)
    if peer.alias:
        distribution, version = peer.alias
        alias(peer.environment, distribution=distribution, version=version)


def _described(plan: Plan) -> dict[str, Any]:
    """Return each peer's version and command line, with the port and this machine's folders left out."""
    described = {}
    for name in plan.peers:
        peer, command = PEERS_BY_NAME[name], plan.command(name, port=0, pool_tokens=None)
        described[name] = {
            "version": version_of(peer.environment, peer.distribution),
            "server": peer.server,
            "weights": command.weights,
            "kv_cache": command.kv_cache,
            "command": shlex.join(str(argument) for argument in command.arguments),
            "environment": dict(command.environment),
        }
    return described


def _has_bfloat16() -> bool:
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _machine() -> dict[str, Any]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cpu": names[0].partition(": ")[2] if names else platform.processor(), "cores": os.cpu_count()}


def _print_progress(measurement: Measurement) -> None:
    speed = f"{measurement.summary['output_tokens_per_s']:.1f} tok/s" if measurement.summary else "no result"
    error = f" ({measurement.error.splitlines()[0]})" if measurement.error else ""
    noise = f"others had {measurement.foreign_cores:.1f} cores, {measurement.paused_s:.0f} s held up"
    where = f"round {measurement.round}, {measurement.peer}, {measurement.workload}"
    print(f"{where}: {speed}; {noise}{error}", flush=True)


def _keep(path: Path | None, report: Mapping[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="[%(default)s]")
    parser.add_argument(
        "--peers", default="kvorum,vllm-compiled,llamacpp,openvino", help=f"of {', '.join(PEERS_BY_NAME)}"
    )
    parser.add_argument("--precision", choices=("f32", "q4_1"), default="f32", help="of the weights [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="[%(default)s]")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each workload's requests [%(default)g]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline-s", type=float, default=600.0, help="limit of one workload [%(default)g]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written anew after each measurement")
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="PEER=ARGUMENTS",
        help="add to a peer's command line, as in kvorum='--block-size 32'; may be repeated",
    )
    return parser.parse_args()


def _plan(args: argparse.Namespace) -> Plan:
    """Check what was asked; raises SystemExit naming the option."""
    workloads, peers = tuple(args.workloads.split(",")), tuple(args.peers.split(","))
    extra = dict(each.partition("=")[::2] for each in args.extra)
    for option, names, known in (
        ("--workloads", workloads, WORKLOADS),
        ("--peers", peers, PEERS_BY_NAME),
        ("--extra", extra, PEERS_BY_NAME),
    ):
        if unknown := set(names) - known.keys():
            raise SystemExit(f"{option}: {', '.join(sorted(unknown))} is not one of {', '.join(known)}")
    return Plan(
        workloads,
        peers,
        args.precision,
        rounds=args.rounds,
        scale=args.scale,
        seed=args.seed,
        deadline_s=args.deadline_s,
        extra={peer: tuple(shlex.split(flags)) for peer, flags in extra.items()},
    )
