"""Plain frozen dataclasses as flat lists of whole numbers, and back: how a step plan fits into one tensor.

A codec is built once for each type, from its annotations, and then only appends and reads numbers. It knows int, bool,
float (by its bits), str, None, enumerated strings no more than strings, tuples of one type, unions of dataclasses, and
dataclasses of all these. What it cannot know is refused when the codec is built, not when it is used.
"""

# A codec takes values of whatever type it was built for.
# ruff: noqa: ANN401

from __future__ import annotations

import dataclasses
import struct
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_Write = Callable[[Any, list[int]], None]
_Read = Callable[[Iterator[int]], Any]
_FLOAT, _WORD = struct.Struct("<d"), struct.Struct("<q")


class FlatCodec(Generic[T]):
    """Writes and reads values of one type."""

    def __init__(self, kind: Any) -> None:
        """kind: the type, or a union of types."""
        self._write, self._read = _codec(kind)

    def write(self, value: T) -> list[int]:
        """Return the value's numbers, each within 64 bits."""
        numbers: list[int] = []
        self._write(value, numbers)
        return numbers

    def read(self, numbers: Sequence[int]) -> T:
        """Return the value of numbers that `write` gave."""
        value: T = self._read(iter(numbers))
        return value


def _codec(kind: Any) -> tuple[_Write, _Read]:
    kind = _plain(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if dataclasses.is_dataclass(kind):
        return _dataclass_codec(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_codec(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return _tuple_codec(arguments[0])
    raise TypeError(f"{kind} cannot be written as whole numbers")


def _plain(kind: Any) -> Any:
    """Return the type that a NewType is at run time."""
    return getattr(kind, "__supertype__", kind)


def _write_str(value: str, numbers: list[int]) -> None:
    encoded = value.encode()
    numbers.append(len(encoded))
    numbers += encoded


def _read_str(numbers: Iterator[int]) -> str:
    return bytes(next(numbers) for _ in range(next(numbers))).decode()


_SIMPLE: dict[Any, tuple[_Write, _Read]] = {
    int: (lambda value, numbers: numbers.append(value), next),
    bool: (lambda value, numbers: numbers.append(value), lambda numbers: bool(next(numbers))),
    float: (
        lambda value, numbers: numbers.extend(_WORD.unpack(_FLOAT.pack(value))),
        lambda numbers: _FLOAT.unpack(_WORD.pack(next(numbers)))[0],
    ),
    str: (_write_str, _read_str),
    type(None): (lambda value, numbers: None, lambda numbers: None),
}


def _dataclass_codec(kind: Any) -> tuple[_Write, _Read]:
    hints = typing.get_type_hints(kind)
    fields = [(each.name, *_codec(hints[each.name])) for each in dataclasses.fields(kind)]

    def write(value: Any, numbers: list[int]) -> None:
        for name, write_field, _ in fields:
            write_field(getattr(value, name), numbers)

    def read(numbers: Iterator[int]) -> Any:
        return kind(*[read_field(numbers) for _, _, read_field in fields])

    return write, read


def _union_codec(members: tuple[Any, ...]) -> tuple[_Write, _Read]:
    """Write which member it is, then the member. Members are told apart by their type alone."""
    codecs = [_codec(member) for member in members]
    indices = {_plain(member): index for index, member in enumerate(members)}

    def write(value: Any, numbers: list[int]) -> None:
        index = indices[type(value)]
        numbers.append(index)
        codecs[index][0](value, numbers)

    def read(numbers: Iterator[int]) -> Any:
        return codecs[next(numbers)][1](numbers)

    return write, read


def _tuple_codec(member: Any) -> tuple[_Write, _Read]:
    write_member, read_member = _codec(member)
    is_int = write_member is _SIMPLE[int][0]

    def write(value: Any, numbers: list[int]) -> None:
        numbers.append(len(value))
        if is_int:
            numbers.extend(value)
        else:
            for each in value:
                write_member(each, numbers)

    def read(numbers: Iterator[int]) -> Any:
        return tuple([read_member(numbers) for _ in range(next(numbers))])

    return write, read
