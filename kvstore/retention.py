"""Retained mass: how much of the attention that a sequence gave out went to tokens that are still kept.

Each query spreads a mass of 1 per query head over what it sees, so a model gives out, for each token, as much as the
query's weight times its layers and query heads. Ranks each know what their own heads kept; sums over ranks are for
`add_up`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvorum.kernels.backend import SlotView
from kvorum.kernels.plan import EvictionRule
from kvorum.kernels.reference.attention import lifetime, pool_values, rank_order, values_of
from kvorum.kernels.spec import DecoderSpec
from kvorum.kvstore.policies import Policy


def mass_given(rule: EvictionRule, spec: DecoderSpec, *, num_tokens: int) -> float:
    """Return the mass that the first num_tokens queries of a sequence gave out in all layers and heads of a model."""
    one_head = float(lifetime(rule, torch.zeros(1, dtype=torch.int64), num_tokens - 1)[0])
    return spec.num_layers * spec.num_heads * one_head


def kept_mass(view: SlotView) -> float:
    """Return the mass that the living tokens received, summed over the layers and heads in view."""
    return float((view.scores.double() * view.alive).sum())


def kept_mass_curve(view: SlotView, *, block_size: int) -> torch.Tensor:
    """Return kept_mass were the sequence cut to 0, 1, 2 ... blocks by score alone: [num_blocks + 1] float64.

    Concave and rising, since each (layer, KV head) adds its largest scores first.
    """
    scores = (view.scores.double() * view.alive).sort(dim=-1, descending=True).values
    sums = torch.nn.functional.pad(scores.cumsum(dim=-1).sum(dim=(0, 1)), (1, 0))
    cuts = torch.arange(0, sums.shape[0] + block_size - 1, block_size).clamp(max=sums.shape[0] - 1)
    return sums[cuts]


def smallest_budget(
    view: SlotView,
    policy: Policy,
    *,
    floor: float,
    budget: int,
    prompt_tokens: int,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> int:
    """Return the smallest budget >= `budget` whose cut at the prompt's end keeps a mass of at least `floor`.

    Cuts protect recent tokens and sinks, so they keep less than the retention curve says. Searched by bisection; the
    number of alive slots, which keeps everything, is always an answer.
    """
    num_alive = int(view.alive[0, 0].sum())
    newest = int(view.positions.max())

    def keeps_enough(keep: int) -> bool:
        rule = policy.rule(keep, prompt_tokens=prompt_tokens)
        values = pool_values(values_of(rule, view.scores, view.positions, newest), view.positions, policy.pool_width)
        kept = rank_order(rule, values, view.positions, view.alive, newest=newest)[..., -keep:]
        return float(add_up(view.scores.double().gather(-1, kept).sum())) >= floor

    low, high = min(budget, num_alive), num_alive
    while low < high:
        middle = (low + high) // 2
        if keeps_enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
