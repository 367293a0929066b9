"""Does a gateway route to kvorum as if it were a vLLM gRPC worker? On a real cluster with the real model.

    make bench-clients

SMG is installed into an environment of its own below build/ and knows nothing but the cluster's gRPC address. What it
answers to OpenAI's client is compared with what the cluster itself answers; what only the gateway has, tool calls and
the Responses API, must come out right. Exits with 1 when something does not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam

# The tools of the comparison, never the repository's root: it hides other packages.
sys.path.insert(0, str(Path(__file__).parent / "peers"))

from environments import PEERS, ROOT, ensure
from peers import Command
from processes import free_port, running

from kvorum.workers.checkpoint.resolve import DEMO_MODEL

OUTPUT = ROOT / "build" / "clients"
PACKAGE = "smg==1.13.0"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
SAMPLING: dict[str, Any] = {"max_tokens": 32, "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}},
    "required": ["capital"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "tell", "description": "Tell a capital.", "parameters": SCHEMA}}
_REGISTRATION_TIMEOUT_S = 60.0

# Text, finish reason, prompt tokens and answer tokens.
Answer = tuple[str, str, int, int]


def main() -> int:
    """Ask the gateway and the cluster the same, and say where they differ."""
    ensure("smg", (PACKAGE,))
    port, grpc_port, gateway_port = free_port(), free_port(), free_port()
    serve = (ROOT / ".venv" / "bin" / "kvorum", "serve", "--model", DEMO_MODEL)
    cluster = Command((*serve, "--port", str(port), "--grpc-port", str(grpc_port)), weights="q4_1", kv_cache="bf16")
    gateway = Command(
        (
            *(PEERS / "smg" / "bin" / "smg", "launch", "--host", "127.0.0.1", "--port", str(gateway_port)),
            *("--worker-urls", f"grpc://127.0.0.1:{grpc_port}"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())),
        ),
        weights="",
        kv_cache="",
    )
    with (
        running(cluster, port=port, log=OUTPUT / "gateway-cluster.log") as server,
        running(gateway, port=gateway_port, log=OUTPUT / "gateway.log") as front,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none") as ours,
        openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", max_retries=0) as theirs,
    ):
        _wait_until_registered(theirs)
        outcomes = [_compare(name, ask, ours, theirs) for name, ask in CASES.items()]
        outcomes += [_check(name, is_right(theirs)) for name, is_right in ADDED.items()]
    return 0 if all(outcomes) else 1


def _wait_until_registered(client: openai.OpenAI) -> None:
    """Wait until the gateway has found the cluster, which it tells by naming its model, and has its tokenizer."""
    deadline_s = time.monotonic() + _REGISTRATION_TIMEOUT_S
    while True:
        try:
            _chat(client)
        except openai.APIStatusError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.5)
        else:
            return


def _compare(name: str, ask: Callable[[openai.OpenAI], Answer], ours: openai.OpenAI, theirs: openai.OpenAI) -> bool:
    expected, found = ask(ours), ask(theirs)
    verdict = "as the cluster's own" if found == expected else f"but the cluster's own is {expected}"
    print(f"{PACKAGE}, {name}: {found}, {verdict}", flush=True)
    return found == expected


def _check(name: str, is_right: bool) -> bool:
    print(f"{PACKAGE}, {name}: {'right' if is_right else 'WRONG'}", flush=True)
    return is_right


def _chat(client: openai.OpenAI, more: Mapping[str, object] | None = None) -> Answer:
    """Ask for a whole answer; more fields may be added to the request."""
    answer = client.chat.completions.create(model=DEMO_MODEL, messages=MESSAGES, extra_body=more, **SAMPLING)
    return _read(answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage)


def _stream(client: openai.OpenAI) -> Answer:
    text, reason = "", ""
    for chunk in client.chat.completions.create(
        model=DEMO_MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SAMPLING
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return _read(text, reason, chunk.usage)


def _stopped(client: openai.OpenAI) -> Answer:
    answer = client.completions.create(model=DEMO_MODEL, prompt="One, two, three,", stop=["."], **SAMPLING)
    return _read(answer.choices[0].text, answer.choices[0].finish_reason, answer.usage)


def _read(text: str | None, finish_reason: str, usage: CompletionUsage | None) -> Answer:
    assert usage, "both servers always tell"
    return text or "", finish_reason, usage.prompt_tokens, usage.completion_tokens


def _calls_the_tool(client: openai.OpenAI) -> bool:
    answer = client.chat.completions.create(
        model=DEMO_MODEL, messages=MESSAGES, extra_body={"tools": [TOOL], "tool_choice": "required"}, **SAMPLING
    )
    (call,) = answer.choices[0].message.tool_calls or [None]
    return call is not None and call.type == "function" and set(json.loads(call.function.arguments)) == {"capital"}


def _responds(client: openai.OpenAI) -> bool:
    response = client.responses.create(
        model=DEMO_MODEL, input=str(MESSAGES[0]["content"]), max_output_tokens=32, temperature=0
    )
    return response.output_text == _chat(client)[0]


CASES: dict[str, Callable[[openai.OpenAI], Answer]] = {
    "whole": _chat,
    "stream": _stream,
    "stop string": _stopped,
    "JSON schema": partial(_chat, more={"response_format": RESPONSE_FORMAT}),
}
ADDED: dict[str, Callable[[openai.OpenAI], bool]] = {"tool call": _calls_the_tool, "Responses API": _responds}

if __name__ == "__main__":
    sys.exit(main())
