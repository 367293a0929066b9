"""What ranks must measure before the next step can be decided, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvorum.kvstore.policies import Policy
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.types import SeqId
from kvorum.workers.bidding import can_be_shrunk
from kvorum.workers.plan import BudgetQuery, CurveQuery
from kvorum.workers.sequence import Sequence

# A sequence's retention curve is measured anew when it has grown by so many tokens.
CURVE_PERIOD_TOKENS = 16


def budget_queries(running: Iterable[Sequence]) -> dict[SeqId, BudgetQuery]:
    """Return the cuts whose budget depends on a floor of retained mass: at a prompt's end, or for others."""
    queries = {}
    for sequence in running:
        kv = sequence.kv
        assert kv is not None, "a running sequence has its KV"
        if sequence.wanted_budget is not None:
            unpooled = replace(sequence.policy, pool_width=1)
            queries[sequence.seq_id] = _budget_query(sequence, kv, unpooled, budget=sequence.wanted_budget)
        elif sequence.prompt_done and sequence.keeps_floor and kv.over_budget and kv.budget is not None:
            queries[sequence.seq_id] = _budget_query(sequence, kv, sequence.policy, budget=kv.budget)
    return queries


def _budget_query(sequence: Sequence, kv: SequenceKV, policy: Policy, *, budget: int) -> BudgetQuery:
    return BudgetQuery(
        residence=kv.residence,
        policy=policy,
        floor=sequence.request.kv.min_retained_mass,
        budget=budget,
        prompt_tokens=sequence.num_prompt,
        num_tokens=kv.num_tokens,
    )


def set_budgets(running: Iterable[Sequence], budgets: Mapping[SeqId, int]) -> None:
    """Take the answers to `budget_queries`."""
    for sequence in running:
        if sequence.seq_id not in budgets:
            continue
        assert sequence.kv is not None, "a running sequence has its KV"
        if sequence.wanted_budget is not None:
            sequence.granted_budget = budgets[sequence.seq_id]
        else:
            sequence.kv.budget = budgets[sequence.seq_id]


def curve_queries(running: Iterable[Sequence], *, block_size: int) -> dict[SeqId, CurveQuery]:
    """Return whose retention curves are unknown or old, of the elastic sequences."""
    queries = {}
    for sequence in filter(can_be_shrunk, running):
        kv = sequence.kv
        assert kv is not None, "a running sequence has its KV"
        is_old = not sequence.curve or kv.num_tokens - sequence.curve_tokens >= CURVE_PERIOD_TOKENS
        if is_old and kv.rule is not None:
            queries[sequence.seq_id] = CurveQuery(kv.residence, kv.rule, kv.num_tokens, block_size)
    return queries


def set_curves(running: Iterable[Sequence], curves: Mapping[SeqId, tuple[float, ...]]) -> None:
    """Take the answers to `curve_queries`."""
    for sequence in running:
        if sequence.seq_id in curves:
            assert sequence.kv is not None, "a running sequence has its KV"
            sequence.curve = curves[sequence.seq_id]
            sequence.curve_tokens = sequence.kv.num_tokens
