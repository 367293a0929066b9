"""Engines are added under load and taken away after it, while requests run."""

from __future__ import annotations

import signal
import threading
import time

import httpx
import pytest

from kvtest.commands import command, wait_until_gone

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SETTINGS = {
    "executor": "fake",
    "port": 0,
    "grpc-port": 0,
    "fake-step-delay-s": 0.02,
    "max-num-seqs": 2,
    "num-engines": 1,
    "max-engines": 2,
    "upscale-delay-s": 0,
    "downscale-delay-s": 2,
    "drain-timeout-s": 10,
}


def num_engines(url: str) -> int:
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    return sum(line.startswith("kvorum_engine_up{") and line.endswith(" 1.0") for line in lines)


def wait_for_engines(url: str, count: int) -> None:
    deadline_s = time.monotonic() + 90
    while num_engines(url) != count:
        assert time.monotonic() < deadline_s, f"{num_engines(url)} engines instead of {count}"
        time.sleep(0.2)


def test_engines_come_and_go_with_the_load() -> None:
    arguments = [text for name, value in SETTINGS.items() for text in (f"--{name}", str(value))]
    with command("serve", *arguments) as serve:
        url = serve.wait_for("kvorum is ready").partition(": ")[2].partition(" ")[0]
        failures: list[str] = []
        is_over = threading.Event()

        def keep_asking() -> None:
            while not is_over.is_set():
                body = {"prompt": "Hello world", "max_tokens": 40}
                response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
                if response.status_code != 200:
                    failures.append(response.text)

        threads = [threading.Thread(target=keep_asking) for _ in range(6)]
        for thread in threads:
            thread.start()
        wait_for_engines(url, 2)
        is_over.set()
        for thread in threads:
            thread.join()
        wait_for_engines(url, 1)
        assert failures == []
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(timeout=60) == 0
        wait_until_gone(serve)
