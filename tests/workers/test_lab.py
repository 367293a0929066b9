"""What the lab shows is counted from what happened."""

from __future__ import annotations

import pytest
import torch

from kvorum.kernels.spec import Shard
from kvorum.workers.lab import CountingBackend, compare_caching, watch_blocks, watch_evictions
from kvorum.workers.request import KVParams
from kvtest.models import random_weights, tiny_spec


@pytest.fixture
def backend() -> CountingBackend:
    spec = tiny_spec()
    backend = CountingBackend(spec, Shard.whole(spec), dtype=torch.float64, device=torch.device("cpu"))
    backend.load(random_weights(spec).items())
    return backend


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_with_the_cache_each_token_is_projected_once_and_without_all_are_each_time(
    backend: CountingBackend, num_tokens: int
) -> None:
    costs = compare_caching(backend, [3], num_tokens=num_tokens)
    assert sum(cost.projections_with_cache for cost in costs) == num_tokens
    assert sum(cost.projections_without for cost in costs) == num_tokens * (num_tokens + 1) // 2


def test_blocks_come_and_go_with_their_sequences(backend: CountingBackend) -> None:
    prompt = list(range(33))
    views = watch_blocks(backend, [("A", prompt, 3, KVParams()), ("B", prompt, 20, KVParams("h2o", 16))], num_blocks=12)
    held = [["".join(names) for names in view.holders if names] for view in views]
    assert held[0].count("A") == 3
    assert held[3].count("B") == 2  # cut to ceil(17 / 16) blocks once its prompt is done
    assert held[-1] == []
    assert len(views[-1].cached) == 2


def test_the_log_names_each_victim_and_what_is_left(backend: CountingBackend) -> None:
    prompt = list(range(40))
    log = watch_evictions(backend, prompt, max_tokens=10, kv=KVParams("h2o", 20), layer=1, head=1)
    gone = {*log.cut, *(event.victim_position for event in log.evictions)}
    assert len(log.cut) == 40 - 20
    assert [event.new_position for event in log.evictions] == list(range(40, 49))
    assert gone | set(log.kept) == set(range(49))
    assert not gone & set(log.kept)
    assert all(event.victim_score <= event.lowest_kept_score for event in log.evictions)
