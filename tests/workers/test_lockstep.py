"""Commands survive the way to the other ranks as whole numbers; types that cannot are refused at once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvorum.workers.flat import FlatCodec
from kvorum.workers.lockstep import (
    COMMANDS,
    BudgetCommand,
    Command,
    CurveCommand,
    KeepAlive,
    MassCommand,
    RowCommand,
    StepCommand,
    ViewCommand,
)


def commands() -> st.SearchStrategy[Command]:
    kinds = (KeepAlive, StepCommand, MassCommand, BudgetCommand, CurveCommand, ViewCommand)
    return st.one_of(*(st.from_type(kind) for kind in kinds))


@given(commands())
def test_a_command_comes_back_as_it_was(command: Command) -> None:
    numbers = COMMANDS.write(command)
    assert all(type(number) in (int, bool) for number in numbers)
    assert repr(COMMANDS.read(numbers)) == repr(command)  # equality would fail for NaN


@given(st.lists(st.from_type(RowCommand), min_size=1, max_size=3))
def test_rows_do_not_run_into_each_other(rows: list[RowCommand]) -> None:
    command = StepCommand((), tuple(rows))
    read = COMMANDS.read(COMMANDS.write(command))
    assert isinstance(read, StepCommand)
    assert repr(read.rows) == repr(tuple(rows))


@dataclass(frozen=True)
class _Texts:
    texts: list[str]


@pytest.mark.parametrize("kind", [_Texts, dict, tuple[int, str]])
def test_a_type_that_cannot_be_written_is_refused_when_the_codec_is_made(kind: object) -> None:
    with pytest.raises(TypeError, match="cannot be written"):
        FlatCodec[object](kind)
