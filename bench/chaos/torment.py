"""Kills ranks, engines, routers and nodes of a cluster under load, and counts what its clients see.

    make chaos ARGS="--duration-s 180 --streams 64"

On a simulated Ray cluster of three nodes on this machine: routers on the head, an engine of two ranks on each of the
others. First every question is asked once while nothing breaks. Then clients stream the same questions, one after the
other, while something is struck every few seconds. A stream must end complete and equal to the first answer, or with
the typed error. At the end nothing may be left: no sequence, no block, no actor, no placement group, no process,
no shared memory.

Exits with 1 when an answer was wrong, a stream hung, or something was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvorum.workers.config import COMPUTE_ENVIRONMENT

# Before anything imports ray; every node's processes have them from here.
os.environ.update(
    COMPUTE_ENVIRONMENT
    | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Nodes are started, by a fork, while clients call.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
)

import httpx
from nodes import ROUTER_RESOURCE, processes, running_nodes
from rich.console import Console
from rich.table import Table
from streams import Clients, Outcome, Tally, draw_questions
from strikes import Strike, Striker, summarise

from kvorum.cluster.addresses import choose_ports
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.launcher import RunningCluster, running_cluster, serve_environment
from kvorum.workers.checkpoint.resolve import resolve

NUM_ENGINES, NUM_RANKS, NUM_ROUTERS = 2, 2, 2
_WHOLE_TIMEOUT_S = 120.0
_LEAK_TIMEOUT_S = 30.0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder or smollm2-135m [smollm2-135m]")
    parser.add_argument("--duration-s", type=float, default=180.0, metavar="X", help="[180]")
    parser.add_argument("--period-s", type=float, default=10.0, metavar="X", help="between two strikes [10]")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="at a time [64]")
    parser.add_argument("--questions", type=int, default=64, metavar="N", help="different ones [64]")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="of an answer [48]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    return parser.parse_args()


def configure(args: argparse.Namespace) -> ClusterConfig:
    """Return the settings; answers are exact only in float32."""
    ports = choose_ports("127.0.0.1", wanted=(0, 0), count=NUM_ROUTERS, names=("port", "grpc_port"))
    return ClusterConfig(
        model=args.model,
        dtype="float32",
        kv_cache_memory_bytes=2**28,
        max_num_seqs=args.streams,
        port=ports[0],
        grpc_port=ports[1],
        num_routers=NUM_ROUTERS,
        num_engines=NUM_ENGINES,
        tensor_parallel_size=NUM_RANKS,
        placement_strategy="STRICT_PACK",
        num_cpus_per_rank=1,
        router_resource=ROUTER_RESOURCE,
        max_resumes=10,
        resume_timeout_s=60.0,
    )


async def torment(args: argparse.Namespace, cluster: RunningCluster, striker: Striker) -> Tally:
    """Ask, strike, and wait for what is still running."""
    rng = random.Random(args.seed)
    questions = draw_questions(
        args.questions, max_tokens=args.max_tokens, vocab_size=resolve(args.model).spec.vocab_size, rng=rng
    )
    clients = Clients(cluster.grpc_targets)
    answers = await asyncio.gather(*(clients.ask(question) for question in questions))
    striker.say(f"{len(questions)} questions answered undisturbed")
    tally = Tally()
    end_s = time.monotonic() + args.duration_s
    striking = asyncio.create_task(striker.strike_until(end_s, period_s=args.period_s))
    orders = [rng.sample(range(len(questions)), len(questions)) for _ in range(args.streams)]
    await asyncio.gather(
        *(
            clients.ask_until(end_s, [questions[i] for i in order], [answers[i] for i in order], tally)
            for order in orders
        )
    )
    await striking
    return tally


async def find_leaks(cluster: RunningCluster) -> list[str]:
    """Return what is still held although nothing runs; waits a while for it to go."""
    deadline_s = time.monotonic() + _LEAK_TIMEOUT_S
    while (leaks := await _held(cluster)) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.5)
    return leaks


async def _held(cluster: RunningCluster) -> list[str]:
    from ray.util.placement_group import placement_group_table

    leaks = []
    async with httpx.AsyncClient(timeout=5.0) as client:
        text = (await client.get(f"{cluster.http_urls[0]}/metrics")).text
    for name in ("kvorum_num_requests_running", "kvorum_num_requests_waiting", "kvorum_kv_blocks_held"):
        held = sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{"))
        if held:
            leaks.append(f"{name}: {held:g}")
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    if len(groups) != NUM_ENGINES:
        leaks.append(f"{len(groups)} placement groups for {NUM_ENGINES} engines")
    ranks = processes("_RankActor")
    if len(ranks) != NUM_ENGINES * NUM_RANKS:
        leaks.append(f"{len(ranks)} ranks instead of {NUM_ENGINES * NUM_RANKS}")
    return leaks


def main() -> int:
    """Run and report."""
    args = parse_args()
    config = configure(args)
    os.environ.update(serve_environment(config))
    warnings.simplefilter("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    console = Console(stderr=True)
    shared_before = set(os.listdir("/dev/shm"))
    with running_nodes(num_workers=NUM_ENGINES, cpus_per_worker=NUM_RANKS) as nodes:
        console.print("three nodes are up")
        with running_cluster(
            config, address=nodes.address, on_phase=console.print, on_progress=lambda _load, _name: None
        ) as cluster:
            striker = Striker(nodes, cluster.http_urls, NUM_ENGINES, random.Random(args.seed), console.print)

            async def go() -> tuple[Tally, float | None, list[str]]:
                await striker.wait_until_whole(_WHOLE_TIMEOUT_S)
                tally = await torment(args, cluster, striker)
                last_recovery_s = await striker.wait_until_whole(_WHOLE_TIMEOUT_S)
                return tally, last_recovery_s, await find_leaks(cluster)

            tally, last_recovery_s, leaks = asyncio.run(go())
    if left := [process.name() for process in processes("ray::")]:
        leaks.append(f"processes after the end: {left}")
    if shared := set(os.listdir("/dev/shm")) - shared_before:
        leaks.append(f"shared memory: {sorted(shared)}")
    if last_recovery_s is None:
        leaks.append("the cluster did not become whole again")
    report(tally, striker.strikes, leaks)
    if args.json:
        result = {"outcomes": tally.outcomes, "resumes": tally.resumes, "retries": tally.retries}
        strikes = [asdict(strike) for strike in striker.strikes]
        complaints = {"complaints": tally.complaints, "leaks": leaks}
        args.json.write_text(json.dumps({**result, "strikes": strikes, **complaints}, indent=2))
    bad = {Outcome.WRONG, Outcome.HUNG, Outcome.OTHER_ERROR}
    if not any(strike.kind == "router killed" for strike in striker.strikes):
        bad.add(Outcome.ROUTER_LOST)
    return int(bool(leaks or any(tally.outcomes[outcome] for outcome in bad)))


def report(tally: Tally, strikes: Sequence[Strike], leaks: Sequence[str]) -> None:
    """Print what came of it."""
    table = Table(title="What clients saw")
    table.add_column("outcome")
    table.add_column("requests", justify="right")
    for outcome in Outcome:
        table.add_row(outcome, str(tally.outcomes[outcome]))
    console = Console()
    console.print(table)
    console.print(
        f"{tally.resumes} times a request went on with another engine; {tally.retries} found no router at once"
    )
    console.print(summarise(strikes))
    console.print("left behind: " + ("; ".join(leaks) if leaks else "nothing"))
    for complaint in sorted(set(tally.complaints))[:10]:
        console.print(complaint, markup=False)
