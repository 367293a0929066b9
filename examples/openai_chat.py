"""OpenAI's own client: a whole answer, a stream, and the receipt of what happened to the KV cache."""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("KVORUM_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("KVORUM_API_KEY", "none"),
)
(model,) = client.models.list()

answer = client.chat.completions.create(
    model=model.id, messages=[{"role": "user", "content": "What is a KV cache?"}], max_tokens=32, temperature=0
)
print(answer.choices[0].message.content)

# kvorum's own fields travel in one object; the last chunk brings the receipt.
stream = client.chat.completions.create(
    model=model.id,
    messages=[{"role": "user", "content": "Why does it grow?"}],
    max_tokens=32,
    stream=True,
    extra_body={"kvorum": {"policy": "h2o_avg", "kv_budget": 0.5}},
)
receipt: dict[str, Any] = {}
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
    receipt = getattr(chunk, "kvorum", receipt)
print(
    f"\nkept {receipt['kv_tokens_held']} tokens, evicted {receipt['kv_tokens_evicted']}, "
    f"retained mass {receipt['retained_mass']:.3f}"
)
