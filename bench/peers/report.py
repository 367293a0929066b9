"""What a person sees of a comparison: a table for each workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peers import Command
from ratios import Measurement, median_of, ratio_of
from rich.console import Console
from rich.table import Table
from workloads import WORKLOADS

OURS = "kvorum"
_COLUMNS = (
    ("out tok/s", "output_tokens_per_s"),
    ("TTFT p50", "ttft_ms.p50"),
    ("p99 ms", "ttft_ms.p99"),
    ("ITL p50", "itl_ms.p50"),
    ("p99 ms", "itl_ms.p99"),
)
_GOODPUT = (("good", "good_requests"), ("good req/s", "goodput_requests_per_s"))


def print_workload(
    measurements: Sequence[Measurement], workload: str, commands: Mapping[str, Command], *, console: Console
) -> None:
    """Print one row for each peer: medians, and the ratio of kvorum's output tokens per second to the peer's."""
    columns = _COLUMNS + (_GOODPUT if WORKLOADS[workload].pool_tokens else ())
    table = Table(title=f"{workload}: {WORKLOADS[workload].title}")
    for heading in ("peer", "weights, KV", *(heading for heading, _ in columns), f"{OURS} is", "disturbed"):
        table.add_column(heading, justify="left" if heading in ("peer", "weights, KV") else "right")
    for peer, command in commands.items():
        medians = [median_of(measurements, workload, field, peer=peer) for _, field in columns]
        values = ["-" if value is None else f"{value:.1f}" for value in medians]
        kinds = f"{command.weights}, {command.kv_cache}"
        table.add_row(
            peer, kinds, *values, _ratio(measurements, workload, peer), _disturbance(measurements, workload, peer)
        )
    console.print(table)
    for each in measurements:
        if each.workload == workload and each.error:
            console.print(f"round {each.round}, {each.peer}: {each.error}", markup=False, style="red")


def print_quality(cases: Sequence[Mapping[str, Any]], *, console: Console) -> None:
    """Print what each policy costs at w5's budget."""
    table = Table(title="w5: what the budget costs, on prose")
    for heading in ("policy", "budget", "perplexity", "KL", "top-1 agreement", "mass kept"):
        table.add_column(heading)
    for case in cases:
        kv = case["kv"]
        budget = "-" if kv["kv_budget"] is None else str(kv["kv_budget"])
        shown = (f"{case['perplexity']:.2f}", f"{case['kl']:.4f}", f"{100 * case['agreement']:.1f} %")
        table.add_row(kv["policy"], budget, *shown, f"{case['retained_mass']:.3f}")
    console.print(table)


def _ratio(measurements: Sequence[Measurement], workload: str, peer: str) -> str:
    ratio = None if peer == OURS else ratio_of(measurements, workload, "output_tokens_per_s", first=OURS, second=peer)
    return f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else "-"


def _disturbance(measurements: Sequence[Measurement], workload: str, peer: str) -> str:
    """Return the most cores that others had during a measurement, and the longest that the client was held up."""
    found = [each for each in measurements if (each.workload, each.peer) == (workload, peer) and each.summary]
    if not found:
        return "-"
    return f"{max(each.foreign_cores for each in found):.1f} cores, {max(each.paused_s for each in found):.0f} s"
