"""Two real engines of two ranks each: ranks are lost, settings change, nodes are killed, and no client is failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import yaml

from kvtest.commands import Command, command, wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.model]

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "model": "smollm2-135m",
    "served_model_name": "model",
    "port": 0,
    "grpc_port": 0,
    "num_engines": 2,
    "tensor_parallel_size": 2,
    "dtype": "float32",
    "kv_cache_memory_bytes": 2**27,
    "max_num_seqs": 8,
    "drain_timeout_s": 10.0,
    "resume_timeout_s": 60.0,
}


@dataclass
class Load:
    """Clients that ask one seeded question after the other, in threads, until told to stop.

    pause_s: between two of a client's questions, so that what starts meanwhile gets a core.
    """

    url: str
    pause_s: float = 0.0
    answers: list[str] = field(default_factory=list)
    receipts: list[dict[str, object]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> str:
        body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0.8, "seed": 7, "ignore_eos": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body | {"stream": True}, timeout=90) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        if response.status_code != 200 or lines[-1:] != ["[DONE]"]:
            self.failures.append(f"{response.status_code} {lines[-1:]}")
            return ""
        chunks = [json.loads(line) for line in lines[:-1]]
        self.receipts += [chunk["kvorum"] for chunk in chunks if "kvorum" in chunk]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    def keep_asking(self) -> None:
        while not self.is_over.is_set():
            try:
                self.answers.append(self.ask())
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
            self.is_over.wait(self.pause_s)

    def engines(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        found = [line.partition("{")[2].partition("} ") for line in lines if line.startswith("kvorum_engine_up{")]
        return {labels: float(value) for labels, _, value in found}

    def wait_for_engines(self, *, other_than: set[str] = frozenset(), timeout_s: float = 90.0) -> set[str]:  # type: ignore[assignment]
        deadline_s = time.monotonic() + timeout_s
        while True:
            alive = {name for name, is_up in self.engines().items() if is_up and name not in other_than}
            if len(alive) == 2:
                return alive
            assert time.monotonic() < deadline_s, self.engines()
            time.sleep(0.2)


@dataclass
class Served:
    """A running `kvorum serve`, its settings file and what it prints."""

    serve: Command
    settings: Path
    url: str

    def change(self, **settings: object) -> None:
        self.settings.write_text(yaml.safe_dump(SETTINGS | settings))
        self.serve.process.send_signal(signal.SIGHUP)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = tmp_path_factory.mktemp("served") / "kvorum.yaml"
    settings.write_text(yaml.safe_dump(SETTINGS))
    with command("serve", "--config", str(settings)) as serve:
        ready = serve.wait_for("kvorum is ready")
        yield Served(serve, settings, ready.partition(": ")[2].partition(" ")[0])
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(timeout=60) == 0
        wait_until_gone(serve)


@pytest.fixture
def load(served: Served) -> Iterator[Load]:
    load = Load(served.url)
    load.wait_for_engines()
    expected = load.ask()
    threads = [threading.Thread(target=load.keep_asking) for _ in range(4)]
    for thread in threads:
        thread.start()
    yield load
    load.is_over.set()
    for thread in threads:
        thread.join()
    assert load.failures == []
    assert set(load.answers) == {expected}


def rank_pids(serve: Command) -> list[int]:
    return [pid for pid, title in serve.processes() if "ray::_RankActor" in title]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_of_a_lost_rank_go_on_and_the_engine_comes_back(
    served: Served, load: Load, how: signal.Signals
) -> None:
    time.sleep(1)
    os.kill(rank_pids(served.serve)[0], how)
    deadline_s = time.monotonic() + 30
    while sum(load.engines().values()) == 2:
        assert time.monotonic() < deadline_s, "the loss was not noticed"
        time.sleep(0.1)
    load.pause_s = 0.5
    load.wait_for_engines()
    load.is_over.set()
    assert max(int(str(receipt["resumes"])) for receipt in load.receipts) >= 1


def test_new_settings_are_rolled_out_without_a_failed_request(served: Served, load: Load) -> None:
    before = load.wait_for_engines()
    load.pause_s = 0.5
    served.change(max_num_batched_tokens=512)
    served.serve.wait_for("the settings are rolled out")
    after = load.wait_for_engines()
    assert not before & after, "every engine was replaced"


def test_settings_that_cannot_be_used_change_nothing(served: Served, load: Load) -> None:
    before = load.wait_for_engines()
    served.change(max_num_seqs=-1)
    assert "max_num_seqs" in served.serve.wait_for("max_num_seqs")
    served.change(port=1)
    assert "port: cannot be changed" in served.serve.wait_for("kvorum: ")
    assert load.wait_for_engines() == before


@pytest.mark.slow
def test_a_short_torment_leaves_no_wrong_answer_and_nothing_behind(tmp_path: Path) -> None:
    result = tmp_path / "chaos.json"
    options = {"duration-s": 19, "period-s": 6, "streams": 8, "questions": 8, "max-tokens": 16, "json": result}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-P", str(ROOT / "bench" / "chaos" / "run.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert report["outcomes"]["complete and correct"] > 0
    assert len(report["strikes"]) == 3
