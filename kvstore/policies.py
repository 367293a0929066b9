"""Eviction policies: what each one protects, how it scores, and what survives a cut.

A policy is a row of numbers that the kernels understand (kernels/plan.py, EvictionRule). Adding one is an entry in
POLICIES. A name may carry options: `h2o_avg:recent=0.1,sinks=8,decay=0.99`.

 h2o       Heavy-Hitter Oracle (Zhang et al. 2023, algorithm 1): accumulated attention, half of the budget recent.
           Scores are per KV head (summed over the group), and prompt queries count, as in the authors' code.
 h2o_avg   the same mass divided by the token's lifetime, which takes the advantage of age away; a quarter of the budget
           recent and the first four tokens pinned, since averages do not keep them. The recommended one.
 snap_h2o  what survives the prompt is chosen by the attention of its last 32 queries, max-pooled over 5 neighbours
           (SnapKV, Li et al. 2024, section 4); from there on as h2o.
 sliding   the newest tokens only.
 sinks     the first four and the newest (StreamingLLM, Xiao et al. 2023), positions kept as they were.
 full      never evicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvorum.kernels.plan import EvictionRule
from kvorum.kvstore.errors import InvalidRequestError
from kvorum.kvstore.types import blocks_for

MIN_BUDGET_TOKENS = 16
MAX_SINK_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy's numbers.

    evicts: False for `full` alone. recent_share: part of the budget that the newest tokens have for themselves.
    observe_last: prompt queries before the last this many do not count; None counts all. pool_width: neighbours pooled
    (odd) when the prompt is cut. The other fields are EvictionRule's.
    """

    name: str
    evicts: bool = True
    recent_share: float = 0.5
    sink_tokens: int = 0
    by_age: bool = False
    per_lifetime: bool = False
    decay: float = 1.0
    observe_last: int | None = None
    pool_width: int = 1

    def rule(self, budget_tokens: int | None, *, prompt_tokens: int) -> EvictionRule:
        """Return the numbers that kernels evaluate for a sequence held to a budget (None: not held yet)."""
        budget = budget_tokens if budget_tokens is not None else MIN_BUDGET_TOKENS
        return EvictionRule(
            recent_tokens=min(int(self.recent_share * budget), budget - self.sink_tokens - 1),
            sink_tokens=self.sink_tokens,
            by_age=self.by_age,
            per_lifetime=self.per_lifetime,
            decay=self.decay,
            observe_from=0 if self.observe_last is None else max(0, prompt_tokens - self.observe_last),
        )


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("full", evicts=False),
        Policy("h2o"),
        Policy("h2o_avg", recent_share=0.25, sink_tokens=4, per_lifetime=True),
        Policy("snap_h2o", observe_last=32, pool_width=5),
        Policy("sliding", recent_share=0.0, by_age=True),
        Policy("sinks", recent_share=0.0, sink_tokens=4, by_age=True),
    )
}


def policy_names() -> tuple[str, ...]:
    """Return the registry's names."""
    return tuple(POLICIES)


def parse_policy(text: str) -> Policy:
    """Look a policy up and apply its options.

    Args:
        text: `name` or `name:option=number,...` with the options recent (share of the budget, 0..1), sinks (tokens,
            0..8) and decay (0.9..1, per query).

    Raises:
        InvalidRequestError: naming `kvorum.policy`.
    """
    name, _, options = text.partition(":")
    if name not in POLICIES:
        raise _bad_policy(f"unknown policy {name!r}, expected one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    for option in filter(None, options.split(",")):
        policy = _with_option(policy, option)
    return policy


def _with_option(policy: Policy, option: str) -> Policy:
    key, _, text = option.partition("=")
    try:
        number = float(text)
    except ValueError:
        raise _bad_policy(f"option {option!r} of policy {policy.name!r} is not key=number") from None
    if policy.by_age or not policy.evicts:
        raise _bad_policy(f"policy {policy.name!r} takes no options, got {option!r}")
    if key == "recent" and 0.0 <= number <= 1.0:
        return replace(policy, recent_share=number)
    if key == "sinks" and number in range(MAX_SINK_TOKENS + 1):
        return replace(policy, sink_tokens=int(number))
    if key == "decay" and 0.9 <= number <= 1.0:
        return replace(policy, decay=number)
    raise _bad_policy(f"option {option!r}: expected recent=0..1, sinks=0..{MAX_SINK_TOKENS} or decay=0.9..1")


def _bad_policy(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="kvorum.policy")


def resolve_budget(policy: Policy, kv_budget: int | float | None, *, context_tokens: int) -> int | None:
    """Turn a requested budget into tokens per KV head.

    Args:
        policy: whom it is for; `full` takes no budget.
        kv_budget: an int is a count of tokens, a float in (0, 1] a fraction of context_tokens; None is no limit.
        context_tokens: prompt plus max_tokens of the request.

    Raises:
        InvalidRequestError: naming `kvorum.kv_budget`.
    """
    if kv_budget is None:
        return None
    if not policy.evicts:
        raise InvalidRequestError("kv_budget needs a policy that evicts, not 'full'", param="kvorum.kv_budget")
    if isinstance(kv_budget, float):
        if not 0.0 < kv_budget <= 1.0:
            raise InvalidRequestError(
                f"kv_budget as a fraction must be in (0, 1], got {kv_budget}", param="kvorum.kv_budget"
            )
        return max(MIN_BUDGET_TOKENS, int(kv_budget * context_tokens))
    if kv_budget < MIN_BUDGET_TOKENS:
        raise InvalidRequestError(
            f"kv_budget must be at least {MIN_BUDGET_TOKENS} tokens, got {kv_budget}", param="kvorum.kv_budget"
        )
    return kv_budget


def smallest_footprint(
    budget_tokens: int | None, *, context_tokens: int, min_retained_mass: float, block_size: int
) -> int:
    """Return the blocks that a request needs even alone in an empty pool.

    A sequence with a budget can do with budget + one block of prompt at a time, unless a quality floor forbids to
    evict before the whole prompt has been seen.
    """
    whole = blocks_for(context_tokens, block_size)
    if budget_tokens is None or min_retained_mass > 0.0:
        return whole
    return min(whole, blocks_for(budget_tokens + block_size, block_size))
