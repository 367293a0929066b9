"""What a benchmark sends: how long prompts and answers are, what they share, when each request is due and whose it is.

Everything is drawn from the one random generator that is passed in, so that a seed names the work exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from kvorum.cluster.bench_trace import BLOCK_TOKENS, TraceEntry
from kvorum.cluster.config import ConfigError

# Special tokens stand at the beginning of most vocabularies, and single bytes after them.
_FIRST_TOKEN_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts. low and high bound `uniform`; else they are mean and standard deviation."""

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    low: float
    high: float

    def draw(self, rng: Random) -> int:
        """Return a count, at least 1."""
        if self.kind == "fixed":
            return int(self.low)
        if self.kind == "uniform":
            return rng.randint(int(self.low), int(self.high))
        if self.kind == "normal":
            return max(1, round(rng.gauss(self.low, self.high)))
        sigma_squared = math.log1p((self.high / self.low) ** 2)
        mu = math.log(self.low) - sigma_squared / 2
        return max(1, round(rng.lognormvariate(mu, math.sqrt(sigma_squared))))


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends: the key, and the share of requests in proportion to the other tenants' weights."""

    name: str
    api_key: str | None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. due_s: when it is to be sent, from the start; 0 when a closed loop decides."""

    prompt: tuple[int, ...]
    max_tokens: int
    tenant: Tenant
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """What to draw requests from.

    shared_prefix_tokens: that many tokens begin every prompt, on top of its own length. request_rate: requests per
    second of a Poisson process; None leaves the times to the trace, or to a closed loop. trace: gives the lengths
    instead of prompt_tokens and output_tokens.
    """

    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    vocab_size: int
    shared_prefix_tokens: int = 0
    request_rate: float | None = None
    tenants: tuple[Tenant, ...] = (Tenant("default", None),)
    trace: tuple[TraceEntry, ...] = ()


def parse_lengths(text: str, *, option: str) -> Lengths:
    """Read `128`, `uniform:64:256`, `normal:256:64` or `lognormal:256:64`; the last two are mean and deviation.

    Raises:
        ConfigError: naming the option.
    """
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text, text)
    try:
        low, high = (float(number) for number in numbers)
    except ValueError:
        low = high = math.nan
    spread_is_valid = high >= low if kind in ("fixed", "uniform") else high >= 0
    whole = kind not in ("fixed", "uniform") or (low % 1 == high % 1 == 0)
    if kind in ("fixed", "uniform", "normal", "lognormal") and 1 <= low < math.inf and spread_is_valid and whole:
        return Lengths(kind, low, high)  # type: ignore[arg-type]  # checked in this line's condition
    raise ConfigError(
        f"{option}: expected N, uniform:LOW:HIGH, normal:MEAN:STD or lognormal:MEAN:STD with at least 1 token, "
        f"got {text!r}"
    )


def parse_tenant(text: str, *, option: str) -> Tenant:
    """Read `name=key` or `name=key:weight`.

    Raises:
        ConfigError: naming the option.
    """
    name, _, rest = text.partition("=")
    key, _, weight = rest.partition(":")
    try:
        share = float(weight or 1)
    except ValueError:
        share = 0.0
    if name and key and 0 < share < math.inf:
        return Tenant(name, key, share)
    raise ConfigError(f"{option}: expected NAME=KEY or NAME=KEY:WEIGHT with a weight above 0, got {text!r}")


def draw_requests(work: Workload, rng: Random) -> list[BenchRequest]:
    """Draw the requests in the order in which they are sent; a trace that is shorter than asked is all there is."""
    prefix = _tokens(work.shared_prefix_tokens, work.vocab_size, rng)
    blocks: dict[int, tuple[int, ...]] = {}
    dues = _poisson(work.request_rate, rng) if work.request_rate else None
    requests = []
    for entry in _entries(work, rng):
        prompt = _prompt(entry, blocks, work.vocab_size, rng)
        (tenant,) = rng.choices(work.tenants, [each.weight for each in work.tenants])
        due_s = next(dues) if dues else entry.at_s
        requests.append(BenchRequest(prefix + prompt, entry.output_tokens, tenant, due_s))
    return requests


def _entries(work: Workload, rng: Random) -> Iterator[TraceEntry]:
    if work.trace:
        return iter(work.trace[: work.num_requests])
    return (
        TraceEntry(0.0, work.prompt_tokens.draw(rng), work.output_tokens.draw(rng)) for _ in range(work.num_requests)
    )


def _prompt(entry: TraceEntry, blocks: dict[int, tuple[int, ...]], vocab_size: int, rng: Random) -> tuple[int, ...]:
    """Make a prompt; equal block ids of a trace become equal tokens."""
    for block_id in entry.block_ids:
        if block_id not in blocks:
            blocks[block_id] = _tokens(BLOCK_TOKENS, vocab_size, rng)
    known = tuple(itertools.chain.from_iterable(blocks[block_id] for block_id in entry.block_ids))
    return known[: entry.prompt_tokens] + _tokens(entry.prompt_tokens - len(known), vocab_size, rng)


def _tokens(count: int, vocab_size: int, rng: Random) -> tuple[int, ...]:
    return tuple(rng.choices(range(int(vocab_size * _FIRST_TOKEN_SHARE), vocab_size), k=max(0, count)))


def _poisson(rate: float, rng: Random) -> Iterator[float]:
    return itertools.accumulate(rng.expovariate(rate) for _ in itertools.count())


# Each is one token in the vocabularies of the last years' models, with the space before it.
_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man "
    "even most made after also did many off before must well back through years much where your way down should people"
)


def as_text(prompt: Sequence[int]) -> str:
    """Write a prompt as words for servers that take no token ids: about as many tokens, equal where ids are equal."""
    words = _WORDS.split()
    return " ".join(words[token_id % len(words)] for token_id in prompt)
