"""The Helm chart, rendered by Helm itself in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "kvorum"
# JSON as Helm and Kubernetes have it.
Manifest = dict[str, Any]
Values = Mapping[str, Any]


def example_values() -> dict[str, Values]:
    """Return the values that the chart is tried with, by name."""
    examples = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CHART.glob("ci/*-values.yaml"))}
    return {"default": {}} | examples


def render(values: Values, *, name: str = "demo") -> list[Manifest]:
    """Return the manifests of a release; raises HelmError."""
    rendered = helm.Chart.load(CHART).render(dict(values), name=name, namespace="llm")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """Return the only manifest of a kind."""
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


def serve_config(manifests: list[Manifest]) -> dict[str, Any]:
    """Return what Ray Serve is given."""
    config: dict[str, Any] = yaml.safe_load(only(manifests, "RayService")["spec"]["serveConfigV2"])
    return config


def pod_groups(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Return the head's group and those of workers, by name."""
    cluster = only(manifests, "RayService")["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster["workerGroupSpecs"]}


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Yield each group's name and its pods, as Kubernetes would have them."""
    for name, group in pod_groups(manifests).items():
        yield name, {"apiVersion": "v1", "kind": "Pod", **group["template"]}


def ray_container(pod: Manifest) -> Manifest:
    """Return the container in which Ray runs: KubeRay takes the first."""
    container: Manifest = pod["spec"]["containers"][0]
    return container


def environment(pod: Manifest) -> dict[str, str]:
    """Return the plain environment of a pod's Ray container."""
    return {each["name"]: each["value"] for each in ray_container(pod)["env"] if "value" in each}
