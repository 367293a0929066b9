"""Ranks in real actors over Gloo: together they answer and evict as one rank does, however the model is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvorum.kernels.backend import SlotView
from kvorum.kvstore.types import SeqId
from kvorum.workers.config import EngineConfig
from kvorum.workers.engine import Engine, build_engine
from kvorum.workers.group import RayExecutor, build_ray_engine
from kvorum.workers.local import LocalExecutor
from kvorum.workers.plan import CurveQuery, HeadQuery, StepPlan, StepResult
from kvorum.workers.request import EngineRequest, KVParams
from kvorum.workers.worker import load_worker
from kvtest.checkpoints import tiny_checkpoint
from kvtest.embedded import transformers_logits, twenty_prompts
from kvtest.engines import Answer, collect, request

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

# Scores of ranks are added in another order than those of one rank; nearer ones may change places.
SCORE_TIE = 1e-4


class Watch:
    """Looks at a sequence's slots, and at what it would keep of fewer blocks, after each of its sampled steps."""

    def __init__(self, engine: Engine, *, block_size: int) -> None:
        self.views: dict[SeqId, list[SlotView]] = {}
        self.curves: dict[SeqId, list[tuple[float, ...]]] = {}
        executor = engine._executor
        assert isinstance(executor, LocalExecutor | RayExecutor)
        execute = executor.execute

        async def execute_and_look(plan: StepPlan) -> StepResult:
            result = await execute(plan)
            for row in plan.rows:
                if row.sample is not None and row.step.rule is not None:
                    look = executor.worker.view if isinstance(executor, LocalExecutor) else executor.view
                    view = look(row.residence)
                    seen = view if isinstance(view, SlotView) else await view
                    self.views.setdefault(row.seq_id, []).append(seen)
                    query = CurveQuery(row.residence, row.step.rule, row.step.start + row.step.num_tokens, block_size)
                    self.curves.setdefault(row.seq_id, []).extend(await executor.retention_curves([query]))
                    layer, kv_head = len(seen.positions) - 1, len(seen.positions[0]) - 1
                    newest = row.step.start + row.step.num_tokens - 1
                    slots = await executor.look(HeadQuery(row.residence, row.step.rule, newest, layer, kv_head))
                    assert slots.positions == tuple(seen.positions[layer, kv_head].tolist())
                    assert slots.scores == tuple(seen.scores[layer, kv_head].tolist())
            return result

        executor.execute = execute_and_look  # type: ignore[method-assign]


async def run(engine: Engine, requests: Sequence[EngineRequest]) -> tuple[dict[str, Answer], Watch]:
    watch = Watch(engine, block_size=engine.info.block_size)
    await engine.start()
    try:
        return await collect(engine, requests), watch
    finally:
        await engine.stop()


def answer_alone(config: EngineConfig, requests: Sequence[EngineRequest]) -> tuple[dict[str, Answer], Watch]:
    async def go() -> tuple[dict[str, Answer], Watch]:
        worker, shape = load_worker(config)
        return await run(build_engine(config, shape, LocalExecutor(worker), engine_id="alone"), requests)

    return asyncio.run(go())


def answer_together(
    config: EngineConfig, requests: Sequence[EngineRequest], num_ranks: int
) -> tuple[dict[str, Answer], Watch]:
    async def go() -> tuple[dict[str, Answer], Watch]:
        engine = await build_ray_engine(
            replace(config, tensor_parallel_size=num_ranks),
            num_engines=1,
            engine_id="together",
            on_progress=lambda _, __: None,
        )
        return await run(engine, requests)

    return asyncio.run(go())


def assert_same_kept(alone: Watch, together: Watch) -> None:
    """Every head of every layer keeps the same tokens after every step, with the same scores, which sum up alike."""
    assert alone.views.keys() == together.views.keys()
    assert alone.views, "nothing was looked at"
    for seq_id, views in alone.views.items():
        for ours, theirs in zip(views, together.views[seq_id], strict=True):
            assert torch.equal(ours.positions, theirs.positions)
            assert torch.equal(ours.alive, theirs.alive)
            torch.testing.assert_close(ours.scores, theirs.scores, rtol=SCORE_TIE, atol=SCORE_TIE)
        for mine, other in zip(alone.curves[seq_id], together.curves[seq_id], strict=True):
            assert 0.0 == mine[0] < mine[-1]
            assert other == pytest.approx(mine, abs=SCORE_TIE)


def assert_same_answers(alone: dict[str, Answer], together: dict[str, Answer]) -> None:
    for name, answer in alone.items():
        other = together[name]
        assert other.token_ids == answer.token_ids
        assert answer.receipt is not None
        assert other.receipt is not None
        assert other.receipt.kv_tokens_held == answer.receipt.kv_tokens_held
        assert other.receipt.retained_mass == pytest.approx(answer.receipt.retained_mass, abs=1e-5)


TINY_REQUESTS = [
    request("full", range(5, 45), max_tokens=12),
    request("h2o", range(5, 75), max_tokens=12, kv=KVParams("h2o", 24)),
    request("snap", range(7, 70), max_tokens=12, kv=KVParams("snap_h2o", 20)),
    request("floor", range(9, 80), max_tokens=12, kv=KVParams("h2o_avg", 24, 0.7)),
]


@pytest.mark.parametrize(
    ("heads", "num_ranks", "backend"),
    [
        pytest.param((4, 1), 2, "cpu", id="MQA-replicated"),
        pytest.param((4, 4), 3, "reference", id="MHA-uneven"),
        pytest.param((6, 2), 3, "cpu", id="GQA-one-of-two-replicated"),
    ],
)
def test_a_tiny_model_cut_in_any_way_answers_and_evicts_alike(
    heads: tuple[int, int], num_ranks: int, backend: str, tmp_path: Path
) -> None:
    tiny_checkpoint("llama", tmp_path, num_heads=heads[0], num_kv_heads=heads[1])
    config = EngineConfig(
        model=str(tmp_path),
        model_name="tiny",
        backend=backend,  # type: ignore[arg-type]
        kv_cache_memory_bytes=2**22,
        max_num_seqs=4,
    )
    alone, alone_watch = answer_alone(config, TINY_REQUESTS)
    together, together_watch = answer_together(config, TINY_REQUESTS, num_ranks)
    assert_same_answers(alone, together)
    assert_same_kept(alone_watch, together_watch)


@pytest.fixture(scope="module")
def smollm2() -> EngineConfig:
    return EngineConfig(
        model="smollm2-135m",
        model_name="smollm2-135m",
        dtype="float32",
        quantization="none",
        kv_cache_memory_bytes=2**28,
        max_num_seqs=8,
    )


def smollm2_requests() -> list[EngineRequest]:
    prompts = twenty_prompts()
    short = [request(f"full-{index}", prompts[index], max_tokens=16) for index in (0, 3, 7)]
    long = next(prompt for prompt in prompts if 200 <= len(prompt) < 600)
    return [
        *short,
        request("h2o", long, max_tokens=16, kv=KVParams("h2o", 64)),
        request("h2o_avg", long[20:], max_tokens=16, kv=KVParams("h2o_avg", 48)),
    ]


@pytest.fixture(scope="module")
def smollm2_alone(smollm2: EngineConfig) -> tuple[dict[str, Answer], Watch]:
    return answer_alone(smollm2, smollm2_requests())


@pytest.mark.model
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_smollm2_answers_as_transformers_does_on_any_number_of_ranks(
    smollm2: EngineConfig, smollm2_alone: tuple[dict[str, Answer], Watch], num_ranks: int
) -> None:
    requests = smollm2_requests()
    answers, watch = answer_together(smollm2, requests, num_ranks)
    for item in requests:
        if item.kv.policy == "full":
            answer = tuple(answers[item.request_id].token_ids)
            assert transformers_logits(item.prompt_token_ids, answer).argmax(dim=-1).tolist() == list(answer)
    alone, alone_watch = smollm2_alone
    assert_same_answers(alone, answers)
    assert_same_kept(alone_watch, watch)
