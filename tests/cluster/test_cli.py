"""The command line: usage, one-line errors, and a client that talks to a server."""

from __future__ import annotations

import functools
import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from kvorum.client import Client, RetryPolicy
from kvorum.cluster import cli
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvorum.protos.inference.v1 import inference_pb2_grpc as pb_grpc


def run(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as error:  # argparse
        return int(error.code or 0)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("kvorum 0.")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("serve", "generate", "demo", "plan", "lab", "eval", "bench"))


@pytest.mark.parametrize("arguments", [(), ("frob",), ("--frob",)])
def test_without_a_command_there_is_usage(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == cli.EXIT_USAGE
    assert "usage: kvorum" in capsys.readouterr().err


def test_a_misspelt_flag_is_answered_with_the_likely_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--max-num-seq", "4", "--max-model-length=3") == cli.EXIT_USAGE
    assert "--max-model-length=3; did you mean --max-model-len?" in capsys.readouterr().err


def test_flags_may_have_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--max_num_seqs=0") == cli.EXIT_USAGE
    assert "--max-num-seqs: should be greater than or equal to 1, got '0'" in capsys.readouterr().err


def test_a_wrong_setting_in_the_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max-num-sequences: 4\n")
    assert run("serve", "--config", str(path)) == cli.EXIT_USAGE
    expected = f"kvorum: {path}: max-num-sequences: unknown setting; did you mean max_num_seqs?\n"
    assert capsys.readouterr().err == expected


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--model", "./nowhere") == cli.EXIT_FAILURE
    assert "./nowhere" in capsys.readouterr().err


def test_a_context_longer_than_the_models_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--max-model-len", "1000000") == cli.EXIT_USAGE
    assert "max_model_len: smollm2-135m was made for at most 8192, got 1000000" in capsys.readouterr().err


def test_a_chat_template_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--chat-template", "./nowhere") == cli.EXIT_USAGE
    assert "chat_template: nowhere cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_that_is_taken_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        others = {"--port": "--grpc-port", "--grpc-port": "--port"}
        assert run("serve", flag, str(port), others[flag], "0") == cli.EXIT_USAGE
    name = flag.removeprefix("--").replace("-", "_")
    assert f"{name}: cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


class CannedServer(pb_grpc.InferenceServiceServicer):
    """Answers with what it was asked, and notes the request."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: dict[str, str | bytes] = {}

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata() or ())
        if request.kvorum.policy == "nope":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "unknown policy 'nope'")
        receipt = pb.Receipt(engine="engine-0", policy="full", kv_tokens_held=7)
        usage = pb.Usage(prompt_tokens=2)
        completion = pb.Completion(finish_reason=pb.FINISH_REASON_STOP, receipt=receipt, usage=usage)
        yield pb.GenerateResponse(text="Hello", token_ids=[1])
        yield pb.GenerateResponse(text=" there", token_ids=[2, 3], completion=completion)


@pytest.fixture
def canned() -> Iterator[tuple[CannedServer, str]]:
    servicer = CannedServer()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_InferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # generated code
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(grace=None)


def test_generate_streams_text_and_prints_the_receipt(
    canned: tuple[CannedServer, str], capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, target = canned
    assert run("generate", "Hi", "--target", target) == 0
    out, err = capsys.readouterr()
    assert out == "Hello there\n"
    assert "kv_tokens_held 7" in err
    assert "kv_budget" not in err
    assert [message.content for message in servicer.requests[0].chat.messages] == ["Hi"]
    assert not servicer.requests[0].sampling.HasField("temperature")


def test_generate_passes_its_flags_on(canned: tuple[CannedServer, str], monkeypatch: pytest.MonkeyPatch) -> None:
    servicer, target = canned
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    sampling = [
        "--max-tokens",
        "5",
        "--temperature",
        "0",
        "--top-p",
        "0.5",
        "--seed",
        "7",
        "--stop",
        "a",
        "--stop",
        "b",
    ]
    flags = ["--raw", "--api-key", "k", "--model", "m", *sampling]
    kept = ["--policy", "h2o", "--kv-budget", "0.25", "--min-retained-mass", "0.9"]
    assert run("generate", "--target", target, *flags, *kept) == 0
    assert servicer.requests[0] == pb.GenerateRequest(
        text="from a pipe",
        model="m",
        sampling=pb.SamplingParams(max_tokens=5, temperature=0.0, top_p=0.5, seed=7),
        stop=["a", "b"],
        kvorum=pb.KVParams(policy="h2o", kv_budget_fraction=0.25, min_retained_mass=0.9),
    )
    assert servicer.metadata["authorization"] == "Bearer k"
    assert run("generate", "x", "--target", target, "--kv-budget", "512") == 0
    assert servicer.requests[1].kvorum.kv_budget_tokens == 512


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("x", "--policy", "nope"), "INVALID_ARGUMENT: unknown policy 'nope'"),
        (("x", "--kv-budget", "2.5"), "kv_budget is a fraction up to 1"),
        (("x", "--max-tokens", "-1"), "out of range"),
        (("",), "nothing to ask"),
    ],
)
def test_what_is_refused_is_one_line(
    canned: tuple[CannedServer, str], arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--target", canned[1], *arguments) == cli.EXIT_FAILURE
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_no_server_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    impatient = functools.partial(Client, retry=RetryPolicy(max_retries=0))
    monkeypatch.setattr("kvorum.cluster.generate_command.Client", impatient)
    assert run("generate", "x", "--target", "127.0.0.1:1") == cli.EXIT_FAILURE
    err = capsys.readouterr().err
    assert err.startswith("kvorum: UNAVAILABLE: no server answers at 127.0.0.1:1: ")
    assert err.count("\n") == 1


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvorum.cluster.generate_command.run", interrupt)
    assert run("generate", "x") == cli.EXIT_INTERRUPTED


def test_a_reader_that_goes_away_is_no_traceback(canned: tuple[CannedServer, str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    kvorum = Path(sys.executable).with_name("kvorum")
    done = subprocess.run(
        [kvorum, "generate", "x", "--target", canned[1]], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert done.returncode == cli.EXIT_FAILURE
    assert done.stderr == ""
