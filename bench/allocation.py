"""Which rule should share a short pool among sequences: what each costs on a real model, at equal pages.

    python -P bench/allocation.py --trials 4 --json out.json

A trial is eight sequences, long and short, of mixed kinds of text, which share a pool of so many pages each on average.
Each rule of kvstore/pricing.py says how many pages every sequence keeps, from the retention curves that an engine
measures at the end of the prompts; then each is cut to that and the next tokens are predicted. The cost is the
divergence from the full cache, KL(full || cut) in nats per token: its mean over the sequences, and the worst one's.
Texts are those that come with Python: manual, sources, tables; `recall` repeats an earlier paragraph at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html.entities import html5
from pathlib import Path

from kvorum.workers.config import COMPUTE_ENVIRONMENT

os.environ.update(COMPUTE_ENVIRONMENT)  # before torch is loaded

from pydoc_data import topics

from kvorum.kvstore.pricing import Allocation, Bidder, allocate, parse_rule
from kvorum.kvstore.types import blocks_for
from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.config import EngineConfig
from kvorum.workers.engine import Engine, build_engine
from kvorum.workers.evaluate import Window, evaluate
from kvorum.workers.local import LocalExecutor
from kvorum.workers.plan import CurveQuery
from kvorum.workers.request import EngineRequest, KVParams, RequestId, SamplingParams
from kvorum.workers.worker import load_worker

MODEL = "smollm2-135m"
BLOCK_SIZE = 16
LONG, SHORT = 1536, 512
PREDICTED = 64
LEAST_PAGES = 4
RULES = ("same_cap", "proportional", "price:alpha=0", "price:alpha=1", "price:alpha=4")
KINDS = ("prose", "code", "table", "recall")


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence of a trial."""

    name: str
    window: Window


def main() -> None:
    """Run the trials and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--first", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--pages", type=int, nargs="+", default=[8, 16], help="pages a sequence, on average")
    parser.add_argument("--policy", default="h2o_avg")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, list[list[float]]] = {}
    for trial in range(args.first, args.first + args.trials):
        pieces = make_pieces(random.Random(trial))
        bidders = asyncio.run(measure_bidders(pieces, args.policy))
        shares = {
            f"{pages} {rule}": allocate(bidders, pages * len(pieces), {}, parse_rule(rule))
            for pages in args.pages
            for rule in RULES
        }
        for key, costs in divergences(pieces, shares, args.policy).items():
            found.setdefault(key, []).append(costs)
        print_table(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def make_pieces(rng: random.Random) -> list[Piece]:
    """Draw a long and a short piece of each kind."""
    tokenizer = resolve(MODEL).load_tokenizer()
    texts = {"prose": _prose(), "code": _code(rng), "table": _table()}
    pieces = []
    for kind in KINDS:
        for length in (LONG, SHORT):
            text = texts["prose" if kind == "recall" else kind]
            start = rng.randrange(max(1, len(text) - 12 * LONG))
            tokens = tokenizer.encode(text[start : start + 12 * LONG])
            if kind == "recall":
                # A paragraph, other text, and the paragraph again: what is predicted stands far back.
                paragraph = tokens[: PREDICTED + 32]
                tokens = [*paragraph, *tokens[200 : 200 + length - 2 * len(paragraph) + PREDICTED], *paragraph]
            prompt, after = tokens[:length], tokens[length : length + PREDICTED]
            assert len(after) == PREDICTED, (kind, length, len(tokens))
            pieces.append(Piece(f"{kind}-{length}", Window(tuple(prompt), tuple(after))))
    return pieces


def _prose() -> str:
    paragraphs = (part for topic in sorted(topics.topics) for part in topics.topics[topic].split("\n\n"))
    joined = (" ".join(part.split()) for part in paragraphs if re.match(r"[A-Z][a-z]", part.strip()))
    return "\n\n".join(part for part in joined if len(part) > 80)


def _code(rng: random.Random) -> str:
    folder = Path(os.__file__).parent
    names = (
        "argparse",
        "ast",
        "_pydecimal",
        "difflib",
        "doctest",
        "inspect",
        "mailbox",
        "optparse",
        "tarfile",
        "typing",
    )
    return (folder / f"{rng.choice(names)}.py").read_text(encoding="utf-8")


def _table() -> str:
    return "\n".join(f"{name} U+{ord(text[0]):04X} {text}" for name, text in sorted(html5.items()))


async def measure_bidders(pieces: Sequence[Piece], policy: str) -> list[Bidder]:
    """Read all prompts in one engine and ask it for their retention curves."""
    config = EngineConfig(
        model=MODEL,
        model_name=MODEL,
        dtype="float32",
        kv_cache_memory_bytes=_pool_bytes(len(pieces)),
        enable_prefix_caching=False,
    )
    worker, shape = load_worker(config)
    engine = build_engine(config, shape, LocalExecutor(worker), engine_id="curves")
    await engine.start()
    try:
        return [await _measure(engine, piece, policy) for piece in pieces]
    finally:
        await engine.stop()


async def _measure(engine: Engine, piece: Piece, policy: str) -> Bidder:
    session = engine.open_session()
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    session.submit(EngineRequest(RequestId(piece.name), piece.window.prompt, sampling, KVParams(policy)))
    curve: tuple[float, ...] = ()
    while True:
        for output in await session.outputs():
            if not curve:
                (kv,) = engine.store.open_sequences()
                assert kv.rule
                query = CurveQuery(kv.residence, kv.rule, kv.num_tokens, BLOCK_SIZE)
                (curve,) = await engine._executor.retention_curves([query])
            if output.finish_reason is not None:
                most = blocks_for(len(piece.window.prompt), BLOCK_SIZE)
                return Bidder(piece.name, "tenant", curve[: most + 1], LEAST_PAGES, most)


def divergences(pieces: Sequence[Piece], shares: dict[str, Allocation], policy: str) -> dict[str, list[float]]:
    """Return each rule's cost on each sequence."""
    costs: dict[str, list[float]] = {key: [] for key in shares}
    for piece in pieces:
        budgets = sorted({share.pages[piece.name] for share in shares.values()})
        cases = [KVParams(policy, pages * BLOCK_SIZE - 1) for pages in budgets]
        config = EngineConfig(
            model=MODEL, model_name=MODEL, dtype="float32", kv_cache_memory_bytes=_pool_bytes(len(cases) + 1)
        )
        by_pages = dict(zip(budgets, asyncio.run(evaluate(config, [piece.window], cases))[1:], strict=True))
        for key, share in shares.items():
            costs[key].append(by_pages[share.pages[piece.name]].kl)
    return costs


def _pool_bytes(num_sequences: int) -> int:
    per_token = resolve(MODEL).spec.kv_bytes_per_token(element_bytes=4)
    return num_sequences * (LONG + PREDICTED + 64) * per_token


def print_table(found: dict[str, list[list[float]]]) -> None:
    """Print mean and worst of each rule, over all trials."""
    trials = len(next(iter(found.values())))
    print(f"\n{trials} trials        mean    worst (mean of trials)   long   short")
    for key, by_trial in found.items():
        mean = statistics.mean(statistics.mean(costs) for costs in by_trial)
        worst = statistics.mean(max(costs) for costs in by_trial)
        long, short = (statistics.mean(statistics.mean(costs[part::2]) for costs in by_trial) for part in (0, 1))
        print(f"{key:20} {mean:.4f}  {worst:.4f}   {long:.4f}  {short:.4f}", flush=True)


if __name__ == "__main__":
    main()
