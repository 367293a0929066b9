"""Kills and stops the cache manager of a loaded cluster, and counts what clients notice, which should be nothing.

    make chaos-manager ARGS="--duration-s 120 --period-s 5"

A real Ray cluster with two engines, whose model is the fake one that repeats its prompt, so that every answer can be
checked. Clients ask without a pause while the manager is killed (SIGKILL; Ray starts it anew) or stopped for four
seconds (SIGSTOP: to everybody it is cut off in both directions, and what was sent meanwhile arrives afterwards, late).
A recovery ends when the manager again knows all engines, and its books agree with what they say. At the end nothing may
be reserved. Exits with 1 when a request failed, an answer was wrong, or the books are off.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import signal
import statistics
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.launcher import RunningCluster, running_cluster

NUM_ENGINES = 2
STOPPED_S = 4.0
_RECOVERY_TIMEOUT_S = 60.0
_POLL_S = 0.02


@dataclass
class Result:
    """What came of it. recovery_s: of each strike."""

    answers: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    strikes: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing failed and nothing is left."""
        return not self.failures and not self.left


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duration-s", type=float, default=120.0, metavar="X", help="[120]")
    parser.add_argument("--period-s", type=float, default=5.0, metavar="X", help="between two strikes [5]")
    parser.add_argument("--clients", type=int, default=32, metavar="N", help="at a time [32]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    config = ClusterConfig(
        executor="fake",
        fake_step_delay_s=0.01,
        num_engines=NUM_ENGINES,
        kv_cache_memory_bytes=512 * 16 * 46_080,  # 512 blocks: less than all clients at once would like
        max_num_seqs=32,
        port=0,
        grpc_port=0,
    )
    with running_cluster(
        config, address=None, on_phase=lambda _: None, on_progress=lambda _load, _name: None
    ) as cluster:
        result = asyncio.run(torment(cluster, args))
    report(result)
    if args.json:
        args.json.write_text(json.dumps(result.__dict__ | {"is_good": result.is_good}, indent=1))
    return int(not result.is_good)


async def torment(cluster: RunningCluster, args: argparse.Namespace) -> Result:
    """Ask and strike, then look at what is left."""
    result = Result()
    end_s = time.monotonic() + args.duration_s
    limits = httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(base_url=cluster.http_urls[0], timeout=120.0, limits=limits) as client:
        asking = [ask_until(client, end_s, random.Random(args.seed + i), result) for i in range(args.clients)]
        striking = asyncio.create_task(strike_until(client, end_s, args.period_s, result))
        await asyncio.gather(*asking)
        await striking
        result.left = await what_is_left(client)
    return result


async def ask_until(client: httpx.AsyncClient, end_s: float, rng: random.Random, result: Result) -> None:
    """Ask for answers that can be foretold, some shrinkable, until it is time."""
    while time.monotonic() < end_s:
        prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(20, 200))) + "!"
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(20, 200), "ignore_eos": True}
        try:
            response = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            result.failures[f"{type(error).__name__}: {error}"] += 1
            continue
        if response.status_code != 200:
            result.failures[f"{response.status_code}: {response.text[:200]}"] += 1
        elif not (prompt * 100).startswith(response.json()["choices"][0]["text"]):
            result.failures["WRONG ANSWER"] += 1
        else:
            result.answers += 1


async def strike_until(client: httpx.AsyncClient, end_s: float, period_s: float, result: Result) -> None:
    """Kill or stop the manager again and again; wait for each recovery."""
    for kind in itertools.cycle(("killed", "killed", "stopped")):
        await asyncio.sleep(period_s)
        if time.monotonic() > end_s:
            return
        process = manager_process()
        struck_s = time.monotonic()
        process.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        if kind == "stopped":
            await asyncio.sleep(STOPPED_S)
            process.send_signal(signal.SIGCONT)
            struck_s = time.monotonic()
        result.strikes.append(kind)
        result.recovery_s.append(await recovered_s(client, struck_s))


def manager_process() -> psutil.Process:
    """Return the manager's process, which Ray names after its class."""
    children = psutil.Process().children(recursive=True)
    return next(process for process in children if process.cmdline()[:1] == ["ray::_ManagerActor"])


async def recovered_s(client: httpx.AsyncClient, struck_s: float) -> float:
    """Wait until the manager knows everything again; return how long that took."""
    await asyncio.sleep(0.2)  # until then its loss may not be known
    while time.monotonic() < struck_s + _RECOVERY_TIMEOUT_S:
        view = await look(client)
        if view and len(view["engines"]) == NUM_ENGINES and not view["drift_blocks"]:
            return time.monotonic() - struck_s
        await asyncio.sleep(_POLL_S)
    raise TimeoutError("the manager did not come back")


async def look(client: httpx.AsyncClient) -> dict[str, Any] | None:
    """Return the manager's view; None while it is away."""
    response = await client.get("/operator/cluster")
    view: dict[str, Any] = response.json()
    return view if response.status_code == 200 else None


async def what_is_left(client: httpx.AsyncClient) -> list[str]:
    """Return what the manager still has in its books although nothing runs; waits a while for it to go."""
    left = ["the manager is away"]
    for _ in range(200):
        if view := await look(client):
            left = [f"drift of {view['drift_blocks']} blocks"] if view["drift_blocks"] else []
            for kind in ("held_blocks", "reserved_blocks"):
                left += [f"{engine['engine_id']}: {engine[kind]} {kind}" for engine in view["engines"] if engine[kind]]
            if not left:
                return []
        await asyncio.sleep(0.1)
    return left


def report(result: Result) -> None:
    """Print what came of it."""
    print(f"{result.answers} answers complete and correct, {sum(result.failures.values())} failed")
    for failure, count in result.failures.most_common(5):
        print(f"  {count} x {failure}")
    for kind in ("killed", "stopped"):
        times = [s for strike, s in zip(result.strikes, result.recovery_s, strict=True) if strike == kind]
        if times:
            print(f"{kind} {len(times)} times, recovered in {statistics.median(times):.1f} s, at most {max(times):.1f}")
    print("left in the books: " + ("; ".join(result.left) or "nothing"))


if __name__ == "__main__":
    sys.exit(main())
