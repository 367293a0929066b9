"""Rates over time: how many requests a tenant may still send, and how fast the cluster gives blocks back. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_MINUTE_S = 60.0
_MEMORY_S = 30.0


@dataclass(slots=True)
class TokenBucket:
    """So many requests a minute, and as many at once after a minute of silence."""

    per_minute: int
    tokens: float
    at_s: float

    @classmethod
    def full(cls, per_minute: int, now_s: float) -> TokenBucket:
        """Return a bucket from which nothing was taken yet."""
        return cls(per_minute, float(per_minute), now_s)

    def take(self, now_s: float) -> float:
        """Take one; return 0, or when there is none the seconds until there is."""
        self.tokens = min(float(self.per_minute), self.tokens + (now_s - self.at_s) * self.per_minute / _MINUTE_S)
        self.at_s = now_s
        if self.tokens >= 1.0:
            self.tokens -= 1.0
            return 0.0
        return (1.0 - self.tokens) * _MINUTE_S / self.per_minute


@dataclass(slots=True)
class Flow:
    """An amount per second, of the recent past: what lies further back counts exponentially less."""

    amount: float = 0.0
    at_s: float = 0.0

    def add(self, amount: float, now_s: float) -> None:
        """Count what has just flowed."""
        self.amount = self.recent(now_s) + amount
        self.at_s = now_s

    def recent(self, now_s: float) -> float:
        """Return the amount that counts now."""
        return self.amount * math.exp((self.at_s - now_s) / _MEMORY_S)

    def per_second(self, now_s: float) -> float:
        """Return the rate."""
        return self.recent(now_s) / _MEMORY_S
