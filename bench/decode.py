"""Decode speed of one engine in this process: each policy against `full`, interleaved in one run.

    make bench ARGS="--context 512 --batch 4 --rounds 3"

Prints tokens per second and, as the number to quote, the ratio to `full` of the same round (median over rounds). A
budget that is never reached shows what keeping scores costs; a quarter of the context shows eviction.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from kvorum.workers.config import COMPUTE_ENVIRONMENT

os.environ.update(COMPUTE_ENVIRONMENT)  # before torch is loaded

import torch

from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.lab import Bench, CountingBackend, load_backend
from kvorum.workers.request import KVParams


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences side by side")
    parser.add_argument("--tokens", type=int, default=24, help="tokens each sequence generates")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    backend = load_backend(resolve(args.model))
    prompts = torch.randint(0, backend.spec.vocab_size, (args.batch, args.context), generator=torch.manual_seed(0))
    cases = {
        "full": KVParams(),
        "h2o, budget not reached": KVParams("h2o", 1.0),
        "h2o, a quarter": KVParams("h2o", 0.25),
        "h2o_avg, a quarter": KVParams("h2o_avg", 0.25),
    }
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, kv in cases.items():
            speeds[name].append(decode_speed(backend, prompts.tolist(), kv, num_tokens=args.tokens))
    for name, values in speeds.items():
        ratio = statistics.median(value / full for value, full in zip(values, speeds["full"], strict=True))
        print(f"{name:26} {statistics.median(values):7.1f} tokens/s   {ratio:5.2f} x full")


def decode_speed(backend: CountingBackend, prompts: list[list[int]], kv: KVParams, *, num_tokens: int) -> float:
    """Return tokens per second after the first token of every sequence."""
    blocks = len(prompts) * (len(prompts[0]) + num_tokens + 32) // 16
    bench = Bench(backend, num_blocks=2 * blocks, max_num_seqs=len(prompts))
    for index, prompt in enumerate(prompts):
        bench.submit(str(index), prompt, max_tokens=num_tokens, kv=kv)
    decoding_s, tokens = 0.0, 0
    last_s = time.perf_counter()
    for plan in bench.steps():
        now_s = time.perf_counter()
        if all(row.step.num_tokens == 1 for row in plan.rows):
            decoding_s += now_s - last_s
            tokens += len(plan.rows)
        last_s = now_s
    return tokens / decoding_s


if __name__ == "__main__":
    main()
