"""The three tenants as Locust users, over HTTP and over gRPC.

Locust shows requests, and time to the first token and between tokens as entries of their own. Every answer is also
written, with all its times, to the file that KVORUM_RESULTS names: Locust rounds.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import grpc
import requests
from grpc.experimental import gevent as grpc_gevent
from locust import User, events, task
from workload import BATCH, NOISY, QUIET, TenantWork

from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc

grpc_gevent.init_gevent()

HTTP_URL = os.environ["KVORUM_HTTP"]
GRPC_TARGET = os.environ["KVORUM_GRPC"]
# With tenants each has a key; without, no one is told from another.
HAS_TENANTS = os.environ["KVORUM_TENANTS"] == "1"
TIMEOUT_S = 120.0
# Of the embedded model's vocabulary, past its special tokens.
TOKEN_IDS = range(1_000, 40_000)


@dataclass
class Answer:
    """What became of one request; gaps_s: between one piece of the answer and the next. error: None when whole."""

    tenant: str
    protocol: str
    begin_s: float
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    receipt: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


ANSWERS: list[Answer] = []


class RefusedError(Exception):
    """The server answered with an error."""


class _TenantUser(User):
    abstract = True
    work: ClassVar[TenantWork]
    protocol: ClassVar[str]

    def __init__(self, environment: Any) -> None:  # noqa: ANN401  # Locust's own, which has no types
        super().__init__(environment)
        self._rng = random.Random()

    def wait_time(self) -> float:
        # Not in step with the others.
        return self._rng.uniform(0.0, 2.0) * self.work.period_s

    @task
    def ask(self) -> None:
        """Ask once, and note when what came."""
        begin_s = last_s = time.perf_counter()
        answer = Answer(self.work.name, self.protocol, begin_s=time.time())
        prompt = [self._rng.choice(TOKEN_IDS) for _ in range(self.work.prompt_tokens)]
        try:
            for _ in self.pieces(prompt, answer):
                now_s = time.perf_counter()
                if answer.ttft_s is None:
                    answer.ttft_s = now_s - begin_s
                    self._fire("TTFT", answer.ttft_s)
                else:
                    answer.gaps_s.append(now_s - last_s)
                    self._fire("ITL", now_s - last_s)
                last_s = now_s
        except (RefusedError, requests.RequestException) as error:
            answer.error = str(error) or repr(error)
        if answer.error is None and answer.tokens != self.work.answer_tokens:
            answer.error = f"{answer.tokens} tokens instead of {self.work.answer_tokens}"
        self._fire(self.protocol, time.perf_counter() - begin_s, tokens=answer.tokens, error=answer.error)
        ANSWERS.append(answer)

    def pieces(self, prompt: list[int], answer: Answer) -> Iterator[None]:
        """Ask, and yield as each piece of the answer comes; note how many tokens it had, and the receipt."""
        raise NotImplementedError

    def _fire(self, kind: str, seconds: float, *, tokens: int = 0, error: str | None = None) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=self.work.name,
            response_time=1e3 * seconds,
            response_length=tokens,
            exception=RefusedError(error) if error else None,
        )


class _HttpUser(_TenantUser):
    abstract = True
    protocol = "HTTP"

    def __init__(self, environment: Any) -> None:  # noqa: ANN401
        super().__init__(environment)
        self._session = requests.Session()
        if HAS_TENANTS:
            self._session.headers["Authorization"] = f"Bearer {self.work.key}"

    def pieces(self, prompt: list[int], answer: Answer) -> Iterator[None]:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": self.work.answer_tokens}
        body |= {"ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        if self.work.policy:
            body["kvorum"] = {"policy": self.work.policy}
        url = f"{HTTP_URL}/v1/completions"
        with self._session.post(url, json=body, stream=True, timeout=TIMEOUT_S) as response:
            if response.status_code != 200:
                raise RefusedError(f"{response.status_code} {response.json()['error']['code']}")
            for event in _events(response.iter_content(None)):
                if "error" in event:
                    raise RefusedError(event["error"]["code"])
                answer.receipt = event.get("kvorum", answer.receipt)
                if event["usage"]:
                    answer.tokens = event["usage"]["completion_tokens"]
                if any(choice["text"] for choice in event["choices"]):
                    yield


class _GrpcUser(_TenantUser):
    abstract = True
    protocol = "gRPC"

    def __init__(self, environment: Any) -> None:  # noqa: ANN401
        super().__init__(environment)
        self._stub = pb_grpc.InferenceServiceStub(grpc.insecure_channel(GRPC_TARGET))
        self._metadata = [("authorization", f"Bearer {self.work.key}")] if HAS_TENANTS else []

    def pieces(self, prompt: list[int], answer: Answer) -> Iterator[None]:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            sampling=pb.SamplingParams(max_tokens=self.work.answer_tokens, ignore_eos=True, temperature=0.0),
            kvorum=pb.KVParams(policy=self.work.policy),
        )
        try:
            for response in self._stub.Generate(request, timeout=TIMEOUT_S, metadata=self._metadata):
                if response.HasField("completion"):
                    answer.tokens = response.completion.usage.completion_tokens
                    answer.receipt = {name.name: value for name, value in response.completion.receipt.ListFields()}
                if response.text:
                    yield
        except grpc.RpcError as error:
            raise RefusedError(error.code().name) from error


class QuietHttp(_HttpUser):
    """Half of the quiet tenant."""

    work = QUIET
    fixed_count = QUIET.users // 2


class QuietGrpc(_GrpcUser):
    """The other half."""

    work = QUIET
    fixed_count = QUIET.users // 2


class NoisyHttp(_HttpUser):
    """Half of the noisy tenant."""

    work = NOISY
    fixed_count = NOISY.users // 2


class NoisyGrpc(_GrpcUser):
    """The other half."""

    work = NOISY
    fixed_count = NOISY.users // 2


class BatchHttp(_HttpUser):
    """Half of the batch tenant."""

    work = BATCH
    fixed_count = BATCH.users // 2


class BatchGrpc(_GrpcUser):
    """The other half."""

    work = BATCH
    fixed_count = BATCH.users // 2


@events.quitting.add_listener
def write_answers(**_: object) -> None:
    """Leave every answer behind for the benchmark."""
    with open(os.environ["KVORUM_RESULTS"], "w", encoding="utf-8") as file:
        json.dump([asdict(answer) for answer in ANSWERS], file)


def _events(chunks: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Read server-sent events up to the one that says that nothing follows."""
    text = b""
    for chunk in chunks:
        text += chunk
        *whole, text = text.split(b"\n\n")
        for event in whole:
            payload = event.removeprefix(b"data: ")
            if payload == b"[DONE]":
                return
            yield json.loads(payload)
