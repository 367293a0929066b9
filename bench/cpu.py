"""The CPU back end's decode step against what this machine could do at most, and what scores and eviction change.

    make bench ARGS="--rounds 5 --json out.json"

1. Measures the machine in every round, since other users of the host take their share of it: reading memory, float
   multiply-adds, int16 dot products (native/floor.cc).
2. Times decode steps at several batch sizes, by turns: `full`, with scores, with victims chosen and replaced.
3. Prints each against its floor, and the ratios to quote: medians over rounds of the ratio within a round.
4. Times steps by turns alone and beside a process that keeps one core busy for a fifth of the time, in bursts.
5. Times prompts, with both roundings of their activations.

The floor of a step is the sum over its two parts, which depend on each other layer by layer and cannot overlap: linear
layers and attention each take at least the time to read their bytes, or to do their arithmetic, whichever is longer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvorum.workers.config import COMPUTE_ENVIRONMENT

os.environ.update(COMPUTE_ENVIRONMENT)  # before torch is loaded

import torch

from kvorum.kernels.cpu.backend import CpuBackend
from kvorum.kernels.cpu.build import FLAGS, find_compiler
from kvorum.kernels.cpu.memory import huge_zeros
from kvorum.kernels.cpu.pool import CpuPool
from kvorum.kernels.plan import EvictionRule, SequenceStep
from kvorum.kernels.spec import DecoderSpec, Shard
from kvorum.workers.backends import load_backend
from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.config import EngineConfig

BLOCK_SIZE = 16
RULE = EvictionRule(recent_tokens=64)
PROMPT_CHUNK = 512
NEIGHBOUR_SHARE = 0.2
# What a neighbour runs, given its core, how long it is busy, and how long it sleeps then.
_NEIGHBOUR = """
import os, sys, time
core, busy_s, idle_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
os.sched_setaffinity(0, {core})
print(flush=True)
while True:
    until_s = time.perf_counter() + busy_s
    while time.perf_counter() < until_s:
        pass
    time.sleep(idle_s)
"""
# A row of results for --json.
Row = dict[str, object]
WEIGHTS = {
    "gguf": {"quantization": "gguf"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
_NATIVE = Path(__file__).parent / "native" / "floor.cc"
_HEADERS = Path(__file__).parents[1] / "kernels" / "cpu" / "native"


@dataclass(frozen=True)
class Speeds:
    """What all cores reach together, per second: bytes read, operations of float multiply-adds and of int16 dots."""

    read_bytes: float
    fma_flops: float
    dot_ops: float


class Machine:
    """Measures what this machine can do, by native/floor.cc."""

    def __init__(self, num_threads: int) -> None:
        """Compile it."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "floor.so"
            command = [find_compiler(), *FLAGS, "-w", f"-I{_HEADERS}", str(_NATIVE), "-o", str(path)]
            subprocess.run(command, check=True)
            self._library = ctypes.CDLL(str(path))
        for name in ("kvorum_read_bandwidth", "kvorum_fma_rate", "kvorum_dot_rate"):
            getattr(self._library, name).restype = ctypes.c_double
        self._numbers = huge_zeros((2**26,), torch.float32).fill_(1.0)
        self.num_threads = num_threads

    def speeds(self) -> Speeds:
        """Measure."""
        address, count = ctypes.c_void_p(self._numbers.data_ptr()), ctypes.c_int64(self._numbers.numel())
        threads, turns = self.num_threads, ctypes.c_int64(3_000_000)
        return Speeds(
            read_bytes=self._library.kvorum_read_bandwidth(address, count, threads, 4),
            fma_flops=max(self._library.kvorum_fma_rate(threads, turns) for _ in range(2)),
            dot_ops=max(self._library.kvorum_dot_rate(threads, turns) for _ in range(2)),
        )


@dataclass(frozen=True)
class Case:
    """One kind of decode step. slots: what each sequence holds after the step."""

    name: str
    batch: int
    slots: int
    keeps_scores: bool = False
    evicts: bool = False


@dataclass
class Timing:
    """A case's steps, round by round: what they took, their floor, and what `full` took in the same round."""

    weights: str
    case: Case
    step_ms: list[float] = field(default_factory=list)
    floor_ms: list[float] = field(default_factory=list)
    full_ms: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Say the medians of the rounds."""
        floors = [step / floor for step, floor in zip(self.step_ms, self.floor_ms, strict=True)]
        ratios = [step / full for step, full in zip(self.step_ms, self.full_ms, strict=True)]
        return (
            f"  {self.case.name:24} {statistics.median(self.step_ms):7.2f} ms"
            f"  {statistics.median(floors):5.2f} x floor ({min(floors):.2f} - {max(floors):.2f})"
            f"  {statistics.median(ratios):5.3f} x full ({min(ratios):.3f} - {max(ratios):.3f})"
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", nargs="+", default=["gguf", "float32"], choices=list(WEIGHTS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512, help="slots of each sequence")
    parser.add_argument(
        "--long-context", type=int, default=3000, help="slots at which eviction is compared, 4 sequences"
    )
    parser.add_argument("--bursts-ms", type=float, nargs="*", default=[0.3, 1.0], help="how long a neighbour is busy")
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 3000], help="their lengths; of GGUF weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a case in each round")
    parser.add_argument("--json", type=Path, help="write everything there too")
    args = parser.parse_args()

    machine = Machine(torch.get_num_threads())
    speeds = machine.speeds()
    print(
        f"{machine.num_threads} threads: read {speeds.read_bytes / 1e9:.1f} GB/s, "
        f"multiply-add {speeds.fma_flops / 1e9:.0f} GFLOP/s, int16 dot {speeds.dot_ops / 1e9:.0f} GOP/s\n"
    )
    results, neighbours = [], []
    for weights in args.weights:
        backend = load(args.model, weights)
        groups = [cases_at(batch, args.context) for batch in args.batch] + [cases_at(4, args.long_context)]
        for cases in groups:
            results += time_cases(backend, weights, cases, machine, rounds=args.rounds, steps=args.steps)
        for burst_ms in args.bursts_ms:
            beside = time_beside_neighbour(backend, args.context, burst_ms, rounds=args.rounds, steps=args.steps)
            neighbours.append({"weights": weights} | beside)
    has_prompts = args.prompts and "gguf" in args.weights
    prompts = time_prompts(args.model, args.prompts, rounds=args.rounds) if has_prompts else []
    if args.json:
        steps = [asdict(timing) for timing in results]
        args.json.write_text(json.dumps({"steps": steps, "neighbours": neighbours, "prompts": prompts}, indent=2))


def load(model: str, weights: str, **settings: str) -> CpuBackend:
    """Load the model with this kind of weights."""
    settings = WEIGHTS[weights] | settings
    config = EngineConfig(model=model, model_name=model, backend="cpu", **settings)  # type: ignore[arg-type]
    checkpoint = resolve(model)
    backend = load_backend(config, checkpoint, Shard.whole(checkpoint.spec))
    assert isinstance(backend, CpuBackend)
    return backend


def cases_at(batch: int, slots: int) -> list[Case]:
    """Return what is compared at one size; eviction holds a quarter."""
    return [
        Case("full", batch, slots),
        Case("scores, nothing evicted", batch, slots, keeps_scores=True),
        Case("h2o at a quarter", batch, slots // 4, keeps_scores=True, evicts=True),
    ]


def time_cases(
    backend: CpuBackend, weights: str, cases: Sequence[Case], machine: Machine, *, rounds: int, steps: int
) -> list[Timing]:
    """Time the cases of one size by turns and print them."""
    batch, slots = cases[0].batch, cases[0].slots
    pool, tables = filled_pool(backend, batch, slots)
    timings = [Timing(weights, case) for case in cases]
    for _ in range(rounds):
        speeds = machine.speeds()
        for timing in timings:
            timing.step_ms.append(min(step_ms(backend, pool, timing.case, tables) for _ in range(steps)))
            timing.floor_ms.append(floor_ms(backend, timing.case, speeds))
            timing.full_ms.append(timings[0].step_ms[-1])
    print(f"{weights}, batch {batch}, {slots} tokens of context", *(timing.line() for timing in timings), sep="\n")
    return timings


def filled_pool(backend: CpuBackend, batch: int, slots: int) -> tuple[CpuPool, list[tuple[int, ...]]]:
    """Return a pool of random keys and values, and each sequence's block table, in random order."""
    per_sequence = -(-(slots + 1) // BLOCK_SIZE)
    pool = backend.allocate_pool(num_blocks=batch * per_sequence, block_size=BLOCK_SIZE, max_num_seqs=batch)
    pool.kv.copy_(torch.randn(pool.kv.shape[2:]).to(pool.kv.dtype))
    order = torch.randperm(batch * per_sequence, generator=torch.manual_seed(0)).tolist()
    return pool, [tuple(order[i * per_sequence : (i + 1) * per_sequence]) for i in range(batch)]


def time_beside_neighbour(backend: CpuBackend, slots: int, burst_ms: float, *, rounds: int, steps: int) -> Row:
    """Time steps of 16 sequences by turns alone and beside a busy process, and print them: means, so that all count."""
    case = Case("full", 16, slots)
    pool, tables = filled_pool(backend, case.batch, slots)
    alone_ms, beside_ms = [], []
    for _ in range(rounds):
        alone_ms.append(statistics.mean(step_ms(backend, pool, case, tables) for _ in range(5 * steps)))
        with neighbour(burst_ms):
            beside_ms.append(statistics.mean(step_ms(backend, pool, case, tables) for _ in range(5 * steps)))
    ratios = [beside / alone for beside, alone in zip(beside_ms, alone_ms, strict=True)]
    print(
        f"batch 16, {slots} tokens of context, beside a process that is busy for {burst_ms:g} ms of each "
        f"{burst_ms / NEIGHBOUR_SHARE:g}\n"
        f"  {statistics.median(beside_ms):.2f} ms, alone {statistics.median(alone_ms):.2f} ms:"
        f" {statistics.median(ratios):.2f} x ({min(ratios):.2f} - {max(ratios):.2f})"
    )
    return {"burst_ms": burst_ms, "alone_ms": alone_ms, "beside_ms": beside_ms}


@contextlib.contextmanager
def neighbour(burst_ms: float) -> Iterator[None]:
    """Keep a core busy meanwhile for NEIGHBOUR_SHARE of the time."""
    core, busy_s = min(os.sched_getaffinity(0)), burst_ms / 1e3
    numbers = [str(core), str(busy_s), str(busy_s / NEIGHBOUR_SHARE - busy_s)]
    with subprocess.Popen([sys.executable, "-S", "-c", _NEIGHBOUR, *numbers], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()  # it is there
        try:
            yield
        finally:
            process.terminate()


def time_prompts(model: str, lengths: Sequence[int], *, rounds: int) -> list[Row]:
    """Time prompts by turns with words and bytes for their activations, and print the best and the median."""
    rows: list[Row] = []
    backends = {rounding: load(model, "gguf", prompt_activations=rounding) for rounding in ("int16", "int8")}
    for length in lengths:
        taken_ms: dict[str, list[float]] = {rounding: [] for rounding in backends}
        for _ in range(rounds):
            for rounding, backend in backends.items():
                taken_ms[rounding].append(prompt_ms(backend, length))
        for rounding, each_ms in taken_ms.items():
            median_ms = statistics.median(each_ms)
            print(f"prompt of {length} tokens, {rounding}: {min(each_ms):.0f} ms at best, median {median_ms:.0f} ms")
            rows.append({"length": length, "rounding": rounding, "prompt_ms": each_ms})
    return rows


def prompt_ms(backend: CpuBackend, length: int) -> float:
    """Run one prompt in chunks and return what it took."""
    pool, (table,) = filled_pool(backend, 1, length)
    start_s = time.perf_counter()
    for start in range(0, length, PROMPT_CHUNK):
        tokens = torch.randint(0, backend.spec.vocab_size, (min(PROMPT_CHUNK, length - start),))
        chunk = SequenceStep(row=0, block_table=table, start=start, num_tokens=len(tokens), num_slots=start)
        backend.forward(pool, backend.prepare(pool, tokens, [chunk]))
    return (time.perf_counter() - start_s) * 1e3


def step_ms(backend: CpuBackend, pool: CpuPool, case: Case, tables: Sequence[tuple[int, ...]]) -> float:
    """Run one decode step, logits included, and return what it took."""
    pool.victims.fill_(0)
    tokens = torch.randint(0, backend.spec.vocab_size, (case.batch,))
    sequences = [
        SequenceStep(
            row=row,
            block_table=table,
            start=case.slots * (4 if case.evicts else 1),
            num_tokens=1,
            num_slots=case.slots if case.evicts else case.slots - 1,
            rule=RULE if case.keeps_scores else None,
            replace=case.evicts,
            choose_victims=case.evicts,
        )
        for row, table in enumerate(tables)
    ]
    start_s = time.perf_counter()
    backend.logits(backend.forward(pool, backend.prepare(pool, tokens, sequences)))
    return (time.perf_counter() - start_s) * 1e3


def floor_ms(backend: CpuBackend, case: Case, speeds: Speeds) -> float:
    """Return the least time that a step can take at these speeds."""
    spec = backend.spec
    multiplies = case.batch * matrix_elements(spec)
    rate = speeds.dot_ops if backend.is_quantized else speeds.fma_flops
    linear_s = max(backend.weight_bytes / speeds.read_bytes, 2 * multiplies / rate)
    slots = case.batch * case.slots
    attention_flops = 4 * slots * spec.num_layers * spec.num_heads * spec.head_dim
    slot_bytes = backend.block_bytes(BLOCK_SIZE) // BLOCK_SIZE
    pairs = spec.num_layers * spec.num_kv_heads
    # Beside K and V: a score is read and written, a position is read to choose a victim.
    unread = 8 * pairs - (8 * pairs if case.keeps_scores else 0) - (4 * pairs if case.evicts else 0)
    attention_s = max(slots * (slot_bytes - unread) / speeds.read_bytes, attention_flops / speeds.fma_flops)
    return (linear_s + attention_s) * 1e3


def matrix_elements(spec: DecoderSpec) -> int:
    """Return the weights that a token is multiplied with."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    layer = spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)
    return spec.num_layers * layer + spec.hidden_size * spec.vocab_size


if __name__ == "__main__":
    main()
