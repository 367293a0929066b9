"""What answers must look like: OpenAI's response_format, and `structured_outputs` with a schema, a regex or choices.

Each becomes one grammar, which is checked here; engines follow it (`workers/grammar.py`). JSON is written on one line:
small models left free to indent may do nothing else.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from llguidance import LLMatcher
from pydantic import ConfigDict, Field, model_validator

from kvorum.cluster.sampling_fields import RequestFields
from kvorum.kvstore.errors import InvalidRequestError

MAX_GRAMMAR_CHARS = 32_768
MAX_CHOICES = 1024

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
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)] | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if sum(each is not None for each in (self.json_schema, self.regex, self.choice)) != 1:
            raise ValueError("structured_outputs: give exactly one of json, regex and choice")
        return self


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> str:
    """Return the grammar that an answer must follow, empty for free text.

    Raises:
        InvalidRequestError: both are given, or what is given is no schema, expression or choice that can be followed.
    """
    if response_format is not None and response_format.type != "text":
        if structured is not None:
            raise InvalidRequestError(
                "structured_outputs: cannot be combined with response_format", param="structured_outputs"
            )
        wrapped = response_format.json_schema
        schema = {"type": "object"} if wrapped is None else wrapped.schema_
        return _checked(_json_grammar(schema), "response_format.json_schema.schema")
    if structured is None:
        return ""
    if structured.regex is not None:
        return _checked(LLMatcher.grammar_from_regex(structured.regex), "structured_outputs.regex")
    if structured.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structured.choice)
        return _checked(LLMatcher.grammar_from_lark(f"start: {texts}"), "structured_outputs.choice")
    assert structured.json_schema is not None, "exactly one is given"
    return _checked(_json_grammar(structured.json_schema), "structured_outputs.json")


def _json_grammar(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            param = "structured_outputs.json"
            raise InvalidRequestError(f"{param}: is not JSON: {error}", param=param) from None
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_JSON_STYLE)  # type: ignore[arg-type]  # a TypedDict


def _checked(grammar: str, param: str) -> str:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{param}: is {len(grammar)} characters long as a grammar, more than {MAX_GRAMMAR_CHARS}", param=param
        )
    if problem := LLMatcher.validate_grammar(grammar):
        raise InvalidRequestError(f"{param}: cannot be followed: {problem.strip()}", param=param)
    return grammar
