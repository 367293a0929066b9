"""Requests that must get a clean refusal, with the field that the refusal names.

For /v1/completions on a model with a context of at most 8,192 tokens and a byte or a real tokenizer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvorum.protos.inference.v1 import inference_pb2 as pb


@dataclass(frozen=True)
class BadBody:
    """A body of POST /v1/completions and what the error must name."""

    name: str
    body: bytes
    param: str | None
    code: str = "invalid_value"


def _body(**fields: object) -> bytes:
    return json.dumps({"prompt": "hello", "max_tokens": 4} | fields).encode()


def _bad(name: str, param: str, code: str = "invalid_value", **fields: object) -> BadBody:
    return BadBody(name, _body(**fields), param, code)


BAD_BODIES = (
    BadBody("nothing", b"", None),
    BadBody("no json", b"{", None),
    BadBody("an array", b"[]", None),
    BadBody("no utf-8", b'{"prompt": "\xff"}', None),
    BadBody("lone surrogate", b'{"prompt": "\\ud800", "max_tokens": 4}', None),
    BadBody("deep nesting", b'{"a":' * 100_000, None),
    BadBody("NaN", b'{"prompt": "a", "temperature": NaN}', "temperature"),
    BadBody("infinity", b'{"prompt": "a", "top_p": Infinity}', "top_p"),
    BadBody("overflow", b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    BadBody("10,000 digits", b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}", None),
    BadBody("no prompt", b'{"max_tokens": 4}', "prompt"),
    _bad("empty prompt", "prompt", prompt=""),
    _bad("empty list", "prompt", prompt=[]),
    _bad("empty ids", "prompt", prompt=[[]]),
    _bad("prompt of a wrong type", "prompt", prompt=5),
    _bad("prompt of mixed types", "prompt[1]", prompt=["a", 5]),
    _bad("negative id", "prompt[0]", prompt=[-1]),
    _bad("id out of range", "prompt", prompt=[10**9]),
    _bad("id beyond 64 bits", "prompt[0]", prompt=[2**70]),
    _bad("10 MB prompt", "prompt", "context_length_exceeded", prompt="word " * 2_000_000),
    _bad("long prompt", "prompt", "context_length_exceeded", prompt=[1] * 9000),
    _bad("long answer", "max_tokens", "context_length_exceeded", max_tokens=9000),
    _bad("no tokens", "max_tokens", max_tokens=0),
    _bad("negative tokens", "max_tokens", max_tokens=-1),
    _bad("huge max_tokens", "max_tokens", max_tokens=10**30),
    _bad("max_tokens as text", "max_tokens", max_tokens="4"),
    _bad("max_tokens as a fraction", "max_tokens", max_tokens=4.5),
    _bad("max_tokens as a truth value", "max_tokens", max_tokens=True),
    _bad("hot", "temperature", temperature=2.1),
    _bad("cold", "temperature", temperature=-0.1),
    _bad("temperature as text", "temperature", temperature="hot"),
    _bad("top_p of zero", "top_p", top_p=0),
    _bad("top_p above one", "top_p", top_p=1.1),
    _bad("top_k below off", "top_k", top_k=-2),
    _bad("min_p above one", "min_p", min_p=1.5),
    _bad("repetition_penalty of zero", "repetition_penalty", repetition_penalty=0),
    _bad("frequency_penalty", "frequency_penalty", frequency_penalty=3),
    _bad("presence_penalty", "presence_penalty", presence_penalty=-3),
    _bad("seed beyond 64 bits", "seed", seed=2**64),
    _bad("n of zero", "n", n=0),
    _bad("n too large", "n", n=1000),
    _bad("too many choices", "n", n=100, prompt=["a", "b"]),
    _bad("empty stop", "stop", stop=""),
    _bad("empty stop in a list", "stop[1]", stop=["a", ""]),
    _bad("five stops", "stop", stop=["a", "b", "c", "d", "e"]),
    _bad("stop of a wrong type", "stop", stop=7),
    _bad("long stop", "stop", stop="x" * 5000),
    _bad("stop id out of range", "stop_token_ids", stop_token_ids=[10**6]),
    _bad("many stop ids", "stop_token_ids", stop_token_ids=[1] * 1025),
    _bad("many biases", "logit_bias", logit_bias={str(token_id): 1 for token_id in range(1025)}),
    _bad("logit_bias on no id", "logit_bias", logit_bias={"x": 1}),
    _bad("logit_bias out of range", "logit_bias", logit_bias={"1000000": 1}),
    _bad("logit_bias too strong", "logit_bias", logit_bias={"5": 1000}),
    _bad("min above max", "min_tokens", min_tokens=5),
    _bad("logprobs", "logprobs", logprobs=1000),
    _bad("echo with logprobs", "logprobs", logprobs=1, echo=True),
    _bad("best_of", "best_of", best_of=2),
    _bad("suffix", "suffix", suffix="x"),
    _bad("usage without stream", "stream_options", stream_options={"include_usage": True}),
    _bad("stream as text", "stream", stream="yes"),
    _bad("unknown policy", "kvorum.policy", kvorum={"policy": "lru"}),
    _bad("policy with a null byte", "kvorum.policy", kvorum={"policy": "\x00"}),
    _bad("budget without a policy", "kvorum.kv_budget", kvorum={"kv_budget": 0.5}),
    _bad("budget of zero", "kvorum.kv_budget", kvorum={"policy": "h2o", "kv_budget": 0}),
    _bad("small budget", "kvorum.kv_budget", kvorum={"policy": "h2o", "kv_budget": 3}),
    _bad("broken budget", "kvorum.kv_budget", kvorum={"policy": "h2o", "kv_budget": 99.5}),
    _bad("huge budget", "kvorum.kv_budget", kvorum={"policy": "h2o", "kv_budget": 1e300}),
    _bad("mass above one", "kvorum.min_retained_mass", kvorum={"policy": "h2o", "min_retained_mass": 2}),
    _bad("misspelt promise", "kvorum.min_retained", kvorum={"min_retained": 0.9}),
    _bad("kvorum of a wrong type", "kvorum", kvorum="h2o"),
    _bad("long cache_salt", "cache_salt", cache_salt="x" * 1000),
    _bad("priority beyond 32 bits", "priority", priority=2**31),
)


@dataclass(frozen=True)
class BadCall:
    """A GenerateRequest and what the error must name."""

    name: str
    request: pb.GenerateRequest
    param: str | None


def _call(name: str, param: str, *, text: str = "hello", max_tokens: int = 4, **fields: object) -> BadCall:
    sampling = pb.SamplingParams(max_tokens=max_tokens)
    return BadCall(name, pb.GenerateRequest(**({"text": text, "sampling": sampling} | fields)), param)  # type: ignore[arg-type]  # mixed


def _sampled(name: str, param: str, **sampling: object) -> BadCall:
    fields = {"max_tokens": 4} | sampling
    return BadCall(name, pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(**fields)), param)  # type: ignore[arg-type]  # mixed


def _kept(name: str, param: str, **kv: object) -> BadCall:
    return _call(name, param, kvorum=pb.KVParams(**kv))  # type: ignore[arg-type]  # mixed


BAD_CALLS = (
    BadCall("nothing", pb.GenerateRequest(), "input"),
    _call("empty text", "text", text=""),
    BadCall("no ids", pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids"),
    BadCall("id out of range", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**32 - 1])), "token_ids"),
    BadCall("long ids", pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 9000)), "token_ids"),
    _call("10 MB text", "text", text="word " * 2_000_000),
    BadCall("no messages", pb.GenerateRequest(chat=pb.Conversation()), "chat.messages"),
    BadCall(
        "unknown role",
        pb.GenerateRequest(chat=pb.Conversation(messages=[pb.Message(role="pope", content="x")])),
        "chat.messages[0].role",
    ),
    _call("long request id", "request_id", request_id="x" * 1000),
    _call("empty stop", "stop[0]", stop=[""]),
    _call("long cache_salt", "cache_salt", cache_salt="x" * 1000),
    _sampled("no tokens", "max_tokens", max_tokens=0),
    _sampled("long answer", "max_tokens", max_tokens=9000),
    _sampled("huge max_tokens", "max_tokens", max_tokens=2**32 - 1),
    _sampled("NaN", "temperature", temperature=float("nan")),
    _sampled("hot", "temperature", temperature=5.0),
    _sampled("infinity", "top_p", top_p=float("inf")),
    _sampled("min_p", "min_p", min_p=-1.0),
    _sampled("repetition_penalty", "repetition_penalty", repetition_penalty=0.0),
    _sampled("logprobs", "logprobs", logprobs=1000),
    _sampled("logit_bias", "logit_bias", logit_bias={10**6: 1.0}),
    _sampled("logit_bias NaN", "logit_bias", logit_bias={5: float("nan")}),
    _sampled("stop ids", "stop_token_ids", stop_token_ids=[10**6]),
    _sampled("many stop ids", "stop_token_ids", stop_token_ids=[1] * 1025),
    _sampled("many biases", "logit_bias", logit_bias=dict.fromkeys(range(1025), 1.0)),
    _sampled("min above max", "min_tokens", min_tokens=5),
    _kept("unknown policy", "kvorum.policy", policy="lru"),
    _kept("budget without a policy", "kvorum.kv_budget", kv_budget_fraction=0.5),
    _kept("budget of one token", "kvorum.kv_budget", policy="h2o", kv_budget_tokens=1),
    _kept("fraction above one", "kvorum.kv_budget", policy="h2o", kv_budget_fraction=1.5),
    _kept("fraction NaN", "kvorum.kv_budget", policy="h2o", kv_budget_fraction=float("nan")),
    _kept("mass", "kvorum.min_retained_mass", policy="h2o", min_retained_mass=-1.0),
)
