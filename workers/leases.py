"""Which leases an engine's sequences run under, and what changed since somebody last asked."""

from __future__ import annotations

from collections import Counter

from kvorum.workers.governance import LeaseTerms, LeaseUse


class LeaseBook:
    """Counts the sequences of each lease. A lease starts with its first sequence and ends with its last."""

    def __init__(self) -> None:
        self._sequences: Counter[str] = Counter()
        self._uses: dict[str, LeaseUse] = {}
        self._told: set[str] = set()
        self._ended: set[str] = set()

    def add(self, terms: LeaseTerms) -> None:
        """Note a sequence that was queued."""
        if terms.lease_id:
            self._sequences[terms.lease_id] += 1
            self._set(terms, self._reserved(terms) + terms.reserved_blocks)
            self._ended.discard(terms.lease_id)

    def remove(self, terms: LeaseTerms) -> None:
        """Note a sequence that was released."""
        if not terms.lease_id:
            return
        self._sequences[terms.lease_id] -= 1
        self._set(terms, self._reserved(terms) - terms.reserved_blocks)
        if not self._sequences[terms.lease_id]:
            del self._sequences[terms.lease_id], self._uses[terms.lease_id]
            self._ended.add(terms.lease_id)

    def _reserved(self, terms: LeaseTerms) -> int:
        use = self._uses.get(terms.lease_id)
        return 0 if use is None else use.reserved_blocks

    def _set(self, terms: LeaseTerms, reserved_blocks: int) -> None:
        self._uses[terms.lease_id] = LeaseUse(terms.lease_id, terms.tenant, reserved_blocks)

    def current(self) -> tuple[LeaseUse, ...]:
        """Return the leases that have sequences here."""
        return tuple(self._uses.values())

    def take_changes(self) -> tuple[tuple[LeaseUse, ...], tuple[str, ...]]:
        """Return what started and what ended since the last call; one that did both has only ended."""
        started = tuple(use for lease_id, use in self._uses.items() if lease_id not in self._told)
        ended = tuple(sorted(self._ended))
        self._told, self._ended = set(self._uses), set()
        return started, ended
