"""What tensor parallelism costs: the time of a step that ranks spend on each other, and each rank's memory.

    make bench-ranks ARGS="--ranks 1 2 4"

Each rank is a process of its own on an equal share of the cores, over Gloo, as the engine's are on CPUs. Rank 0 times
decode steps at several batch sizes and a prompt; what the collectives take is timed around each call, so it holds the
waiting for the slower rank too. On a machine with fewer cores than ranks the ranks take turns, and that is what waits.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kvorum.workers.config import COMPUTE_ENVIRONMENT

os.environ.update(COMPUTE_ENVIRONMENT)  # before torch is loaded

import torch

from kvorum.kernels.plan import SequenceStep
from kvorum.kernels.spec import Shard
from kvorum.kvstore.types import SeqId, blocks_for
from kvorum.workers.communicator import Alone, Communicator, MeetingPoint, RankGroup, open_meeting
from kvorum.workers.config import EngineConfig
from kvorum.workers.lockstep import Leader, follow
from kvorum.workers.plan import RowPlan, SampleRequest, StepPlan
from kvorum.workers.request import SamplingParams
from kvorum.workers.worker import RankWorker, load_worker

CONTEXT_TOKENS = 512
PROMPT_TOKENS = 512
BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """One kind of step. step_ms and share: medians; share is of the step's time, in collectives, on rank 0."""

    ranks: int
    step: str
    step_ms: float
    collectives_ms: float
    share: float
    num_collectives: int
    sent_bytes: int


class Meter:
    """Adds up the time that a rank spends in its communicator's calls, and what it hands over."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a step."""
        self.seconds, self.calls, self.sent_bytes = 0.0, 0, 0

    def watch(self, group: RankGroup) -> None:
        """Time a group's collectives from here on."""
        group.add_up = self._timed(group.add_up)  # type: ignore[method-assign]
        group.collect = self._timed(group.collect)  # type: ignore[method-assign]
        group.hand_out = self._timed(group.hand_out)  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., object]) -> Callable[..., object]:
        def timed(argument: torch.Tensor | Sequence[int]) -> object:
            begin_s = time.perf_counter()
            result = call(argument)
            self.seconds += time.perf_counter() - begin_s
            self.calls += 1
            self.sent_bytes += argument.nbytes if isinstance(argument, torch.Tensor) else 8 * len(argument)
            return result

        return timed


def decode_plan(batch: int, blocks_per_sequence: int) -> StepPlan:
    """Return a decode step of `batch` sequences of CONTEXT_TOKENS."""
    rows = []
    for row in range(batch):
        table = tuple(range(row * blocks_per_sequence, (row + 1) * blocks_per_sequence))
        step = SequenceStep(row, table, CONTEXT_TOKENS, 1, CONTEXT_TOKENS)
        rows.append(RowPlan(SeqId(row), (100 + row,), step, SampleRequest(GREEDY, 1)))
    return StepPlan((), tuple(rows))


def prompt_plan() -> StepPlan:
    """Return a step that reads a prompt."""
    table = tuple(range(blocks_for(PROMPT_TOKENS, BLOCK_SIZE)))
    step = SequenceStep(0, table, 0, PROMPT_TOKENS, 0)
    return StepPlan((), (RowPlan(SeqId(0), tuple(range(100, 100 + PROMPT_TOKENS)), step, SampleRequest(GREEDY, 0)),))


def run_rank(rank: int, args: argparse.Namespace, meeting: MeetingPoint | None, results: Connection) -> None:
    """Be one rank; rank 0 sends its timings."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.num_ranks))
    config = EngineConfig(
        model=args.model,
        model_name=args.model,
        tensor_parallel_size=args.num_ranks,
        kv_cache_memory_bytes=2**30,
        max_num_seqs=64,
        **({"dtype": "float32", "quantization": "none"} if args.weights == "float32" else {"quantization": "gguf"}),
    )
    meter = Meter()
    groups: list[RankGroup] = []

    def meet(shards: Sequence[Shard]) -> Communicator:
        if meeting is None:
            return Alone()
        groups.append(RankGroup(shards, rank, meeting, host="127.0.0.1", device=torch.device("cpu")))
        return groups[0]

    worker, _ = load_worker(config, rank=rank, meet=meet)
    if rank > 0:
        follow(worker, groups[0])
    if groups:
        meter.watch(groups[0])
    leader = Leader(worker, groups[0]) if groups else worker
    results.send(time_steps(leader, meter, args))


def time_steps(worker: RankWorker, meter: Meter, args: argparse.Namespace) -> list[Timing]:
    """Time each kind of step."""
    blocks = blocks_for(CONTEXT_TOKENS + 1, BLOCK_SIZE)
    plans = {f"decode, batch {batch}": decode_plan(batch, blocks) for batch in args.batch}
    plans[f"prompt of {PROMPT_TOKENS}"] = prompt_plan()
    timings = []
    for name, plan in plans.items():
        steps, shares, collectives = [], [], []
        for repeat in range(args.repeats + 2):
            meter.reset()
            begin_s = time.perf_counter()
            worker.execute(plan)
            step_s = time.perf_counter() - begin_s
            if repeat >= 2:  # the first ones warm up
                steps.append(step_s)
                shares.append(meter.seconds / step_s)
                collectives.append(meter.seconds)
        timings.append(
            Timing(
                args.num_ranks,
                name,
                1e3 * statistics.median(steps),
                1e3 * statistics.median(collectives),
                statistics.median(shares),
                meter.calls,
                meter.sent_bytes,
            )
        )
    return timings


def measure(args: argparse.Namespace, num_ranks: int) -> list[Timing]:
    """Start the ranks, wait for rank 0's timings, end them all."""
    args.num_ranks = num_ranks
    meeting, _store = open_meeting("127.0.0.1", world_size=num_ranks) if num_ranks > 1 else (None, None)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=run_rank, args=(rank, args, meeting, sender)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    sender.close()  # else nobody would notice that they died
    try:
        timings: list[Timing] = receiver.recv()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return timings


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", choices=("gguf", "float32"), default="float32", help="[float32]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="[1 2]")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="[1 8 32]")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each kind [20]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    args = parser.parse_args()
    timings = [timing for num_ranks in args.ranks for timing in measure(args, num_ranks)]
    print(f"{args.weights}, contexts of {CONTEXT_TOKENS} tokens, {os.cpu_count()} cores shared by the ranks")
    for timing in timings:
        print(
            f"{timing.ranks} ranks  {timing.step:<18} {timing.step_ms:7.1f} ms, {timing.share:5.1%} of it in "
            f"{timing.num_collectives} collectives ({timing.collectives_ms:.1f} ms), {timing.sent_bytes / 1e3:,.0f} kB"
        )
    if args.json:
        args.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=2))


if __name__ == "__main__":
    main()
