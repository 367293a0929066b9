"""Write what the chart holds that follows from something else, and check it.

    python -P deploy/helm/chart.py generate     # values.schema.json and README.md
    python -P deploy/helm/chart.py check        # both are fresh, and Helm's own linter is content

values.schema.json is schema.yaml and, for `config`, the schema of kvorum's settings; README.md is the comments of
values.yaml and the descriptions of the settings.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from kvorum.cluster.config import ClusterConfig

HERE = Path(__file__).parent
CHART = HERE / "kvorum"
# What the chart itself sets: where to listen and to run, and where secrets are mounted.
SET_BY_CHART = frozenset(("host", "router_resource", "control_tls", "api_key", "api_key_file"))
# Without which the chart cannot be laid out.
_REQUIRED = ("port", "grpc_port", "num_routers", "tensor_parallel_size", "drain_timeout_s")
_LINE = re.compile(r"^(?P<indent> *(?:- )?)(?:# (?P<comment>.*)|(?P<key>[A-Za-z_]+):.*|)$")


_README = """\
<!-- Written by deploy/helm/chart.py; change values.yaml instead. -->
# {name}

{description}.

[docs/kubernetes.md](../../../docs/kubernetes.md) tells how to install it, and why it is as it is. Values that are not
listed here are refused.

## Values

| value | default | |
|---|---|---|
{rows}

## Settings of kvorum

The keys of `kvorum serve --config FILE`. The chart itself sets {set_by_chart}; a key stands in a Secret, never in
`api_key`.

| value | default | |
|---|---|---|
{settings}
"""


def values_schema() -> dict[str, Any]:
    """Return the JSON schema of the chart's values."""
    schema: dict[str, Any] = yaml.safe_load((HERE / "schema.yaml").read_text())
    config = _strict(ClusterConfig.model_json_schema())
    definitions = config.pop("$defs")
    properties = {name: field for name, field in config["properties"].items() if name not in SET_BY_CHART}
    for name in ("port", "grpc_port"):
        properties[name]["minimum"] = 1
    for name in ("floor", "ceiling"):
        # YAML's 1.0, all blocks, reaches a template as 1, one block.
        definitions["Tenant"]["properties"][name]["not"] = {"const": 1}
    schema["properties"]["config"] = {
        "type": "object",
        "additionalProperties": False,
        "required": list(_REQUIRED),
        "properties": properties,
    }
    schema["$defs"].update(definitions)
    return schema


def _strict(node: Any) -> Any:  # noqa: ANN401  # JSON
    """Drop the titles that pydantic makes up, and allow no other names than its patterns do."""
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    kept = {key: _strict(value) for key, value in node.items() if not (key == "title" and isinstance(value, str))}
    return kept | ({"additionalProperties": False} if "patternProperties" in kept else {})


@dataclass(frozen=True, slots=True)
class Entry:
    """A described value. default: as it stands in the file, or in words."""

    path: str
    description: str
    default: str


def described_values() -> Iterator[Entry]:
    """Yield the values that comments of values.yaml describe, in its order."""
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    comments: list[str] = []
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match["comment"]:
            comments.append(match["comment"])
        elif match and match["key"]:
            indent = len(match["indent"])
            while above and above[-1][0] >= indent:
                above.pop()
            above.append((indent, match["key"]))
            if any(comment.startswith("-- ") for comment in comments):
                yield _entry([key for _, key in above], comments, values)
            comments = []
        else:
            comments = []


def _entry(keys: list[str], comments: list[str], values: Any) -> Entry:  # noqa: ANN401  # YAML
    path: list[str] = []
    for key in keys:
        if isinstance(values, list):
            path[-1] += "[]"
            values = values[0]
        values = values[key]
        path.append(key)
    first = next(index for index, comment in enumerate(comments) if comment.startswith("-- "))
    words = [comment for comment in comments[first:] if not comment.startswith("@default")]
    default = next((each.removeprefix("@default -- ") for each in comments if each.startswith("@default")), None)
    return Entry(".".join(path), " ".join(words).removeprefix("-- "), default or f"`{json.dumps(values)}`")


def readme() -> str:
    """Return the chart's README."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    described = list(described_values())
    rows = [
        f"| `{each.path}` | {'' if _holds_others(each.path, described) else each.default} | {each.description} |"
        for each in described
    ]
    settings = [
        f"| `config.{name}` | {_setting_default(name, values['config'])} | {field.description} |"
        for name, field in ClusterConfig.model_fields.items()
        if name not in SET_BY_CHART
    ]
    return _README.format(
        name=chart["name"],
        description=chart["description"],
        rows="\n".join(rows),
        set_by_chart=", ".join(f"`{name}`" for name in sorted(SET_BY_CHART - {"api_key"})),
        settings="\n".join(settings),
    )


def _holds_others(path: str, described: Sequence[Entry]) -> bool:
    # The settings have a table of their own.
    return path == "config" or any(each.path.startswith((f"{path}.", f"{path}[]")) for each in described)


def _setting_default(name: str, values: Mapping[str, Any]) -> str:
    field = ClusterConfig.model_fields[name]
    return f"`{json.dumps(values.get(name, field.get_default(call_default_factory=True)))}`"


def _generated() -> dict[Path, str]:
    return {
        CHART / "values.schema.json": json.dumps(values_schema(), indent=2) + "\n",
        CHART / "README.md": readme(),
    }


def _check() -> int:
    problems = [
        f"{path}: is not what `chart.py generate` writes"
        for path, text in _generated().items()
        if not path.exists() or path.read_text() != text
    ]
    report = helm.lint(CHART, {}, strict=True)
    problems += [f"{message['path']}: {message['error']}" for message in report["messages"] if message["severity"] > 1]
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def main(arguments: list[str]) -> int:
    """Generate or check."""
    if arguments == ["check"]:
        return _check()
    if arguments == ["generate"]:
        for path, text in _generated().items():
            path.write_text(text)
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
