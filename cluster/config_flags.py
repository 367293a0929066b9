"""Settings as people write them: a YAML file and command-line flags, made from the schema in `config.py`.

Keys may be written with dashes or underscores. Flags win over the file, the file over the defaults. What is wrong is
reported at start, with where it stands, what was expected and, for a misspelt key, what was probably meant.
"""

from __future__ import annotations

import argparse
import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvorum.cluster.config import CHANGED_IN_PLACE, ClusterConfig, ConfigError


def load_config(path: Path | None, flags: Mapping[str, Any]) -> ClusterConfig:
    """Merge a YAML file and flags (by field name) into a checked configuration.

    Raises:
        ConfigError: a line for each mistake, with its place.
    """
    settings: dict[str, Any] = {}
    places: dict[str, str] = {}
    if path:
        for key, value in _read_yaml(path).items():
            name = str(key).replace("-", "_")
            if name in settings:
                raise ConfigError(f"{path}: {key}: given twice")
            settings[name] = value
            places[name] = f"{path}: {key}"
    for name, value in flags.items():
        settings[name] = value
        places[name] = _flag(name)
    return check_config(settings, places)


def check_config(settings: Mapping[str, Any], places: Mapping[str, str]) -> ClusterConfig:
    """Check settings; places says where each was given, where that is more than its name.

    Raises:
        ConfigError: a line for each mistake, with its place.
    """
    try:
        return ClusterConfig.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(detail, places) for detail in error.errors())) from None


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; only the flags that were given end up in the parsed namespace."""
    for section in ClusterConfig.__bases__:
        group = parser.add_argument_group((section.__doc__ or "").rstrip("."))
        for name in section.__annotations__:
            if name not in CHANGED_IN_PLACE:
                _add_flag(group, name)


def flags_of(namespace: argparse.Namespace) -> dict[str, Any]:
    """Pick the settings out of a parsed namespace."""
    return {name: value for name, value in vars(namespace).items() if name in ClusterConfig.model_fields}


def suggest(name: str, known: list[str]) -> str:
    """Return '; did you mean …?' for a misspelt name, or nothing."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected `name: value` lines, found a {type(loaded).__name__}")
    return loaded


def _add_flag(group: argparse._ArgumentGroup, name: str) -> None:
    field = ClusterConfig.model_fields[name]
    default = "" if field.default is None else f" [{field.default}]"
    help_text = f"{field.description}{default}".replace("%", "%%")
    if field.annotation is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(_flag(name), action=action, default=argparse.SUPPRESS, help=help_text)
    else:
        group.add_argument(_flag(name), metavar=_metavar(field.annotation), default=argparse.SUPPRESS, help=help_text)


def _metavar(annotation: object) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return _metavar(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    names: dict[object, str] = {int: "N", float: "X", Path: "FILE"}
    return names.get(annotation, "TEXT")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _describe(detail: ErrorDetails, places: Mapping[str, str]) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if not path:  # a rule across fields: the message itself begins with the field's name
        name, _, message = str(detail["ctx"]["error"]).partition(": ")
        return f"{places.get(name, name)}: {message}"
    place = places.get(str(detail["loc"][0]), path)
    if detail["type"] == "extra_forbidden":
        return f"{place}: unknown setting{suggest(path, list(ClusterConfig.model_fields))}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{place}: {message}, got {detail['input']!r}"
