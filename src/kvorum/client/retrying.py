"""Whether, and when, a failed call is tried again. Pure: chance is handed in."""

from __future__ import annotations

import random
from dataclasses import dataclass

import grpc

from kvorum.client.errors import ClientError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How failed calls are tried again.

    max_retries: in a row, without a token in between. A server that says when to come back is obeyed; otherwise each
    wait is up to twice the one before, from first_wait_s to longest_wait_s, and at least half of that.
    """

    max_retries: int = 6
    first_wait_s: float = 0.1
    longest_wait_s: float = 5.0

    def wait_s(self, error: ClientError, *, num_retries: int, rng: random.Random) -> float | None:
        """Return how long to wait after an error that follows num_retries retries; None gives up."""
        if num_retries >= self.max_retries or not _passes(error):
            return None
        if error.retry_after_s is not None:
            # A little later than told, so that clients who were told the same do not all come at once.
            return error.retry_after_s * rng.uniform(1.0, 1.25)
        return min(self.first_wait_s * 2.0**num_retries, self.longest_wait_s) * rng.uniform(0.5, 1.0)


def _passes(error: ClientError) -> bool:
    # gRPC itself says RESOURCE_EXHAUSTED of messages that are too large, and those stay so.
    if error.status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after_s is not None
    return error.status is grpc.StatusCode.UNAVAILABLE
