"""`kvorum serve` as people run it: up, asked, stopped, nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvtest.cluster import ClusterUnderTest
from kvtest.commands import KVORUM, command, wait_until_gone
from kvtest.tiny_model import write_model_without_weights

pytestmark = pytest.mark.ray


def test_serve_comes_up_answers_and_leaves_nothing_behind() -> None:
    with command("serve", "--executor", "fake", "--port", "0", "--grpc-port", "0") as serve:
        ready = serve.wait_for("kvorum is ready")
        target = ready.strip().rpartition("grpc://")[2]
        asked = [KVORUM, "generate", "Hello world", "--raw", "--target", target, "--max-tokens", "4"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        assert done.stdout == "Hello worldHello world\n", done.stderr
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(timeout=30) == 0
        wait_until_gone(serve)


def test_an_interrupted_start_leaves_nothing_behind() -> None:
    with command("serve", "--executor", "fake", "--port", "0", "--grpc-port", "0") as serve:
        serve.wait_for("starting routers")
        time.sleep(1)
        serve.process.send_signal(signal.SIGINT)
        assert serve.process.wait(timeout=60) == 130
        wait_until_gone(serve)


def test_a_model_that_cannot_be_loaded_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_model_without_weights(tmp_path)
    with command("serve", "--model", str(tmp_path), "--port", "0", "--grpc-port", "0") as serve:
        assert "engine: " in serve.wait_for("kvorum: ")
        assert serve.process.wait(timeout=30) == 1
        wait_until_gone(serve)


@pytest.mark.model
def test_the_demo_shows_an_answer_and_two_receipts() -> None:
    with command("demo") as demo:
        demo.wait_for("is up at", timeout_s=240)
        demo.wait_for("tokens/s", timeout_s=240)
        held = demo.wait_for("kv_tokens_held", timeout_s=240)
        full, quarter = [int(word) for word in held.replace("\u2502", " ").split() if word.isdigit()]
        assert 0 < quarter < full / 2
        demo.wait_for("stopped")
        assert demo.process.wait(timeout=30) == 0
        wait_until_gone(demo)


def test_a_ray_cluster_with_serve_on_it_is_not_touched(cluster: ClusterUnderTest) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    with command("serve", "--executor", "fake", "--port", "0", "--grpc-port", "0", "--address", address) as serve:
        assert "Ray Serve runs at" in serve.wait_for("kvorum: ")
        assert serve.process.wait(timeout=30) == 1
    assert cluster.completion().status_code == 200
