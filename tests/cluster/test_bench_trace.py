"""Traces in the formats in which they are published, and what is wrong with one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvorum.cluster.bench_trace import TraceEntry, parse_trace
from kvorum.cluster.config import ConfigError

MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 3000, "input_length": 900, "output_length": 20, "hash_ids": [0, 1]},
    {"timestamp": 1000, "input_length": 10, "output_length": 5},
    {"timestamp": 2000, "input_length": 10, "output_length": 0},
]


def json_lines(*rows: object) -> list[str]:
    return [json.dumps(row) + "\n" for row in rows]


def test_mooncake_is_read_in_order_of_time_and_without_failed_requests() -> None:
    assert parse_trace([*json_lines(*MOONCAKE), "\n"], name="t") == [
        TraceEntry(0.0, 10, 5),
        TraceEntry(2.0, 900, 20, (0, 1)),
    ]


def test_azure_is_read() -> None:
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        "2023-11-16 18:17:03.9799600,4808,10\n",
        "2023-11-16 18:17:05.4799600,3180,8\n",
    ]
    assert parse_trace(lines, name="t") == [TraceEntry(0.0, 4808, 10), TraceEntry(1.5, 3180, 8)]


def test_burstgpt_is_read() -> None:
    lines = [
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
        "5,ChatGPT,472,18,490,Conversation log\n",
        "45,ChatGPT,1087,0,1087,Conversation log\n",
        "118,GPT-4,417,276,693,Conversation log\n",
    ]
    assert parse_trace(lines, name="t") == [TraceEntry(0.0, 472, 18), TraceEntry(113.0, 417, 276)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (json_lines({"timestamp": 0, "input_length": 3}), "t, line 1: no column output_length; found timestamp"),
        (json_lines(MOONCAKE[0], {"timestamp": "soon"}), "t, line 2: column timestamp: expected seconds or a date"),
        (json_lines(MOONCAKE[0] | {"input_length": -1}), "t, line 1: column input_length: expected a number of tokens"),
        (json_lines(MOONCAKE[0] | {"input_length": "many"}), "column input_length: expected a number .* got 'many'"),
        (json_lines(MOONCAKE[0] | {"hash_ids": 3}), "t, line 1: column hash_ids: expected a list of integers"),
        (json_lines(MOONCAKE[0], [1]), "t, line 2: expected an object, found a list"),
        (["{broken"], "t, line 1: is not JSON"),
        (["when,who\n", "1,2\n"], "t, line 2: no column timestamp or arrived_at; found when, who"),
        (["timestamp,input_length\n", "1,2\n"], "t, line 2: no column output_length or generatedtokens or"),
        (["timestamp,input_length,output_length\n", "1,2\n"], "column output_length: expected a number .* got None"),
        ([], "t has no request with a prompt and an answer"),
        (json_lines(MOONCAKE[2]), "t has no request with a prompt and an answer"),
    ],
)
def test_what_is_wrong_is_named(lines: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_trace(lines, name="t")
