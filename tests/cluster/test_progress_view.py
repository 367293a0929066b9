"""What a person sees while a cluster starts."""

from __future__ import annotations

import pytest

from kvorum.cluster.engine_deployment import LoadProgress
from kvorum.cluster.progress_view import ProgressView


def show_all() -> None:
    with ProgressView() as view:
        view.show_phase("starting Ray")
        view.show_phase("loading the model")
        view.show_load(LoadProgress("engine-0"), "engine-0")
        view.show_load(LoadProgress("engine-0", loaded_bytes=50, total_bytes=100), "engine-0")
        view.show_load(LoadProgress("engine-0", loaded_bytes=100, total_bytes=100), "engine-0")


def test_a_pipe_gets_a_line_for_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    show_all()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "starting Ray …\nloading the model …\n"


def test_a_terminal_gets_bars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    show_all()
    err = capsys.readouterr().err
    assert "loading the model" in err
    assert "100/100 bytes" in err
