"""`kvorum eval` measures what the slow decoder would."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch

from kvorum.kernels.spec import Shard
from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.checkpoint.weights import iter_weights
from kvorum.workers.config import EngineConfig
from kvorum.workers.evaluate import Window, cut_windows, evaluate
from kvorum.workers.request import KVParams
from kvtest.checkpoints import tiny_checkpoint
from kvtest.embedded import embedded_checkpoint
from kvtest.prose import prose
from kvtest.slow_decoder import SlowDecoder, SlowPolicy


def teacher_forced(decoder: SlowDecoder, window: Window, policy: SlowPolicy | None) -> torch.Tensor:
    """Return log-probabilities of every prediction after the first."""
    decoder.run(list(window.prompt), policy, evict=False)
    if policy is not None:
        decoder.cut(policy, prompt_done=True)
    rows = [decoder.run([token], policy, evict=True) for token in window.continuation[:-1]]
    return torch.cat(rows).log_softmax(dim=-1)


@pytest.mark.parametrize("policy", ["h2o", "h2o_avg", "snap_h2o", "sliding", "sinks"])
def test_costs_equal_the_slow_decoders(policy: str, tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path, num_heads=6, num_kv_heads=3)
    checkpoint = resolve(str(tmp_path))
    tokens = torch.randint(0, checkpoint.spec.vocab_size, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    windows = cut_windows(tokens, prompt_tokens=28, num_tokens=12, windows=2)
    config = EngineConfig(model=str(tmp_path), model_name="tiny", dtype="float64", kv_cache_memory_bytes=2**22)
    full, cost = asyncio.run(evaluate(config, windows, [KVParams(policy, 16)]))

    weights = dict(iter_weights(checkpoint, Shard.whole(checkpoint.spec), dtype=torch.float64))
    logprobs = [
        torch.cat(
            [
                teacher_forced(
                    SlowDecoder(checkpoint.spec, weights), window, SlowPolicy(policy, 16, 28) if evicting else None
                )
                for window in windows
            ]
        )
        for evicting in (False, True)
    ]
    targets = torch.tensor([token for window in windows for token in window.continuation[1:]])
    rows = torch.arange(len(targets))
    for measured, expected in zip((full, cost), logprobs, strict=True):
        assert measured.perplexity == pytest.approx(math.exp(-float(expected[rows, targets].mean())), rel=1e-6)
    kl = (logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(dim=-1).mean()
    assert cost.kl == pytest.approx(float(kl), rel=1e-6)
    assert cost.agreement == pytest.approx(float((logprobs[0].argmax(-1) == logprobs[1].argmax(-1)).double().mean()))
    assert full.kl == 0.0
    assert cost.predictions == 22


def test_windows_are_disjoint_and_as_many_as_the_text_has() -> None:
    windows = cut_windows(range(25), prompt_tokens=6, num_tokens=4, windows=5)
    assert windows == [Window(tuple(range(6)), tuple(range(6, 10))), Window(tuple(range(10, 16)), tuple(range(16, 20)))]
    assert cut_windows(range(9), prompt_tokens=6, num_tokens=4, windows=1) == []


@pytest.mark.model
def test_on_prose_the_policies_rank_as_measured_before() -> None:
    tokens = embedded_checkpoint().load_tokenizer().encode(prose()[:30_000])
    windows = cut_windows(tokens, prompt_tokens=512, num_tokens=64, windows=1)
    cases = [KVParams(policy, 64) for policy in ("h2o", "h2o_avg", "sinks", "sliding")]
    config = EngineConfig(model="smollm2-135m", model_name="smollm2-135m", kv_cache_memory_bytes=2**29)
    _, h2o, h2o_avg, sinks, sliding = asyncio.run(evaluate(config, windows, cases))
    assert h2o_avg.kl < h2o.kl < sinks.kl
    assert sliding.kl > 3 * h2o.kl
