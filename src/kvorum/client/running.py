"""One answer from its request to its end, over as many calls as that takes; the same for both clients.

A stream that breaks goes on as a new call with the tokens that came. Each token depends on those before it, on its
index and on the seed, so the answer goes on as it would have; a request without a seed gets one here.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

import grpc

from kvorum.client.errors import BrokenStreamError, ClientError
from kvorum.client.messages import piece_of
from kvorum.client.retrying import RetryPolicy
from kvorum.client.types import Piece
from kvorum.protos.inference.v1 import inference_pb2 as pb


class Attempts:
    """Tries of one call, until one succeeds or no more is worth it."""

    def __init__(self, policy: RetryPolicy, *, timeout_s: float | None) -> None:
        """Give up timeout_s from now."""
        self._policy = policy
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_retries = 0

    @property
    def remaining_s(self) -> float | None:
        """How long the next try may take."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def succeed(self) -> None:
        """Note that the server did something; failures are counted anew."""
        self._num_retries = 0

    def wait_after_s(self, failed: ClientError) -> float:
        """Return how long to wait before the next try; raise the error when there is none."""
        wait_s = self._policy.wait_s(failed, num_retries=self._num_retries, rng=random.Random())
        remaining_s = self.remaining_s
        if wait_s is None or (remaining_s is not None and wait_s >= remaining_s):
            raise failed
        self._num_retries += 1
        return wait_s


class Running:
    """An answer that is under way."""

    def __init__(self, request: pb.GenerateRequest, attempts: Attempts) -> None:
        self.attempts = attempts
        self._request = request
        if not request.sampling.HasField("seed"):
            request.sampling.seed = random.getrandbits(63)
        self._received: list[int] = []
        self._reconnects = 0
        self.is_over = False

    def next_request(self) -> pb.GenerateRequest:
        """Return what to send: the request, with what came of its answer."""
        if self._received:
            self._request.request_id = ""  # the router may not have noticed yet that the one of that name is gone
            self._request.answer_token_ids[:] = self._received
        return self._request

    def take(self, response: pb.GenerateResponse) -> Piece:
        """Read what is new."""
        self.attempts.succeed()
        piece = piece_of(response)
        self._received += piece.token_ids
        if piece.completion is None:
            return piece
        self.is_over = True
        return replace(piece, completion=replace(piece.completion, reconnects=self._reconnects))

    def wait_after_s(self, failed: ClientError) -> float:
        """Return how long to wait before the next call; raise what the answer failed with when there is none."""
        if not self._received:
            return self.attempts.wait_after_s(failed)
        if failed.status is grpc.StatusCode.UNAVAILABLE and not self._has_room():
            raise self._broken(failed)
        wait_s = self.attempts.wait_after_s(failed)
        self._reconnects += 1
        return wait_s

    def check_over(self) -> None:
        """Raise unless a stream that ended well has brought its end."""
        if not self.is_over:
            raise BrokenStreamError(
                "the stream ended without the answer's end", code="incomplete", status=grpc.StatusCode.OK
            )

    def _has_room(self) -> bool:
        sampling = self._request.sampling
        return not sampling.HasField("max_tokens") or sampling.max_tokens > len(self._received)

    def _broken(self, failed: ClientError) -> BrokenStreamError:
        return BrokenStreamError(
            f"the stream broke after its last token, {len(self._received)} in all, and before its end: {failed}",
            code=failed.code,
            status=failed.status,
            retry_after_s=failed.retry_after_s,
        )
