"""Every family of models, from its files through the engine, against transformers: greedy tokens and logits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvorum.kernels.backend import Backend, StepT
from kvorum.kernels.cpu.backend import CpuBackend
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.spec import Shard
from kvorum.kvstore.types import SeqId
from kvorum.workers.backends import load_backend
from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.checkpoint.weights import iter_weights
from kvorum.workers.config import EngineConfig
from kvorum.workers.request import KVParams
from kvtest.checkpoints import ATTENTIONS, FAMILIES, tiny_checkpoint, tiny_gguf
from kvtest.engines import PoisonT, request, rig

MAX_TOKENS = 12
# Shorter than, longer than and many times the sliding window of 5; below and beyond a block and a tile of queries.
PROMPT_LENGTHS = (3, 9, 17, 41)
TIE = 1e-3
LOGIT_TOLERANCE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Work this small takes several times longer when threads have to wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


@dataclass(frozen=True)
class Generated:
    """A greedy answer and the logits [num_tokens, vocab] that it was chosen from."""

    prompt: list[int]
    token_ids: list[int]
    logits: torch.Tensor


def load_cpu(path: Path) -> CpuBackend:
    config = EngineConfig(model=str(path), model_name="tiny", device="cpu", backend="cpu", dtype="float32")
    checkpoint = resolve(str(path))
    backend = load_backend(config, checkpoint, Shard.whole(checkpoint.spec))
    assert isinstance(backend, CpuBackend)
    return backend


def load(path: Path) -> ReferenceBackend:
    checkpoint = resolve(str(path))
    shard = Shard.whole(checkpoint.spec)
    backend = ReferenceBackend(checkpoint.spec, shard, dtype=torch.float32, device=torch.device("cpu"))
    backend.load(iter_weights(checkpoint, shard, dtype=torch.float32))
    return backend


def generate(backend: Backend[PoisonT, StepT], kv: KVParams) -> list[Generated]:
    """Answer all prompts in one batch."""
    items = [request(str(index), prompt, max_tokens=MAX_TOKENS, kv=kv) for index, prompt in enumerate(prompts())]

    async def go() -> list[Generated]:
        async with rig(backend, num_blocks=32, note_kept=False) as it:
            answers = await it.run(items)
            assert {len(plan.rows) for plan in it.recorder.plans} == {len(items)}
            return [
                Generated(
                    prompt=list(item.prompt_token_ids),
                    token_ids=answers[item.request_id].token_ids,
                    logits=torch.stack(it.recorder.logits[SeqId(index)]),
                )
                for index, item in enumerate(items)
            ]

    return asyncio.run(go())


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, generated: Generated) -> torch.Tensor:
    """Return what transformers computes from the prompt and the answer so far, before each token of the answer."""
    call: Any = model
    logits = call(torch.tensor([generated.prompt + generated.token_ids[:-1]]), use_cache=False).logits[0]
    last: torch.Tensor = logits[len(generated.prompt) - 1 :]
    return last


def assert_greedy(generated: Generated, expected: torch.Tensor) -> None:
    """Each token is the most likely after those before it, so the whole answer is the greedy one."""
    chosen = expected.gather(1, torch.tensor(generated.token_ids)[:, None])[:, 0]
    assert len(generated.token_ids) == MAX_TOKENS
    assert bool((expected.amax(dim=1) - chosen < TIE).all())
    torch.testing.assert_close(generated.logits, expected, rtol=LOGIT_TOLERANCE, atol=LOGIT_TOLERANCE)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_answers_as_transformers_does(tmp_path: Path, family: str, attention: str) -> None:
    num_heads, num_kv_heads = ATTENTIONS[attention]
    model = tiny_checkpoint(family, tmp_path, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for generated in generate(load(tmp_path), KVParams()) + generate(load_cpu(tmp_path), KVParams()):
        assert_greedy(generated, transformers_logits(model, generated))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_answers_as_transformers_does(tmp_path: Path, family: str, attention: str) -> None:
    num_heads, num_kv_heads = ATTENTIONS[attention]
    path = tmp_path / "tiny.gguf"
    model = tiny_gguf(path, family, num_heads=num_heads, num_kv_heads=num_kv_heads)
    for generated in generate(load(path), KVParams()) + generate(load_cpu(path), KVParams()):
        assert_greedy(generated, transformers_logits(model, generated))


@pytest.mark.parametrize("policy", ["h2o", "h2o_avg", "snap_h2o"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_beyond_the_context_changes_no_bit(tmp_path: Path, family: str, policy: str) -> None:
    tiny_checkpoint(family, tmp_path, num_heads=6, num_kv_heads=3)
    backend = load(tmp_path)
    budget = max(PROMPT_LENGTHS) + MAX_TOKENS
    for full, held in zip(generate(backend, KVParams()), generate(backend, KVParams(policy, budget)), strict=True):
        assert held.token_ids == full.token_ids
        assert torch.equal(held.logits, full.logits)


def test_the_window_of_a_local_layer_matters(tmp_path: Path) -> None:
    """If it did not, the comparisons above would say nothing about it."""
    windowed = tiny_checkpoint("mistral", tmp_path, num_heads=4, num_kv_heads=1)
    (_, _, _, longest) = generate(load(tmp_path), KVParams())
    open_path = tmp_path / "open"
    unlimited = tiny_checkpoint("mistral", open_path, num_heads=4, num_kv_heads=1, sliding_window=None)
    difference = transformers_logits(windowed, longest) - transformers_logits(unlimited, longest)
    assert float(difference.abs().max()) > 100 * LOGIT_TOLERANCE
