"""Which engine has probably cached the beginning of a prompt: what a router remembers of where it sent prompts.

A guess, since engines evict and other routers send prompts too; a wrong one costs what a cold start costs. Prompts are
remembered in runs of RUN_TOKENS tokens, each under a hash of all that came before it, the least recently used first to
be forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

RUN_TOKENS = 64
MAX_RUNS = 50_000


class PrefixAffinity:
    """What was sent to each engine."""

    def __init__(self, *, max_runs: int = MAX_RUNS) -> None:
        """max_runs: remembered of each engine."""
        self._max_runs = max_runs
        self._sent: dict[str, OrderedDict[int, None]] = {}

    def note(self, engine_id: str, prompt: Sequence[int], salt: str) -> None:
        """Remember that a prompt went to an engine."""
        runs = self._sent.setdefault(engine_id, OrderedDict())
        for run in _runs(prompt, salt):
            runs[run] = None
            runs.move_to_end(run)
        while len(runs) > self._max_runs:
            runs.popitem(last=False)

    def cached_tokens(self, engine_id: str, prompt: Sequence[int], salt: str) -> int:
        """Return how many of a prompt's first tokens the engine has seen."""
        sent = self._sent.get(engine_id, OrderedDict())
        count = 0
        for run in _runs(prompt, salt):
            if run not in sent:
                break
            count += RUN_TOKENS
        return count

    def keep_only(self, engine_ids: Collection[str]) -> None:
        """Forget engines that are gone, and with them their caches."""
        for engine_id in self._sent.keys() - set(engine_ids):
            del self._sent[engine_id]


def _runs(prompt: Sequence[int], salt: str) -> Iterator[int]:
    """Yield a hash for each whole run, of it and all before it."""
    before = hash(salt)
    for first in range(0, len(prompt) - RUN_TOKENS + 1, RUN_TOKENS):
        before = hash((before, *prompt[first : first + RUN_TOKENS]))
        yield before
