"""The lessons of the console's Learn page: experiments on a real model, worked out when somebody asks.

They run on the embedded model with the reference back end, in a process of their own: routers have no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvorum.cluster.lab import TALE
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.kvstore.policies import MIN_BUDGET_TOKENS
from kvorum.workers.checkpoint.resolve import Checkpoint, resolve
from kvorum.workers.checkpoint.tokenizer import Tokenizer
from kvorum.workers.request import KVParams

if TYPE_CHECKING:
    from kvorum.workers.lab import CountingBackend

MODEL = "smollm2-135m"
PROMPT = "The quick brown fox jumps"
NUM_TOKENS = 12
POOL_BLOCKS = 24
MAX_BUDGET_TOKENS = 80

Json = dict[str, Any]


class Lesson:
    """Holds the model. Each lesson is JSON; the same arguments give the same answer.

    All raise CheckpointError where the embedded model is not installed.
    """

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        return resolve(MODEL)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._checkpoint.load_tokenizer()

    @cached_property
    def _backend(self) -> CountingBackend:
        from kvorum.workers.lab import load_backend

        return load_backend(self._checkpoint)

    def caching(self) -> Json:
        """Say what each token costs, with the cache and without."""
        from kvorum.workers.lab import compare_caching

        prompt = self._tokenizer.encode(PROMPT)
        costs = compare_caching(self._backend, prompt, num_tokens=NUM_TOKENS)
        return {
            "prompt": self._texts(prompt),
            "answer": self._texts([cost.token_id for cost in costs]),
            "costs": [asdict(cost) for cost in costs],
            "num_layers": self._backend.spec.num_layers,
        }

    def pages(self) -> Json:
        """Show who holds each block, step by step, of two requests and one with the first's prompt and a budget."""
        from kvorum.workers.lab import BLOCK_SIZE, watch_blocks

        tale = self._tokenizer.encode(TALE)
        requests = [
            ("A", tale, NUM_TOKENS, KVParams()),
            ("B", self._tokenizer.encode(PROMPT), 2 * NUM_TOKENS, KVParams()),
            ("C", tale, 2 * NUM_TOKENS, KVParams("h2o", 32)),
        ]
        views = watch_blocks(self._backend, requests, num_blocks=POOL_BLOCKS)
        return {
            "block_size": BLOCK_SIZE,
            "requests": [
                {"name": name, "prompt_tokens": len(prompt), "max_tokens": max_tokens, "budget": kv.kv_budget}
                for name, prompt, max_tokens, kv in requests
            ],
            "steps": [{"holders": view.holders, "cached": sorted(view.cached)} for view in views],
        }

    def evictions(self, *, budget: int, layer: int, kv_head: int) -> Json:
        """Show what H2O keeps at a budget in one KV head; raises InvalidRequestError for what there is not."""
        from kvorum.workers.lab import watch_evictions

        spec = self._backend.spec
        for name, value, least, most in (
            ("budget", budget, MIN_BUDGET_TOKENS, MAX_BUDGET_TOKENS),
            ("layer", layer, 0, spec.num_layers - 1),
            ("kv_head", kv_head, 0, spec.num_kv_heads - 1),
        ):
            if not least <= value <= most:
                raise InvalidRequestError(f"{name}: must be in {least}..{most}, got {value}", param=name)
        prompt = self._tokenizer.encode(TALE)
        kv = KVParams("h2o", budget)
        log = watch_evictions(self._backend, prompt, max_tokens=NUM_TOKENS, kv=kv, layer=layer, head=kv_head)
        return {
            "texts": self._texts(log.tokens),
            "num_prompt": len(prompt),
            "cut": log.cut,
            "evictions": [asdict(eviction) for eviction in log.evictions],
            "kept": log.kept,
            "num_layers": spec.num_layers,
            "num_kv_heads": spec.num_kv_heads,
        }

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([token_id]) for token_id in token_ids]
