"""The fields that every way of asking for text shares, checked once for HTTP and gRPC alike.

Types and ranges that need no knowledge of the model are declared here; `planning.py` checks the rest.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvorum.kvstore.errors import InvalidRequestError

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1000
MAX_LOGPROBS = 20
MAX_CHOICES = 128
# An engine looks at these with each token, while every other sequence waits.
MAX_STOP_TOKENS = MAX_BIASES = 1024

TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class RequestFields(BaseModel):
    """Base of everything that clients send: JSON types as they are, no NaN, no infinity."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="allow")


class KvorumFields(RequestFields):
    """The `kvorum` object; a misspelt promise of quality must not go unnoticed, so nothing else is allowed in it."""

    model_config = ConfigDict(extra="forbid")

    policy: str | None = Field(default=None, max_length=100)
    kv_budget: float | None = Field(default=None, lt=2**31)
    min_retained_mass: float | None = Field(default=None, ge=0, le=1)


class SamplingFields(RequestFields):
    """How to sample, when to stop, and what may happen to the KV cache."""

    model: str | None = Field(default=None, max_length=256)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=MAX_BIASES
    )
    min_tokens: Count | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    kvorum: KvorumFields | None = None


def invalid_request(error: ValidationError) -> InvalidRequestError:
    """Turn pydantic's report into one error that names the field, the value and the limit."""
    details = error.errors(include_url=False)
    # A union reports each of its branches: the one that got furthest is the one that was meant.
    detail = max(
        (each for each in details if each["loc"][:1] == details[0]["loc"][:1]), key=lambda each: len(each["loc"])
    )
    if detail["type"] == "json_invalid":
        return InvalidRequestError(f"the body is not JSON: {detail['msg'].removeprefix('Invalid JSON: ')}")
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not detail["loc"] and detail["type"] == "value_error":  # a rule across fields: its text names the field
        return InvalidRequestError(message, param=message.partition(":")[0])
    param = _path(detail["loc"])
    given = "" if detail["type"] in ("missing", "value_error") else f", got {_shorten(detail['input'])}"
    return InvalidRequestError(f"{param or 'the body'}: {message}{given}", param=param or None)


def _path(location: tuple[int | str, ...]) -> str:
    """Write a location as people do, `messages[0].content`, without pydantic's names for the branches of unions."""
    path = ""
    for part in location:
        if path == "logit_bias":  # what follows are token ids, not fields
            return path
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "list", "dict"):
            path += f".{part}" if path else part
    return path


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
