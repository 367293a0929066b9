"""Attention of one sequence over its gathered slots, scores and ranking: what the fast kernels must equal.

Shapes: group_size query heads share a KV head. n is the number of slots, t the number of queries.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kvorum.kernels.plan import EvictionRule

KEY_TILE = 256


def visible(key_positions: torch.Tensor, query_positions: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Say which slots each query sees.

    Args:
        key_positions: [num_kv_heads, n] position of each slot's token.
        query_positions: [t].
        sliding_window: a query at p sees positions > p - sliding_window; None is no limit.

    Returns:
        [num_kv_heads, t, n] bool.
    """
    keys, queries = key_positions[:, None, :], query_positions[None, :, None]
    seen = keys <= queries
    return seen if sliding_window is None else seen & (keys > queries - sliding_window)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend, softmax in float32 or wider.

    Args:
        queries: [num_kv_heads, group_size, t, head_dim], scaled.
        keys, values: [num_kv_heads, n, head_dim].
        seen: [num_kv_heads, t, n] bool.

    Returns:
        output [num_kv_heads, group_size, t, head_dim], log-sum-exp [num_kv_heads, group_size, t] and the probabilities
        [num_kv_heads, group_size, t, n].
    """
    logits = masked_logits(queries, keys, seen)
    highest = logits.amax(dim=-1, keepdim=True)
    probabilities = (logits - highest).exp()
    total = probabilities.sum(dim=-1, keepdim=True)
    probabilities = probabilities / total
    lse = (highest + total.log())[..., 0]
    output = (probabilities.to(values.dtype).flatten(1, 2) @ values).view(queries.shape)
    return output, lse, probabilities


def column_sums(
    queries: torch.Tensor, keys: torch.Tensor, lse: torch.Tensor, seen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Sum the attention that each slot received, by a second pass with the log-sum-exp of the first.

    The matrix of probabilities is never whole: the pass walks over tiles of keys.

    Args:
        queries: [num_kv_heads, group_size, t, head_dim], scaled.
        keys: [num_kv_heads, n, head_dim].
        lse: [num_kv_heads, group_size, t].
        seen: [num_kv_heads, t, n] bool.
        weights: [t], the weight of each query.

    Returns:
        [num_kv_heads, n] in float32 or wider.
    """
    sums = []
    for key_tile, seen_tile in zip(torch.split(keys, KEY_TILE, dim=1), torch.split(seen, KEY_TILE, dim=2), strict=True):
        sees_any = seen_tile.any(dim=0).any(dim=-1)
        first = int(sees_any.int().argmax())  # queries before the first that sees a key of this tile add nothing
        logits = masked_logits(queries[:, :, first:], key_tile, seen_tile[:, first:])
        probabilities = (logits - lse[:, :, first:, None]).exp()
        sums.append((probabilities.sum(dim=1) * weights[first:, None]).sum(dim=1))
    return torch.cat(sums, dim=-1)


def masked_logits(queries: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return q.k with -inf where a query does not see a slot: [num_kv_heads, group_size, t, n]."""
    products = (queries.flatten(1, 2) @ keys.transpose(1, 2)).view(*queries.shape[:3], -1)
    wide = products.to(torch.promote_types(products.dtype, torch.float32))
    return wide.masked_fill(~seen[:, None], -torch.inf)


def lifetime(rule: EvictionRule, positions: torch.Tensor, newest: int) -> torch.Tensor:
    """Return the mass that a token would have received had every query given it all: the sum of query weights."""
    observed = (newest + 1 - positions.clamp(min=rule.observe_from)).clamp(min=1).double()
    if rule.decay == 1.0:
        return observed
    return (1.0 - rule.decay**observed) / (1.0 - rule.decay)


def values_of(rule: EvictionRule, scores: torch.Tensor, positions: torch.Tensor, newest: int) -> torch.Tensor:
    """Return each slot's worth under the rule, protection aside; same shape as scores, float64.

    float64, so that dividing by the lifetime makes no two different scores equal.
    """
    if rule.by_age:
        return torch.zeros_like(scores, dtype=torch.float64)
    if rule.per_lifetime:
        return scores.double() / lifetime(rule, positions, newest)
    return scores.double()


def rank_order(
    rule: EvictionRule, values: torch.Tensor, positions: torch.Tensor, alive: torch.Tensor, *, newest: int
) -> torch.Tensor:
    """Sort slots from the first to go to the last, by (alive, protected, value, position).

    Args:
        values, positions, alive: [..., n].

    Returns:
        slot indices [..., n] int64; the order among equals is by position, never by slot.
    """
    protected = (positions < rule.sink_tokens) | (positions > newest - rule.recent_tokens)
    order = positions.argsort(dim=-1, stable=True)
    for key in (values, protected.to(torch.uint8), alive.to(torch.uint8)):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order


def values_at_risk(rule: EvictionRule, scores: torch.Tensor, positions: torch.Tensor, *, newest: int) -> torch.Tensor:
    """Return each slot's worth, infinite for what the rule protects; same shape as scores, float64."""
    protected = (positions < rule.sink_tokens) | (positions > newest - rule.recent_tokens)
    return values_of(rule, scores, positions, newest).masked_fill(protected, torch.inf)


def choose_victims(rule: EvictionRule, scores: torch.Tensor, positions: torch.Tensor, *, newest: int) -> torch.Tensor:
    """Return the slot that goes first in each row of [num_rows, n]: [num_rows] int64."""
    values = values_at_risk(rule, scores, positions, newest=newest)
    lowest = values == values.min(dim=-1, keepdim=True).values
    return positions.masked_fill(~lowest, torch.iinfo(positions.dtype).max).argmin(dim=-1)


def pool_values(values: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Give each slot the largest value within `width` neighbours in position order; [..., n] each."""
    if width == 1:
        return values
    order = positions.argsort(dim=-1)
    ordered = values.gather(-1, order)
    pooled = functional.max_pool1d(ordered.flatten(0, -2), width, stride=1, padding=width // 2).view_as(ordered)
    return torch.empty_like(values).scatter_(-1, order, pooled)
