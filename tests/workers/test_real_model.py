"""SmolLM2 through the engine: greedy output equals transformers', H2O keeps what the slow decoder keeps.

The CPU back end does most of the work, being many times faster; the reference answers once, and in float64.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from kvorum.kernels.backend import Backend, StepT
from kvorum.kernels.cpu.backend import CpuBackend
from kvorum.kernels.spec import Shard
from kvorum.kvstore.types import SeqId
from kvorum.workers.checkpoint.weights import iter_weights
from kvorum.workers.request import KVParams
from kvtest.embedded import (
    embedded_backend,
    embedded_checkpoint,
    embedded_cpu_backend,
    transformers_logits,
    twenty_prompts,
)
from kvtest.engines import Answer, PoisonT, Recorder, rig
from kvtest.engines import request as request_of
from kvtest.prose import prose
from kvtest.slow_decoder import SlowDecoder, SlowPolicy, slow_decode

pytestmark = pytest.mark.model

MAX_TOKENS = 64
LONG = 1000  # tokens of the prompt that is evicted from
TIE = 1e-3
BF16_KV_TOLERANCE = 0.25


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return embedded_cpu_backend(dtype="float32")


def generate(
    backend: Backend[PoisonT, StepT],
    *,
    one_by_one: bool = False,
    rounds: int = 1,
    num_blocks: int = 600,
    **options: int | bool,
) -> tuple[list[Answer], Recorder]:
    """Answer the twenty prompts; with several rounds, the last round's answers."""
    items = [
        request_of(f"{turn}-{index}", prompt, max_tokens=MAX_TOKENS)
        for turn in range(rounds)
        for index, prompt in enumerate(twenty_prompts())
    ]

    async def go() -> tuple[list[Answer], Recorder]:
        settings = {"num_blocks": num_blocks, "max_num_seqs": 20, "note_kept": False, **options}
        async with rig(backend, **settings) as it:  # type: ignore[arg-type]
            size = 1 if one_by_one else len(twenty_prompts())
            answers: dict[str, Answer] = {}
            for first in range(0, len(items), size):
                answers |= await it.run(items[first : first + size])
            return [answers[item.request_id] for item in items[-20:]], it.recorder

    return asyncio.run(go())


def assert_equal_to_transformers(
    answers: Sequence[Answer], recorder: Recorder, *, tolerance: float = 5e-3, tie: float = TIE
) -> None:
    """Every token is transformers' choice too; where its best two are closer than `tie`, it may be the second."""
    first_seq = max(recorder.logits) + 1 - len(answers)
    for index, (prompt, answer) in enumerate(zip(twenty_prompts(), answers, strict=True)):
        assert len(answer.token_ids) == MAX_TOKENS
        expected = transformers_logits(prompt, tuple(answer.token_ids))
        ours = torch.stack(recorder.logits[SeqId(first_seq + index)])
        torch.testing.assert_close(ours, expected, atol=tolerance, rtol=0)
        best = expected.topk(2)
        for step, token in enumerate(answer.token_ids):
            (first, second), gap = best.indices[step].tolist(), float(-best.values[step].diff())
            assert token == first or (gap < tie and token == second), f"prompt {index}, token {step}"


@pytest.mark.slow
def test_one_at_a_time(backend: CpuBackend) -> None:
    assert_equal_to_transformers(*generate(backend, one_by_one=True))


@pytest.mark.parametrize(("caching", "chunk"), [(False, 64), (True, 2048)])
def test_all_at_once(backend: CpuBackend, caching: bool, chunk: int) -> None:
    answers, recorder = generate(
        backend,
        rounds=2 if caching else 1,
        enable_prefix_caching=caching,
        max_num_batched_tokens=chunk,
        num_blocks=900,
    )
    assert_equal_to_transformers(answers, recorder)
    cached = [answer.receipt.prompt_tokens_cached for answer in answers if answer.receipt is not None]
    expected = [(len(prompt) - 1) // 16 * 16 if caching else 0 for prompt in twenty_prompts()]
    assert cached == expected


def test_across_a_forced_preemption(backend: CpuBackend) -> None:
    answers, recorder = generate(backend, num_blocks=300)
    assert_equal_to_transformers(answers, recorder)
    assert sum(answer.receipt.preemptions for answer in answers if answer.receipt is not None) > 0


@pytest.mark.slow
def test_the_reference_back_end() -> None:
    assert_equal_to_transformers(*generate(embedded_backend()))


def test_the_blocks_of_the_file_as_they_lie_with_bf16_keys_and_values() -> None:
    # Activations of 15 bits and bf16 K and V: logits, some tens large, move by less than a tenth.
    backend = embedded_cpu_backend()
    assert backend.is_quantized
    assert_equal_to_transformers(*generate(backend), tolerance=BF16_KV_TOLERANCE, tie=2 * BF16_KV_TOLERANCE)


def test_prompts_in_bytes_cost_little() -> None:
    backend = embedded_cpu_backend(prompt_activations="int8")
    answers, recorder = generate(backend)
    first_seq = max(recorder.logits) + 1 - len(answers)
    divergences = []
    for index, (prompt, answer) in enumerate(zip(twenty_prompts(), answers, strict=True)):
        expected = transformers_logits(prompt, tuple(answer.token_ids)).double().log_softmax(dim=-1)
        ours = torch.stack(recorder.logits[SeqId(first_seq + index)]).double().log_softmax(dim=-1)
        divergences.append((expected.exp() * (expected - ours)).sum(dim=-1))
    assert float(torch.cat(divergences).mean()) < 5e-3


@pytest.fixture(scope="module")
def long_prompt() -> list[int]:
    return embedded_checkpoint().load_tokenizer().encode(prose()[:10_000])[:LONG]


@pytest.fixture(scope="module", params=[(64,), pytest.param((64, 128, 256), marks=pytest.mark.slow)])
def evicted(request: pytest.FixtureRequest, long_prompt: list[int]) -> tuple[dict[str, Answer], Recorder]:
    """H2O at some budgets side by side, in float64 so that no two scores tie by rounding."""
    items = [
        request_of(str(budget), long_prompt, max_tokens=201, kv=KVParams("h2o", budget)) for budget in request.param
    ]

    async def go() -> tuple[dict[str, Answer], Recorder]:
        async with rig(embedded_backend(torch.float64), num_blocks=320) as it:
            return await it.run(items), it.recorder

    return asyncio.run(go())


@pytest.fixture(scope="module")
def prefilled(long_prompt: list[int]) -> tuple[SlowDecoder, torch.Tensor]:
    """The slow decoder after the prompt, which is the same for every budget, and the prompt's last logits."""
    checkpoint = embedded_checkpoint()
    weights = dict(iter_weights(checkpoint, Shard.whole(checkpoint.spec), dtype=torch.float64))
    decoder = SlowDecoder(checkpoint.spec, weights)
    return decoder, decoder.run(long_prompt, None, evict=False)


def test_h2o_keeps_what_the_slow_decoder_keeps(
    evicted: tuple[dict[str, Answer], Recorder], prefilled: tuple[SlowDecoder, torch.Tensor]
) -> None:
    answers, recorder = evicted
    for index, budget in enumerate(sorted(map(int, answers))):
        decoder, logits = prefilled[0].fork(), prefilled[1]
        policy = SlowPolicy("h2o", budget, LONG)
        decoder.cut(policy, prompt_done=True)
        tokens, kept = slow_decode(decoder, logits, policy, steps=200)
        assert answers[str(budget)].token_ids == tokens
        assert recorder.kept[SeqId(index)][1:] == kept


def test_h2o_holds_no_more_blocks_than_its_budget_needs_and_its_receipt_agrees(
    evicted: tuple[dict[str, Answer], Recorder],
) -> None:
    answers, recorder = evicted
    for index, budget in enumerate(sorted(map(int, answers))):
        rows = [row.step for plan in recorder.plans for row in plan.rows if row.seq_id == index]
        assert max(len(step.block_table) for step in rows if step.start >= LONG) == -(-(budget + 1) // 16)
        receipt = answers[str(budget)].receipt
        assert receipt is not None
        assert {len(head) for layer in recorder.kept[SeqId(index)][-1] for head in layer} == {receipt.kv_tokens_held}
        assert (receipt.kv_tokens_held, receipt.kv_tokens_evicted) == (budget, LONG + 200 - budget)


def test_sinks_survive_on_the_real_model(evicted: tuple[dict[str, Answer], Recorder]) -> None:
    _, recorder = evicted
    heads = [head for layer in recorder.kept[SeqId(0)][-1] for head in layer]
    assert sum(0 in head for head in heads) > 0.9 * len(heads)
