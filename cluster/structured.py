"""What answers must look like: OpenAI's response_format, and `structured_outputs` with a schema, a regex or choices.

Each becomes one grammar, which is tried out (`grammar_trial.py`) before engines follow it (`workers/grammar.py`).
JSON is written on one line: small models left free to indent may do nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from llguidance import LLMatcher
from pydantic import ConfigDict, Field, model_validator

from kvorum.cluster.sampling_fields import RequestFields
from kvorum.kvstore.errors import InvalidRequestError

MAX_GRAMMAR_CHARS = 32_768
MAX_CHOICES = 1024

_Choice = Annotated[str, Field(min_length=1)]
_JSON_STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonSchema(RequestFields):
    """OpenAI's wrapping of a JSON schema; answers always follow it, strict or not."""

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestFields):
    """OpenAI's: free text, any JSON object, or JSON that follows a schema."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema: is given with type json_schema, and only then")
        return self


class StructuredOutputs(RequestFields):
    """One of: a JSON schema, a regular expression for the whole answer, texts to choose from."""

    model_config = ConfigDict(extra="forbid")

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[_Choice], Field(min_length=1, max_length=MAX_CHOICES)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if sum(each is not None for each in (self.json_schema, self.regex, self.choice)) != 1:
            raise ValueError("structured_outputs: give exactly one of json, regex and choice")
        return self


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer must follow, as a grammar; empty for free text. param: the field that says so."""

    grammar: str = ""
    param: str = ""


def form_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Form:
    """Return what an answer must follow; whether it can be followed is yet to be tried.

    Raises:
        InvalidRequestError: both are given, or what is given is no schema or too long.
    """
    if response_format is not None and response_format.type != "text":
        if structured is not None:
            raise InvalidRequestError(
                "structured_outputs: cannot be combined with response_format", param="structured_outputs"
            )
        if response_format.json_schema is None:
            return _json_form({"type": "object"}, "response_format")
        return _json_form(response_format.json_schema.schema_, "response_format.json_schema.schema")
    if structured is None:
        return Form()
    if structured.regex is not None:
        return _checked(LLMatcher.grammar_from_regex(structured.regex), "structured_outputs.regex")
    if structured.choice is not None:
        # Each character becomes one or more, one by one.
        _check_length(sum(map(len, structured.choice)), "structured_outputs.choice")
        texts = "|".join(map(_as_regex, structured.choice))
        return _checked(LLMatcher.grammar_from_regex(f"({texts})"), "structured_outputs.choice")
    assert structured.json_schema is not None, "exactly one is given"
    return _json_form(structured.json_schema, "structured_outputs.json")


def _json_form(schema: dict[str, Any] | str, param: str) -> Form:
    try:
        whole = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(whole, allow_nan=False)
        return _checked(LLMatcher.grammar_from_json_schema(text, defaults=_JSON_STYLE), param)  # type: ignore[arg-type]  # a TypedDict
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{param}: is no JSON schema: {error}", param=param) from None


def _as_regex(text: str) -> str:
    """Write a text as an expression for just that."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _checked(grammar: str, param: str) -> Form:
    _check_length(len(grammar), param)
    return Form(grammar, param)


def _check_length(num_chars: int, param: str) -> None:
    if num_chars > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{param}: is at least {num_chars} characters long as a grammar, more than {MAX_GRAMMAR_CHARS}", param=param
        )
