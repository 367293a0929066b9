"""Typed access to what a model's files say, so that a wrong or missing field becomes an error that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvorum.kvstore.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one parsed file. A field that is null counts as absent.

    source: the file as errors name it.
    """

    source: str
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Read a JSON file that holds one object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} must hold a JSON object")
        return cls(str(path), values)

    def over(self, defaults: Mapping[str, object]) -> Fields:
        """Return these fields with defaults behind those that the file does not mention; null stays null."""
        return Fields(self.source, {**defaults, **self.values})

    def has(self, name: str) -> bool:
        """Tell whether the field is there and not null."""
        return self.values.get(name) is not None

    def error(self, name: str, reason: str) -> CheckpointError:
        """Return an error that names the file, the field, its value and what is wrong with it."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 100 else f"{shown[:97]}..."
        return CheckpointError(f"{self.source}: {name} = {shown} {reason}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a field that must be an integer >= 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(name, "must be an integer of at least 0")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a field that must be an integer >= 1."""
        value = self.integer(name, default)
        if value == 0:
            raise self.error(name, "must be at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a field that must be a positive finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(name, "must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return a field that must be true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a field that must be a string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that must be a list of strings."""
        value = self._get(name, None)
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "must be a list of strings")
        return tuple(cast("list[str]", value))

    def section(self, name: str) -> Fields:
        """Return a field that must be an object; an absent one has no fields."""
        value = self.values.get(name)
        if value is None:
            return Fields(f"{self.source}: {name}", {})
        if not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return Fields(f"{self.source}: {name}", value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a field that must be an integer >= 0 or a list of them; an absent one has none."""
        values = self._several(name)
        if not all(isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values):
            raise self.error(name, "must be an integer of at least 0, or a list of them")
        return tuple(cast("list[int]", values))

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a field that must be a list of numbers."""
        self._get(name, None)
        values = self._several(name)
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            raise self.error(name, "must be a list of numbers")
        return tuple(cast("list[float]", values))

    def _several(self, name: str) -> tuple[object, ...]:
        value = self.values.get(name)
        return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)

    def _get(self, name: str, default: object) -> object:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self.source}: {name} is missing")
        return value
