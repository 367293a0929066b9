"""`kvorum bench` as people run it, against kvorum's own HTTP server on an engine whose answers are known."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvorum.cluster import cli
from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.http import create_app
from kvtest.servers import http_server
from kvtest.stack import running_stack

KEY = "k1"
SMALL = ("--num-requests", "6", "--prompt-tokens", "20", "--output-tokens", "5", "--vocab-size", "120")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the tiny model on a real port; its event loop runs beside the test's."""
    started, stop, addresses = threading.Event(), asyncio.Event(), list[str]()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with running_stack(ClusterConfig(api_key=KEY), step_delay_s=0.002) as stack:
            async with http_server(create_app(stack.frontend)) as address:
                addresses.append(address)
                started.set()
                await stop.wait()
            await stack.wait_until_idle()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(20)
    yield addresses[0]
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(20)
    assert not thread.is_alive()


def bench(*arguments: str) -> int:
    try:
        return cli.main(("bench", *arguments))
    except SystemExit as error:  # argparse
        return int(error.code or 0)


def measured(url: str, path: Path, *arguments: str) -> dict[str, Any]:
    assert bench("--base-url", url, "--json", str(path), *SMALL, *arguments) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_is_reported_as_table_and_json(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = measured(url, tmp_path / "r.json", "--api-key", KEY, "--concurrency", "3", "--slo-e2e-ms", "60000")
    summary = report["summary"]
    assert (summary["requests"], summary["completed"], summary["good_requests"]) == (6, 6, 6)
    assert (summary["prompt_tokens"], summary["output_tokens"], summary["asked_tokens"]) == (120, 30, 30)
    assert summary["tokens_are_counted"]
    assert summary["cache"]["retained_mass_min"] == 1.0
    assert len(report["requests"]) == 6
    assert all(len(request["text_ms"]) == 5 for request in report["requests"])
    out, err = capsys.readouterr()
    assert "tiny at http://127.0.0.1" in out
    assert "6 of 6 in" in out
    assert "within the SLO" in out
    assert "TTFT" in out
    assert err == ""
    assert KEY not in (tmp_path / "r.json").read_text()


def test_the_shared_prefix_is_found_in_the_cache(url: str, tmp_path: Path) -> None:
    flags = ("--api-key", KEY, "--shared-prefix-tokens", "64", "--seed", "5")
    report = measured(url, tmp_path / "r.json", *flags)
    assert [request["cached_tokens"] for request in report["requests"]] == [0] + [64] * 5


def test_kvorums_fields_are_sent_and_its_receipts_added_up(url: str, tmp_path: Path) -> None:
    flags = ("--policy", "h2o", "--kv-budget", "16", "--min-retained-mass", "0.1", "--prompt-tokens", "100")
    cache = measured(url, tmp_path / "r.json", "--api-key", KEY, *flags, "--seed", "6")["summary"]["cache"]
    assert cache["retained_mass_mean"] < 1
    assert cache["kv_tokens_evicted"] > 0


@pytest.mark.parametrize("form", ["text", "chat"])
def test_words_are_sent_as_well_as_ids(form: str, url: str, tmp_path: Path) -> None:
    summary = measured(url, tmp_path / "r.json", "--api-key", KEY, "--prompts", form)["summary"]
    assert summary["output_tokens"] == 30
    assert summary["prompt_tokens"] > 120  # the tiny model's tokens are bytes


def test_requests_arrive_as_a_poisson_process(url: str, tmp_path: Path) -> None:
    requests = measured(url, tmp_path / "r.json", "--api-key", KEY, "--request-rate", "50")["requests"]
    starts = sorted(request["start_ms"] for request in requests)
    assert len(set(starts)) == 6
    assert 0 < starts[-1] < 1000


def test_a_trace_is_replayed(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["timestamp,input_tokens,output_tokens", "0,30,3", "0.25,400,200", "0.3,9,4", "0.1,8,2"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    flags = ("--trace", str(tmp_path / "t.csv"), "--request-rate", "trace", "--max-total-tokens", "100")
    requests = measured(url, tmp_path / "r.json", "--api-key", KEY, *flags)["requests"]
    found = sorted((request["start_ms"], request["prompt_tokens"], request["output_tokens"]) for request in requests)
    assert found == [(0.0, 30, 3), (pytest.approx(100), 8, 2), (pytest.approx(300), 9, 4)]
    assert "the trace has 3 of 6 requests" in capsys.readouterr().err


def test_tenants_are_reported_one_by_one(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tenants", f"known={KEY}:3", "stranger=k2", "--model", "tiny", "--num-requests", "12")
    report = measured(url, tmp_path / "r.json", *flags)
    known, stranger = report["tenants"]["known"], report["tenants"]["stranger"]
    assert known["completed"] == known["requests"] > 0
    assert stranger["completed"] == 0
    assert sum(stranger["errors"].values()) == stranger["requests"] > 0
    assert report["settings"]["tenants"] == ["known", "stranger"]
    out = capsys.readouterr().out
    assert "stranger" in out
    assert "failed: 401: " in out


def test_a_terminal_gets_a_bar(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    measured(url, tmp_path / "r.json", "--api-key", KEY)
    assert "6/6" in capsys.readouterr().err


def test_a_key_that_does_not_fit_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--base-url", url, *SMALL) == cli.EXIT_FAILURE
    err = capsys.readouterr().err
    assert "/v1/models: 401: " in err
    assert err.count("\n") == 1


def test_when_nothing_is_answered_the_first_reason_is_given(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--base-url", url, *SMALL, "--model", "other", "--api-key", KEY) == cli.EXIT_FAILURE
    assert "kvorum: none of 6 requests was answered; the first: 404: " in capsys.readouterr().err


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--base-url", "http://127.0.0.1:1") == cli.EXIT_FAILURE
    assert "kvorum: no server answers at http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--num-requests", "0"), "--num-requests: must be at least 1, got 0"),
        (("--concurrency", "0"), "--concurrency: must be at least 1, got 0"),
        (("--warmup", "-1"), "--warmup: must be at least 0, got -1"),
        (("--timeout-s", "nan"), "--timeout-s: must be at least 0.001, got nan"),
        (("--slo-ttft-ms", "-1"), "--slo-ttft-ms: must be at least 0.0, got -1.0"),
        (("--request-rate", "0"), "--request-rate: expected requests per second or `trace`, got '0'"),
        (("--request-rate", "fast"), "--request-rate: expected requests per second or `trace`, got 'fast'"),
        (("--request-rate", "trace"), "--request-rate: trace needs --trace FILE"),
        (("--prompt-tokens", "some"), "--prompt-tokens: expected N, uniform"),
        (("--output-tokens", "0"), "--output-tokens: expected N, uniform"),
        (("--trace", "nowhere.csv"), "--trace nowhere.csv: cannot be read"),
        (("--max-total-tokens", "100"), "--max-total-tokens: is for --trace only"),
        (("--tenants", "a"), "--tenants: expected NAME=KEY"),
        (("--tenants", "a=k", "--api-key", "k"), "--api-key: cannot be combined with --tenants"),
        (("--kv-budget", "2.5"), "--kv-budget: kv_budget is a fraction up to 1"),
        (("--min-retained-mass", "-1"), "--min-retained-mass: must be at least 0.0, got -1.0"),
        (("--json", "nowhere/r.json"), "--json nowhere/r.json: cannot be written"),
        (("--concurrency", "2", "--request-rate", "3"), "--request-rate: not allowed with argument --concurrency"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == cli.EXIT_USAGE
    assert expected in capsys.readouterr().err


def test_a_trace_in_which_nothing_is_short_enough_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text("timestamp,input_tokens,output_tokens\n0,30,3\n")
    assert bench("--trace", str(tmp_path / "t.csv"), "--max-total-tokens", "10") == cli.EXIT_USAGE
    assert "--max-total-tokens: no request of" in capsys.readouterr().err
