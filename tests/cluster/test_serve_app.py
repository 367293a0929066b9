"""The application as Ray Serve builds it from a file: one schema, and mistakes that are named."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest

from kvorum.cluster.config import ConfigError


@pytest.fixture(scope="module")
def serve_app() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Serve's own, while it is imported
        from kvorum.cluster import serve_app
    return serve_app


def test_settings_become_an_application(serve_app: ModuleType) -> None:
    from ray import serve

    assert isinstance(serve_app.build({"executor": "fake", "num_routers": 2}), serve.Application)


def test_what_is_wrong_with_settings_is_said_by_name(serve_app: ModuleType) -> None:
    with pytest.raises(ConfigError) as caught:
        serve_app.build({"max_num_seqs": 0, "num_router": 2})
    assert str(caught.value).splitlines() == [
        "max_num_seqs: should be greater than or equal to 1, got 0",
        "num_router: unknown setting; did you mean num_routers?",
    ]
