"""One answer from its request to its end, over as many calls as that takes; the same for both clients.

A stream that breaks goes on with prompt + what came of the answer as its prompt. That gives the same tokens only where
each depends on nothing but those before it: a greedy answer without penalties or grammars, which look at the answer
alone. A sampled token also depends on its index in the answer, which the API does not let a client choose; and a stop
string may have begun in text that the server still held back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
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
        is_ids = request.WhichOneof("input") == "token_ids"
        self._prompt: Sequence[int] | None = tuple(request.token_ids.ids) if is_ids else None
        self._received: list[int] = []
        self._num_carried = 0
        self._reconnects = 0
        self.is_over = False

    @property
    def needs_token_ids(self) -> bool:
        """Whether the prompt's token ids must be asked for before the next call."""
        return bool(self._received) and self._prompt is None

    def tokenize_request(self) -> pb.TokenizeRequest:
        """Ask for the prompt's token ids."""
        request = self._request
        if request.WhichOneof("input") == "chat":
            return pb.TokenizeRequest(model=request.model, chat=request.chat)
        return pb.TokenizeRequest(model=request.model, text=request.text)

    def take_token_ids(self, response: pb.TokenizeResponse) -> None:
        """Note the prompt's token ids."""
        self._prompt = tuple(response.token_ids)

    def next_request(self) -> pb.GenerateRequest:
        """Return what to send: the request, or what is left of it."""
        self._num_carried = count = len(self._received)
        if not count:
            return self._request
        assert self._prompt is not None, "the token ids were asked for"
        rest = pb.GenerateRequest()
        rest.CopyFrom(self._request)
        rest.request_id = ""  # the router may not have noticed yet that the one of that name is gone
        rest.token_ids.ids[:] = [*self._prompt, *self._received]
        if rest.sampling.HasField("max_tokens"):
            rest.sampling.max_tokens -= count
        if rest.sampling.HasField("min_tokens"):
            rest.sampling.min_tokens = max(0, rest.sampling.min_tokens - count)
        return rest

    def take(self, response: pb.GenerateResponse) -> Piece:
        """Read what is new."""
        self.attempts.succeed()
        piece = piece_of(response)
        self._received += piece.token_ids
        if piece.completion is None:
            return piece
        self.is_over = True
        completion = replace(
            piece.completion,
            prompt_tokens=piece.completion.prompt_tokens - self._num_carried,
            completion_tokens=piece.completion.completion_tokens + self._num_carried,
            reconnects=self._reconnects,
        )
        return replace(piece, completion=completion)

    def wait_after_s(self, failed: ClientError) -> float:
        """Return how long to wait before the next call; raise what the answer failed with when there is none."""
        if not self._received:
            return self.attempts.wait_after_s(failed)
        if failed.status is grpc.StatusCode.UNAVAILABLE and not self._is_continuable():
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

    def _is_continuable(self) -> bool:
        sampling = self._request.sampling
        is_greedy = sampling.HasField("temperature") and sampling.temperature == 0
        is_shaped = self._request.stop or self._request.HasField("structured_outputs")
        looks_back = is_shaped or sampling.frequency_penalty or sampling.presence_penalty
        has_room = not sampling.HasField("max_tokens") or sampling.max_tokens > len(self._received)
        return is_greedy and not looks_back and has_room

    def _broken(self, failed: ClientError) -> BrokenStreamError:
        return BrokenStreamError(
            f"the stream broke after {len(self._received)} tokens and cannot be continued exactly: {failed}",
            code=failed.code,
            status=failed.status,
            retry_after_s=failed.retry_after_s,
        )
