"""Asks for three times as many KV blocks as there are, and looks at who pays: a real cluster with the real model.

    make bench-pressure

Most requests let the cluster shrink them, down to a floor; some do not, and must not notice: their answers must be
those of an empty cluster, token for token. As long as those that may be shrunk are above their floors, nobody is
preempted and nobody is refused. Exits with 1 when any of that is untrue.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pydoc_data import topics
from typing import Any

import httpx

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.launcher import running_cluster
from kvorum.cluster.tenants import Tenant, hash_key
from kvorum.kvstore.types import blocks_for

BLOCK_SIZE = 16
NUM_BLOCKS = 256
KEY = "kv-bench-pressure"
# 32 blocks each, prompt and answer.
PROMPT_TOKENS, ANSWER_TOKENS = 384, 128
LEAST_TOKENS = 64
FLOOR = 0.8
POLICIES: tuple[dict[str, Any], ...] = (
    *({"policy": "full"},) * 3,
    {"policy": "h2o_avg", "min_retained_mass": FLOOR},
    *({"policy": "h2o_avg"},) * 10,
    *({"policy": "h2o"},) * 10,
)
_BYTES_PER_TOKEN = 2 * 2 * 30 * 3 * 64


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: what may happen to its KV cache, and its prompt."""

    kvorum: dict[str, Any]
    prompt: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """Whether it did not opt in."""
        return bool(self.kvorum["policy"] == "full")


@dataclass
class Findings:
    """What came of it. wrong: what must not be."""

    wrong: list[str] = field(default_factory=list)
    shrunk: int = 0
    evicted: int = 0
    peak_blocks: int = 0
    price: float = 0.0
    seconds: float = 0.0


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("ray").setLevel(logging.ERROR)
    config = ClusterConfig(
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_SIZE * _BYTES_PER_TOKEN,
        enable_prefix_caching=False,  # nothing of the undisturbed answers may help those under pressure
        tenants={"crowd": Tenant(api_key_sha256=(hash_key(KEY),), is_operator=True, min_kv_tokens=LEAST_TOKENS)},
        port=0,
        grpc_port=0,
    )
    with running_cluster(
        config, address=None, on_phase=lambda _: None, on_progress=lambda _load, _name: None
    ) as cluster:
        findings = asyncio.run(press(cluster.http_urls[0]))
    report(findings)
    return int(bool(findings.wrong))


async def press(url: str) -> Findings:
    """Ask those that do not opt in alone, then everybody at once."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600.0) as client:
        asks = await make_asks(client)
        alone = [await answer(client, ask) for ask in asks if ask.is_full]
        findings = Findings()
        watching = asyncio.create_task(watch(client, findings))
        begin_s = time.perf_counter()
        together = await asyncio.gather(*(answer(client, ask) for ask in asks))
        findings.seconds = time.perf_counter() - begin_s
        watching.cancel()
    judge(asks, alone, together, findings)
    return findings


async def make_asks(client: httpx.AsyncClient) -> list[Ask]:
    """Cut the prompts out of Python's manual, one topic after the other."""
    response = await client.post("/tokenize", json={"prompt": "\n".join(topics.topics.values())[:200_000]})
    tokens = response.json()["tokens"]
    return [
        Ask(kvorum, tuple(tokens[index * PROMPT_TOKENS :][:PROMPT_TOKENS])) for index, kvorum in enumerate(POLICIES)
    ]


async def answer(client: httpx.AsyncClient, ask: Ask) -> dict[str, Any]:
    """Ask once; greedy, and to the last token, so that answers can be compared."""
    body = {"prompt": ask.prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body | {"kvorum": ask.kvorum})
    whole: dict[str, Any] = response.json() | {"status": response.status_code}
    return whole


async def watch(client: httpx.AsyncClient, findings: Findings) -> None:
    """Note how full the pool gets, until cancelled."""
    while True:
        (engine,) = (await client.get("/operator/cluster")).json()["engines"]
        findings.peak_blocks = max(findings.peak_blocks, engine["held_blocks"])
        findings.price = max(findings.price, engine["price"])
        await asyncio.sleep(0.2)


def judge(
    asks: Sequence[Ask], alone: Sequence[dict[str, Any]], together: Sequence[dict[str, Any]], findings: Findings
) -> None:
    """Find what must not be."""
    undisturbed = iter(alone)
    for number, (ask, found) in enumerate(zip(asks, together, strict=True)):
        name = f"request {number} ({ask.kvorum})"
        if found["status"] != 200:
            findings.wrong.append(f"{name}: {found['status']} {found['error']['message']}")
            continue
        receipt = found["kvorum"]
        findings.shrunk += bool(receipt["shrinks"])
        findings.evicted += receipt["kv_tokens_evicted"]
        if receipt["preemptions"]:
            findings.wrong.append(f"{name}: preempted")
        if receipt["retained_mass"] < ask.kvorum.get("min_retained_mass", 0.0):
            findings.wrong.append(f"{name}: {receipt['retained_mass']:.3f} of its attention is left")
        if receipt["kv_tokens_held"] < LEAST_TOKENS:
            findings.wrong.append(f"{name}: {receipt['kv_tokens_held']} tokens are left")
        if ask.is_full and found["choices"][0]["text"] != next(undisturbed)["choices"][0]["text"]:
            findings.wrong.append(f"{name}: the answer is not that of an empty cluster")


def report(findings: Findings) -> None:
    """Print what came of it."""
    demand = len(POLICIES) * blocks_for(PROMPT_TOKENS + ANSWER_TOKENS, BLOCK_SIZE)
    print(
        f"{len(POLICIES)} requests at once want {demand} blocks of a pool of {NUM_BLOCKS}, {demand / NUM_BLOCKS:.1f} x"
    )
    print(
        f"done after {findings.seconds:.1f} s; at most {findings.peak_blocks} blocks held, price {findings.price:.4f}"
    )
    print(f"{findings.shrunk} were shrunk, by {findings.evicted} tokens per KV head together")
    print("not as it must be: " + ("; ".join(findings.wrong) or "nothing"))


if __name__ == "__main__":
    sys.exit(main())
