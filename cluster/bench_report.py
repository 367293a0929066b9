"""What a person sees of a benchmark: a bar while it runs, a table when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvorum.cluster.bench_summary import RequestResult, Slo, Spread, Summary, summarize, summarize_by_tenant

_LATENCIES = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("mean ITL of a request", "mean_itl_ms"), ("E2E", "e2e_ms"))


class BenchProgress:
    """A bar on a terminal, nothing elsewhere; on standard error, so that output can be piped."""

    def __init__(self, num_requests: int) -> None:
        """Expect so many results."""
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,  # drawing takes time from the server beside it
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("requests", total=num_requests)
        self._tokens = 0
        self._failed = 0

    def __enter__(self) -> Self:
        """Start drawing."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop drawing and leave no trace."""
        self._progress.stop()

    def show(self, result: RequestResult) -> None:
        """Count one more request."""
        self._tokens += result.output_tokens
        self._failed += result.error is not None
        failed = f", {self._failed} failed" if self._failed else ""
        self._progress.update(self._task, advance=1, description=f"requests ({self._tokens} tokens out{failed})")


def print_report(results: Sequence[RequestResult], slo: Slo, *, console: Console, title: str) -> None:
    """Print rates, latencies and, when there are several, each tenant's."""
    summary = summarize(results, slo)
    console.print(_rates(summary, slo, title))
    console.print(_latencies(summary))
    tenants = summarize_by_tenant(results, slo)
    if len(tenants) > 1:
        console.print(_tenants(tenants))
    for error, count in summary.errors.items():
        console.print(f"{count} failed: {error}", style="red", markup=False)


def _rates(summary: Summary, slo: Slo, title: str) -> Table:
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    counted = "" if summary.tokens_are_counted else " (pieces: the server counts no tokens)"
    short = f" of {summary.asked_tokens} asked for" if summary.output_tokens != summary.asked_tokens else ""
    rows = {
        "requests completed": f"{summary.completed} of {summary.requests} in {summary.duration_s:.1f} s",
        "prompt tokens": f"{summary.prompt_tokens} ({summary.cached_tokens} cached)",
        f"output tokens{counted}": f"{summary.output_tokens}{short}",
        "output tokens/s": f"{summary.output_tokens_per_s:.1f}",
        "all tokens/s": f"{summary.total_tokens_per_s:.1f}",
        "requests/s": f"{summary.requests_per_s:.2f}",
    }
    if slo != Slo():
        rows["within the SLO"] = f"{summary.good_requests} of {summary.requests}"
        rows["goodput, requests/s"] = f"{summary.goodput_requests_per_s:.2f}"
        rows["goodput, output tokens/s"] = f"{summary.goodput_output_tokens_per_s:.1f}"
    if cache := summary.cache:
        rows["retained mass, mean (lowest)"] = f"{cache.retained_mass_mean:.3f} ({cache.retained_mass_min:.3f})"
        rows["KV tokens held (mean), evicted (sum)"] = f"{cache.kv_tokens_held_mean:.0f}, {cache.kv_tokens_evicted}"
        rows["preemptions"] = str(cache.preemptions)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _latencies(summary: Summary) -> Table:
    table = Table()
    table.add_column("ms")
    for heading in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    for name, field in _LATENCIES:
        spread: Spread | None = getattr(summary, field)
        if spread:
            values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
            table.add_row(name, *(f"{value:.1f}" for value in values))
    return table


def _tenants(tenants: dict[str, Summary]) -> Table:
    table = Table()
    for heading in ("tenant", "done", "out/s", "good", "TTFT p50", "TTFT p99", "E2E p50", "E2E p99"):
        table.add_column(heading, justify="left" if heading == "tenant" else "right")
    for name, summary in tenants.items():
        latencies = [
            "-" if spread is None else f"{value:.1f}"
            for spread in (summary.ttft_ms, summary.e2e_ms)
            for value in ((spread.p50, spread.p99) if spread else (0.0, 0.0))
        ]
        done, good = f"{summary.completed} of {summary.requests}", str(summary.good_requests)
        table.add_row(name, done, f"{summary.output_tokens_per_s:.1f}", good, *latencies)
    return table
