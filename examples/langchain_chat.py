"""LangChain's OpenAI classes: a chat model in a chain, and its tokens as they come."""

from __future__ import annotations

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

model = ChatOpenAI(
    base_url=os.environ.get("KVORUM_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=SecretStr(os.environ.get("KVORUM_API_KEY", "none")),
    model=os.environ.get("KVORUM_MODEL", "smollm2-135m"),
    temperature=0,
    max_completion_tokens=32,
    extra_body={"kvorum": {"policy": "h2o_avg", "kv_budget": 0.5}},
)
chain = ChatPromptTemplate.from_messages([("user", "Say something about {subject}.")]) | model | StrOutputParser()

print(chain.invoke({"subject": "caches"}))
for text in chain.stream({"subject": "quotas"}):
    print(text, end="", flush=True)
print()
