"""The real model keeps to schemas, expressions and choices, whatever it would rather say."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import pytest

from kvorum.cluster.structured import StructuredOutputs, form_of
from kvorum.workers.config import EngineConfig
from kvorum.workers.engine import build_engine
from kvorum.workers.local import LocalExecutor
from kvorum.workers.request import EngineRequest, FinishReason, KVParams, RequestId, SamplingParams
from kvorum.workers.worker import load_worker
from kvtest.embedded import embedded_checkpoint
from kvtest.engines import Answer, collect

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer"},
        "old": {"type": "boolean"},
    },
    "required": ["city", "people", "old"],
    "additionalProperties": False,
}
REGEX = "[A-Z][a-z]{2,8}, [0-9]{4}"
CHOICE = ["Paris", "Lyon", "neither of them"]
WAYS = {"json": {"json": SCHEMA}, "regex": {"regex": REGEX}, "choice": {"choice": CHOICE}}
QUESTION = {"role": "user", "content": "What is the capital of France?"}


def test_answers_follow_their_grammars_sampled_evicted_and_side_by_side() -> None:
    checkpoint = embedded_checkpoint()
    tokenizer = checkpoint.load_tokenizer()
    prompt = tokenizer.render_chat([QUESTION], add_generation_prompt=True)
    config = EngineConfig(model="smollm2-135m", model_name="smollm2-135m", backend="cpu", kv_cache_memory_bytes=2**24)
    free = SamplingParams(max_tokens=120, temperature=0.9, eos_token_ids=checkpoint.eos_token_ids)
    requests = [
        EngineRequest(
            RequestId(f"{name}{seed}"),
            tuple(tokenizer.encode(prompt)),
            replace(free, seed=seed, grammar=form_of(None, StructuredOutputs.model_validate(way)).grammar),
            KVParams("h2o", 32) if seed else KVParams(),
        )
        for name, way in WAYS.items()
        for seed in range(2)
    ]
    requests.append(EngineRequest(RequestId("free"), tuple(tokenizer.encode(prompt)), replace(free, max_tokens=8)))

    def rest_of(request: EngineRequest, answer: Answer) -> EngineRequest:
        came = tuple(answer.token_ids[: len(answer.token_ids) // 2])
        return replace(request, request_id=RequestId(f"rest of {request.request_id}"), answer_token_ids=came)

    async def go() -> dict[str, Answer]:
        worker, shape = load_worker(config)
        engine = build_engine(config, shape, LocalExecutor(worker), engine_id="structured")
        await engine.start()
        try:
            whole = await collect(engine, requests)
            return whole | await collect(engine, [rest_of(it, whole[it.request_id]) for it in requests[:-1]])
        finally:
            await engine.stop()

    answers = asyncio.run(go())
    for name in [f"{way}{seed}" for way in WAYS for seed in range(2)]:
        whole, rest = answers[name].token_ids, answers[f"rest of {name}"]
        answers[f"resumed {name}"] = replace(rest, token_ids=[*whole[: len(whole) // 2], *rest.token_ids])
    for kind in ("{}0", "{}1", "resumed {}0", "resumed {}1"):
        texts = {name: tokenizer.decode(answers[kind.format(name)].token_ids) for name in WAYS}
        assert all(answers[kind.format(name)].finish_reason is FinishReason.STOP for name in WAYS), texts
        found = json.loads(texts["json"])
        assert list(found) == ["city", "people", "old"]
        assert (type(found["city"]), type(found["people"]), type(found["old"])) == (str, int, bool)
        assert re.fullmatch(REGEX, texts["regex"])
        assert texts["choice"] in CHOICE
