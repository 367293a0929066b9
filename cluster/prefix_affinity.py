"""Which engines have probably cached the beginning of a prompt: what is remembered of where prompts were sent.

A guess, since engines evict and others send prompts too; a wrong one costs what a cold start costs. Prompts are
remembered in runs of RUN_TOKENS tokens, each under a digest of all that came before it. Digests are the same in every
process, so that a router can work them out and the cache manager remember them.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence

RUN_TOKENS = 64
MAX_RUNS = 200_000
# Of a beginning that everybody shares, the engines that got it last are enough to choose from.
MAX_ENGINES_OF_RUN = 16
# A map of all runs would stop everything for some 20 ms whenever it grows or is tidied up; maps of so many do not.
_PART_RUNS = 4_096


def prefix_runs(prompt: Sequence[int], salt: str) -> tuple[int, ...]:
    """Return a 64-bit digest for each whole run of a prompt, of it, all runs before it, and the salt."""
    digest = hashlib.blake2b(salt.encode(), digest_size=8, person=b"prefix run")
    layout = struct.Struct(f"<{RUN_TOKENS}q")
    runs = []
    for first in range(0, len(prompt) - RUN_TOKENS + 1, RUN_TOKENS):
        digest.update(layout.pack(*prompt[first : first + RUN_TOKENS]))
        runs.append(int.from_bytes(digest.digest(), "little"))
    return tuple(runs)


class PrefixAffinity:
    """Which runs were sent where, for all engines together: a thousand engines cost no more than one.

    They are kept in parts that fill evenly. Of each the least recently sent run is forgotten first, of one prompt its
    end before its beginning.
    """

    def __init__(self, *, max_runs: int = MAX_RUNS) -> None:
        """max_runs: remembered in all at most."""
        num_parts = max(1, -(-max_runs // _PART_RUNS))
        self._max_part = max_runs // num_parts
        # Run -> engines, in both the latest last; a run's digest says in which part it is.
        self._parts = [OrderedDict[int, dict[str, None]]() for _ in range(num_parts)]

    def note(self, engine_id: str, runs: Sequence[int]) -> None:
        """Remember that a prompt of these runs went to an engine."""
        for run in reversed(runs):
            sent = self._parts[run % len(self._parts)]
            engines = sent.get(run)
            if engines is None:
                sent[run] = {engine_id: None}
                if len(sent) > self._max_part:
                    sent.popitem(last=False)
                continue
            sent.move_to_end(run)
            engines.pop(engine_id, None)
            engines[engine_id] = None
            if len(engines) > MAX_ENGINES_OF_RUN:
                del engines[next(iter(engines))]

    def cached_runs(self, runs: Sequence[int]) -> Mapping[str, int]:
        """Return how many of a prompt's first runs each engine has seen; only engines that have seen some."""
        counts: dict[str, int] = {}
        having = None
        for count, run in enumerate(runs, start=1):
            sent = self._parts[run % len(self._parts)].get(run, {})
            having = [*sent] if having is None else [engine_id for engine_id in having if engine_id in sent]
            if not having:
                break
            counts.update(dict.fromkeys(having, count))
        return counts
