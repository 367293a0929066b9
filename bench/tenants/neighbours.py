"""Does a tenant notice its neighbours? On a real cluster with the real model, driven by Locust.

    make bench-tenants                      # three rounds of three phases of 40 s
    make bench-tenants ARGS=--web           # the same with Locust's web view, on the port that it prints

A quiet tenant with an SLO asks steadily; a noisy one asks five times as much; a batch tenant sends long prompts whose
KV may be evicted. Phases: the quiet tenant alone, all three with the cache manager and the limits of workload.py, and
all three in baseline mode, where nobody is told from another (`--no-cache-manager`). Half of the users ask over HTTP,
half over gRPC. Printed are the times to the first token and between tokens as clients saw them, of all rounds together:
phases take turns, since a host that others use is slower in some minutes than in others.

Exits with 1 when the quiet tenant's p99 with the manager is more than 1.3 times that of its solo run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from environments import ROOT, ensure, python_of
from peers import Command
from processes import free_port, running
from rich.console import Console
from rich.table import Table
from workload import ALL, QUIET, TenantWork

TARGET = 1.3
OUTPUT = ROOT / "build" / "tenants"
LOCUST = ("locust==2.47.0", "grpcio==1.85.1", "protobuf==7.35.1")
# 512 blocks of bfloat16: about half of what everybody would take at once.
POOL_BYTES = 512 * 16 * 2 * 2 * 30 * 3 * 64
# A step's length, and so the longest time that a prompt keeps others waiting.
STEP_TOKENS = 64
# At the beginning of a phase, which does not count.
WARM_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One run: with whom, and whether there is a cache manager."""

    name: str
    tenants: tuple[TenantWork, ...]
    has_manager: bool


PHASES = (
    Phase("solo", (QUIET,), has_manager=True),
    Phase("cache manager", ALL, has_manager=True),
    Phase("baseline", ALL, has_manager=False),
)

Answers = list[dict[str, Any]]


def main() -> int:
    """Run the phases and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of all phases [3]")
    parser.add_argument("--duration-s", type=int, default=40, metavar="N", help="of a phase in a round [40]")
    parser.add_argument("--web", action="store_true", help="show Locust's web view while it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    ensure("locust", LOCUST)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    answers: dict[str, Answers] = {phase.name: [] for phase in PHASES}
    for _ in range(args.rounds):
        for phase in PHASES:
            answers[phase.name] += run_phase(phase, duration_s=args.duration_s, web=args.web)
    figures = {
        name: {work.name: figures_of([a for a in found if a["tenant"] == work.name]) for work in ALL}
        for name, found in answers.items()
    }
    ratios = quiet_ratios(figures)
    report(figures, ratios)
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "ratios": ratios}, indent=1))
    return int(not is_good(figures, ratios))


def run_phase(phase: Phase, *, duration_s: int, web: bool) -> Answers:
    """Start a server, let Locust ask, and return all answers."""
    print(f"{phase.name}: starting …", flush=True)
    http_port, grpc_port = free_port(), free_port()
    settings: dict[str, Any] = {
        "model": "smollm2-135m",
        "port": http_port,
        "grpc_port": grpc_port,
        "kv_cache_memory_bytes": POOL_BYTES,
        "max_num_batched_tokens": STEP_TOKENS,
        "cache_manager": phase.has_manager,
    }
    if phase.has_manager:
        settings["tenants"] = {work.name: work.settings for work in ALL}
    config = OUTPUT / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    serve = Command((python_of(None).parent / "kvorum", "serve", "--config", config), weights="", kv_cache="")
    with running(serve, port=http_port, log=OUTPUT / f"{phase.name}.log"):
        return _drive(phase, http_port, grpc_port, duration_s=duration_s, web=web)


def _drive(phase: Phase, http_port: int, grpc_port: int, *, duration_s: int, web: bool) -> Answers:
    results = OUTPUT / "answers.json"
    results.unlink(missing_ok=True)
    users = [f"{work.name.capitalize()}{protocol}" for work in phase.tenants for protocol in ("Http", "Grpc")]
    count = str(sum(work.users for work in phase.tenants))
    view = ["--autostart", "--autoquit", "1"] if web else ["--headless"]
    if web:
        view += ["--web-host", "127.0.0.1", "--web-port", str(port := free_port())]
        print(f"http://127.0.0.1:{port}", flush=True)
    arguments = [python_of("locust"), "-P", "-m", "locust", "-f", Path(__file__).parent / "locustfile.py", *users]
    arguments += ["--users", count, "--spawn-rate", count, "--run-time", f"{duration_s}s", "--stop-timeout", "120s"]
    environment = {
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), str(ROOT / "src"))),
        "KVORUM_HTTP": f"http://127.0.0.1:{http_port}",
        "KVORUM_GRPC": f"127.0.0.1:{grpc_port}",
        "KVORUM_TENANTS": "1" if phase.has_manager else "0",
        "KVORUM_RESULTS": str(results),
    }
    with (OUTPUT / f"{phase.name} locust.log").open("wb") as log:
        # Locust's own exit code says whether any request failed, which those that are refused do.
        subprocess.run([*arguments, *view], env=os.environ | environment, stdout=log, stderr=log, check=False)
    answers: Answers = json.loads(results.read_text())
    begin_s = min(answer["begin_s"] for answer in answers) + WARM_UP_S
    return [answer for answer in answers if answer["begin_s"] >= begin_s]


def figures_of(answers: Answers) -> dict[str, Any]:
    """Return one tenant's figures in one phase."""
    whole = [answer for answer in answers if answer["error"] is None]
    gaps_ms = [1e3 * gap for answer in whole for gap in answer["gaps_s"]]
    ttfts_ms = [1e3 * answer["ttft_s"] for answer in whole]
    return {
        "answers": len(whole),
        "tokens": sum(answer["tokens"] for answer in whole),
        "errors": dict(Counter(answer["error"] for answer in answers if answer["error"] is not None)),
        **{f"ttft_p{q}_ms": _percentile(ttfts_ms, q) for q in (50, 99)},
        **{f"itl_p{q}_ms": _percentile(gaps_ms, q) for q in (50, 99)},
        "tokens_evicted": sum(answer["receipt"].get("kv_tokens_evicted", 0) for answer in whole),
        "preemptions": sum(answer["receipt"].get("preemptions", 0) for answer in whole),
    }


def quiet_ratios(figures: dict[str, dict[str, dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return how many times as long the quiet tenant waited as when it was alone, by phase."""
    solo = figures["solo"][QUIET.name]
    return {
        name: {key: found[QUIET.name][key] / solo[key] for key in ("ttft_p99_ms", "itl_p99_ms")}
        for name, found in figures.items()
        if name != "solo"
    }


def is_good(figures: dict[str, dict[str, dict[str, Any]]], ratios: dict[str, dict[str, float]]) -> bool:
    """Say whether the quiet tenant got all its answers beside the others, and in time."""
    errors = figures["solo"][QUIET.name]["errors"] | figures["cache manager"][QUIET.name]["errors"]
    # A ratio that is no number, for want of answers, is not small either.
    return not errors and all(ratio <= TARGET for ratio in ratios["cache manager"].values())


def report(figures: dict[str, dict[str, dict[str, Any]]], ratios: dict[str, dict[str, float]]) -> None:
    """Print the figures, and what they mean for the quiet tenant."""
    headings = ("phase", "tenant", "answers", "refused", "tokens", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "evicted")
    table = Table(*headings, title="what clients saw")
    for phase, tenants in figures.items():
        for tenant, row in tenants.items():
            times = [f"{row[key]:.0f}" for key in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")]
            counts = [str(row["answers"]), str(sum(row["errors"].values())), str(row["tokens"])]
            if row["answers"] or row["errors"]:
                table.add_row(phase, tenant, *counts, *times, str(row["tokens_evicted"]))
    Console(width=120).print(table)
    for phase, found in ratios.items():
        print(f"quiet tenant, {phase}: p99 TTFT {found['ttft_p99_ms']:.2f} x solo, p99 ITL {found['itl_p99_ms']:.2f} x")
    for phase, tenants in figures.items():
        for tenant, row in tenants.items():
            for error, count in row["errors"].items():
                print(f"{phase}, {tenant}: {count} x {error}")


def _percentile(values: Sequence[float], q: int) -> float:
    return float(np.percentile(values, q)) if values else float("nan")
