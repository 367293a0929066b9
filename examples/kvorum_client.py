"""kvorum's client: a stream over gRPC that heeds RetryInfo, has a deadline, and outlives a broken connection."""

from __future__ import annotations

import os

from kvorum.client import Client, Options

with Client(os.environ.get("KVORUM_GRPC", "127.0.0.1:9000"), api_key=os.environ.get("KVORUM_API_KEY")) as client:
    options = Options(max_tokens=32, temperature=0.0, policy="h2o_avg", kv_budget=0.5)
    with client.stream_chat("What is a KV cache?", options, timeout_s=60) as pieces:
        for piece in pieces:
            print(piece.text, end="", flush=True)
        print(f"\n{piece.completion}")
