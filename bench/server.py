"""What the server adds to a decode step: its period with a real cluster around it, over the same step in a bare loop.

    make bench-server ARGS="--rounds 3"

The step: as many sequences as --batch, from --prompt tokens of context on, greedy. In the bare loop a scheduler and a
rank in one process do nothing else, and what counts is the rank's work alone. In the server the same requests come over
HTTP as streams, and what counts is the time from one token of a stream to the next, while all of them are decoded. Each
round takes both, one after the other, for a rank that has one core, and for one that has all of them and shares them
with everything that stands around it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence

from kvorum.cluster.bench_client import Target, find_model, send_closed_loop
from kvorum.cluster.bench_workload import BenchRequest, Tenant
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.launcher import running_cluster
from kvorum.kvstore.store import KVStore
from kvorum.workers.composer import SchedulerLimits
from kvorum.workers.config import COMPUTE_ENVIRONMENT, EngineConfig
from kvorum.workers.request import EngineRequest, KVParams, RequestId, SamplingParams
from kvorum.workers.scheduler import Scheduler
from kvorum.workers.worker import load_worker

MODEL = "smollm2-135m"
BLOCK_SIZE = 16
WEIGHTS = {"quantization": "gguf", "kv_cache_dtype": "bfloat16"}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--answer", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    prompts = make_prompts(args.batch, args.prompt)
    if args.bare:
        print(json.dumps(bare_step_ms(prompts, args.answer)))
        return
    warnings.simplefilter("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    cores = len(os.sched_getaffinity(0))
    for num_cpus in sorted({1, cores}):
        pairs = [(time_alone(num_cpus, args), time_served(num_cpus, prompts, args.answer)) for _ in range(args.rounds)]
        ratios = [served / bare for bare, served in pairs]
        print(
            f"batch {args.batch}, rank on {num_cpus} of {cores} cores:"
            f"  bare {statistics.median(bare for bare, _ in pairs):.1f} ms"
            f"  served {statistics.median(served for _, served in pairs):.1f} ms"
            f"  {statistics.median(ratios):.2f} x ({min(ratios):.2f} - {max(ratios):.2f})",
            flush=True,
        )


def make_prompts(batch: int, length: int) -> list[tuple[int, ...]]:
    """Draw prompts that share nothing."""
    rng = random.Random(0)
    return [tuple(rng.randrange(1000, 40_000) for _ in range(length)) for _ in range(batch)]


def time_alone(num_cpus: int, args: argparse.Namespace) -> float:
    """Time the bare loop in a process of its own, which has the threads that a rank has."""
    environment = {**os.environ, **COMPUTE_ENVIRONMENT, "OMP_NUM_THREADS": str(num_cpus)}
    if num_cpus == len(os.sched_getaffinity(0)):
        environment["OMP_PROC_BIND"] = "true"
    numbers = [f"--{name}={getattr(args, name)}" for name in ("batch", "prompt", "answer")]
    command = [sys.executable, "-P", __file__, "--bare", *numbers]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout))


def bare_step_ms(prompts: Sequence[tuple[int, ...]], answer: int) -> float:
    """Return the mean time that a rank takes for a step in which all sequences are decoded."""
    batch = len(prompts)
    config = EngineConfig(model=MODEL, model_name=MODEL, max_num_seqs=batch, **WEIGHTS)  # type: ignore[arg-type]
    worker, shape = load_worker(config)
    store = KVStore(num_blocks=shape.num_blocks, block_size=BLOCK_SIZE, max_num_seqs=batch, enable_prefix_caching=True)
    limits = SchedulerLimits(shape.max_model_len, shape.vocab_size, batch, config.max_num_batched_tokens)
    scheduler = Scheduler(store, limits)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        scheduler.add(EngineRequest(RequestId(str(number)), prompt, sampling, KVParams()), now_s=0.0)
    steps_s = []
    while (plan := scheduler.schedule(now_s=0.0)) is not None:
        start_s = time.perf_counter()
        result = worker.execute(plan)
        if len(plan.rows) == plan.num_tokens == batch:
            steps_s.append(time.perf_counter() - start_s)
        scheduler.apply(plan, result)
        scheduler.release({}, now_s=0.0)
    return 1e3 * statistics.mean(steps_s)


def time_served(num_cpus: int, prompts: Sequence[tuple[int, ...]], answer: int) -> float:
    """Return the mean time between two tokens while a real cluster decodes all requests."""
    config = ClusterConfig(
        num_cpus_per_rank=num_cpus,
        max_num_seqs=len(prompts),
        port=0,
        grpc_port=0,
        **WEIGHTS,  # type: ignore[arg-type]
    )
    with running_cluster(
        config, address=None, on_phase=lambda _: None, on_progress=lambda _load, _name: None
    ) as cluster:
        return asyncio.run(stream_all(cluster.http_urls[0], prompts, answer))


async def stream_all(url: str, prompts: Sequence[tuple[int, ...]], answer: int) -> float:
    """Stream all answers at once; return the milliseconds for each token while all of them are decoded."""
    target = Target(url, await find_model(url, api_key=None), extra={"ignore_eos": True})
    requests = [BenchRequest(prompt, answer, Tenant("bench", api_key=None)) for prompt in prompts]
    results = await send_closed_loop(target, requests, concurrency=len(requests), on_done=lambda _: None)
    if errors := [result.error for result in results if result.error]:
        sys.exit(f"not all requests were served: {errors[0]}")
    begin_s = max(result.text_times_s[0] for result in results)
    end_s = min(result.text_times_s[-1] for result in results)
    # A piece of text is a token, or some that only together are text.
    tokens = [
        sum(begin_s < time_s <= end_s for time_s in result.text_times_s)
        * (result.output_tokens / len(result.text_times_s))
        for result in results
    ]
    return 1e3 * (end_s - begin_s) / statistics.mean(tokens)


if __name__ == "__main__":
    main()
