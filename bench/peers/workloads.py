"""The five workloads, and how many requests of each a run sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from kvorum.cluster.bench_summary import Slo
from kvorum.cluster.bench_workload import BenchRequest, Lengths, Workload, draw_requests

VOCAB_SIZE = 49_152
# The longest request of any workload has 3,256 tokens, prompt and answer; in blocks of 128:
LONGEST_TOKENS = 3_328
# What servers are set up for where memory is not short.
MAX_MODEL_LEN = 4_096
MAX_CONCURRENCY = 16

_ANY = Lengths("fixed", 128, 128)


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """A closed loop of `concurrency` requests at a time.

    pool_tokens: the KV pool's size, where memory is what is measured; None leaves room for everything. It counts tokens
    of float32 keys and values for weights in f32, of 16 bits a number for q4_1. slo: what a good answer keeps to.
    """

    title: str
    work: Workload
    concurrency: int
    slo: Slo = field(default_factory=Slo)
    pool_tokens: int | None = None

    def requests(self, rng: Random, *, scale: float) -> list[BenchRequest]:
        """Draw the requests: `scale` of the whole number, but never so few that fewer run at once."""
        least = min(self.concurrency, self.work.num_requests)
        return draw_requests(replace(self.work, num_requests=max(least, round(scale * self.work.num_requests))), rng)


def _work(num_requests: int, prompt_tokens: Lengths, output_tokens: Lengths, shared_prefix_tokens: int = 0) -> Workload:
    return Workload(num_requests, prompt_tokens, output_tokens, VOCAB_SIZE, shared_prefix_tokens)


_W3 = _work(8, Lengths("uniform", 2_900, 3_000), Lengths("fixed", 256, 256))

WORKLOADS: Mapping[str, PeerWorkload] = {
    "w1": PeerWorkload("single stream, 128 + 128", _work(6, _ANY, _ANY), concurrency=1),
    "w2": PeerWorkload(
        "32 requests, 16 at a time, 192-320 + 128", _work(32, Lengths("uniform", 192, 320), _ANY), concurrency=16
    ),
    "w3": PeerWorkload("long prompts, 4 at a time, 2,900-3,000 + 256", _W3, concurrency=4),
    "w4": PeerWorkload(
        "32 requests with a common prefix of 1,000, 16 at a time, 1,000 + 64 + 128",
        _work(32, Lengths("fixed", 64, 64), _ANY, shared_prefix_tokens=1_000),
        concurrency=16,
    ),
    # Four requests want 13,024 tokens. vLLM's blocks have 128, one of them is never used, and it starts only when the
    # longest context fits: this is the smallest pool in which it serves one request at a time.
    "w5": PeerWorkload(
        "w3 in a KV pool of a quarter of its demand",
        _W3,
        concurrency=4,
        slo=Slo(ttft_s=60.0, itl_s=0.25),
        pool_tokens=LONGEST_TOKENS + 128,
    ),
}
