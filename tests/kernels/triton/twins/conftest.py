"""These tests run kernels, and are collected only where TRITON_INTERPRET says how: 1 interpreted, 0 on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

collect_ignore_glob = [] if "TRITON_INTERPRET" in os.environ else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Kernels count on what IEEE says about infinities; the interpreter's numpy warns of them.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fresh memory is NaN (and the largest integer), so that what is not written shows."""
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)
