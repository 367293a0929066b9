"""Request traces as they are published: when requests came, how long they and their answers were.

Two formats are read. JSON lines as Mooncake writes them: `timestamp` in milliseconds, `input_length`, `output_length`,
and optionally `hash_ids`, where equal ids are equal blocks of 512 prompt tokens. CSV with a header, as the Azure and
BurstGPT traces: a time in seconds or a date, and two columns of token counts under one of several names.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvorum.cluster.config import ConfigError

BLOCK_TOKENS = 512

_TIME = ("timestamp", "arrived_at")
_PROMPT = ("input_length", "contexttokens", "request tokens", "prompt_tokens", "input_tokens", "num_prefill_tokens")
_OUTPUT = (
    "output_length",
    "generatedtokens",
    "response tokens",
    "completion_tokens",
    "output_tokens",
    "num_decode_tokens",
)
_MILLISECONDS = 0.001


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace; at_s counts from the first. block_ids: its prompt's blocks, if the trace has them."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


def parse_trace(lines: Iterable[str], *, name: str) -> list[TraceEntry]:
    """Read a trace, earliest request first; requests without a prompt or an answer (failed ones) are left out.

    Raises:
        ConfigError: naming the file, the line and the column.
    """
    rows = iter(lines)
    first = next(rows, "")
    every_line = _chain(first, rows)
    is_json = first.lstrip().startswith("{")
    entries = [*(_json_entries(every_line, name) if is_json else _csv_entries(every_line, name))]
    entries = sorted((e for e in entries if e.prompt_tokens and e.output_tokens), key=lambda entry: entry.at_s)
    if not entries:
        raise ConfigError(f"{name} has no request with a prompt and an answer")
    start_s = entries[0].at_s
    return [TraceEntry(e.at_s - start_s, e.prompt_tokens, e.output_tokens, e.block_ids) for e in entries]


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _json_entries(lines: Iterable[str], name: str) -> Iterator[TraceEntry]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{place}: is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: expected an object, found a {type(row).__name__}")
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
            raise ConfigError(f"{place}: column hash_ids: expected a list of integers")
        yield TraceEntry(
            at_s=_time_s(_pick(row, ("timestamp",), place), place) * _MILLISECONDS,
            prompt_tokens=_count(_pick(row, ("input_length",), place), place),
            output_tokens=_count(_pick(row, ("output_length",), place), place),
            block_ids=tuple(blocks),
        )


def _csv_entries(lines: Iterable[str], name: str) -> Iterator[TraceEntry]:
    reader = csv.DictReader(lines)
    reader.fieldnames = [field.strip().lower() for field in reader.fieldnames or ()]
    for row in reader:
        place = f"{name}, line {reader.line_num}"
        yield TraceEntry(
            at_s=_time_s(_pick(row, _TIME, place), place),
            prompt_tokens=_count(_pick(row, _PROMPT, place), place),
            output_tokens=_count(_pick(row, _OUTPUT, place), place),
        )


_Cell = tuple[str, Any]


def _pick(row: Mapping[str, Any], names: tuple[str, ...], place: str) -> _Cell:
    """Return the column that goes by one of the names, with its name."""
    for name in names:
        if name in row:
            return name, row[name]
    found = ", ".join(map(str, row)) or "nothing"
    raise ConfigError(f"{place}: no column {' or '.join(names)}; found {found}")


def _count(cell: _Cell, place: str) -> int:
    column, value = cell
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = -1
    if count < 0:
        raise ConfigError(f"{place}: column {column}: expected a number of tokens, got {value!r}")
    return count


def _time_s(cell: _Cell, place: str) -> float:
    column, value = cell
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        raise ConfigError(f"{place}: column {column}: expected seconds or a date, got {value!r}") from None
