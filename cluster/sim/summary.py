"""What a simulation says, in numbers. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvorum.cluster.sim.simulator import Outcomes, Setup


@dataclass(frozen=True, slots=True)
class Summary:
    """One mode's numbers.

    goodput: requests a second that had their first token within the SLO, and were neither refused nor below
    least_mass. fairness: Jain's index over tenants of the share of their requests that were good. blocks_mean: held, of
    the whole cluster's. retained_mass: of elastic requests that were done.
    """

    mode: str
    requests: int
    done: int
    refused: int
    goodput_per_s: float
    good_share: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    fairness: float
    blocks_mean: float
    preemptions: int
    shrinks: int
    evicted_tokens: int
    retained_mass_mean: float
    retained_mass_min: float


def summarise(outcomes: Outcomes, setup: Setup, *, ttft_slo_s: float, least_mass: float) -> Summary:
    """Add a simulation up."""
    done = [sequence for sequence in outcomes.sequences if sequence.done_s is not None]
    ttfts = sorted((each.first_token_s or 0.0) - each.arrived_s for each in done)
    good: dict[str, list[bool]] = defaultdict(list)
    for each in outcomes.sequences:
        in_time = each.first_token_s is not None and each.first_token_s - each.arrived_s <= ttft_slo_s
        good[each.tenant].append(in_time and not each.is_refused and each.retained_mass >= least_mass)
    num_good = sum(map(sum, good.values()))
    masses = [each.retained_mass for each in done if each.least is not None] or [1.0]
    capacity = setup.num_engines * setup.spec.num_blocks * max(outcomes.duration_s, 1e-9)
    return Summary(
        mode=outcomes.mode.value,
        requests=len(outcomes.sequences),
        done=len(done),
        refused=sum(outcomes.refusals.values()),
        goodput_per_s=num_good / max(outcomes.duration_s, 1e-9),
        good_share=num_good / len(outcomes.sequences),
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p90_s=percentile(ttfts, 0.9),
        ttft_p99_s=percentile(ttfts, 0.99),
        fairness=jain([statistics.mean(each) for each in good.values()]),
        blocks_mean=sum(engine.counts.block_seconds for engine in outcomes.engines) / capacity,
        preemptions=sum(engine.counts.preemptions for engine in outcomes.engines),
        shrinks=sum(engine.counts.shrinks for engine in outcomes.engines),
        evicted_tokens=int(sum(each.evicted_tokens for each in done)),
        retained_mass_mean=statistics.mean(masses),
        retained_mass_min=min(masses),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a share of ordered values lies; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
