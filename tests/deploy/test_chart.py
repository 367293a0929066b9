"""The Helm chart: what it renders is valid, hangs together, and says the same as kvorum's own settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema
import kubernetes_validate  # type: ignore[import-untyped]  # has no types
import pytest
import yaml

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.config_flags import check_config
from kvorum.cluster.launcher import GRPC_SERVICERS, serve_environment
from kvtest.charts import (
    CHART,
    ROOT,
    Manifest,
    Values,
    environment,
    example_values,
    only,
    pod_groups,
    pods,
    ray_container,
    render,
    serve_config,
)

EXAMPLES = example_values()
KUBERNETES = "1.34"
KUBERAY = ROOT.parent / "shared" / "kuberay"
# What an engine adds to drain_timeout_s when it stops, in cluster/app.py.
ENGINE_STOP_S = 8.0
# What Serve adds to the time that a router which stops still answers.
SERVE_BUFFER_S = 5.0
# Until all nodes of a Kubernetes cluster know that a pod is not ready.
ENDPOINTS_S = 5.0
LEAVE = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
CUSTOM = {"RayService", "ServiceMonitor", "PrometheusRule"}

each_example = pytest.mark.parametrize("values", EXAMPLES.values(), ids=EXAMPLES)


def manifests_with(**values: Any) -> list[Manifest]:  # noqa: ANN401  # values of the chart
    return render(values)


def strings_under(node: object, *keys: str) -> Iterator[str]:
    """Yield the strings that stand under one of the keys, at any depth."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in keys and isinstance(value, str):
                yield value
            yield from strings_under(value, *keys)
    elif isinstance(node, list):
        for value in node:
            yield from strings_under(value, *keys)


def test_generated_files_are_fresh_and_helm_finds_nothing() -> None:
    command = [sys.executable, "-P", str(CHART.parent / "chart.py"), "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_value_that_may_be_set_is_described() -> None:
    schema = yaml.safe_load((CHART.parent / "schema.yaml").read_text())
    described = set(re.findall(r"^\| `([^`]+)` \|", (CHART / "README.md").read_text(), re.MULTILINE))

    def undescribed(node: dict[str, Any], path: str) -> Iterator[str]:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        below = {f"{path}.{name}".strip("."): each for name, each in node.get("properties", {}).items()}
        if not below and "properties" in node.get("items", {}):
            below = {f"{path}[].{name}": each for name, each in node["items"]["properties"].items()}
        if any(each.startswith((f"{path}.", f"{path}[]")) or not path for each in described):
            for name, each in below.items():
                yield from undescribed(each, name)
        elif path not in described:
            yield path

    assert list(undescribed(schema, "")) == ["global"]


@each_example
def test_helm_lints_each_example(values: Values) -> None:
    report = helm.lint(CHART, dict(values), strict=True, kube_version=f"v{KUBERNETES}.0")
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@each_example
def test_manifests_are_valid_for_kubernetes(values: Values) -> None:
    manifests = render(values)
    checked = [manifest for manifest in manifests if manifest["kind"] not in CUSTOM]
    assert {"Service", "NetworkPolicy"} <= {manifest["kind"] for manifest in checked}
    for manifest in checked + [pod | {"metadata": pod["metadata"] | {"name": name}} for name, pod in pods(manifests)]:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.skipif(not KUBERAY.exists(), reason="KubeRay's schemas are not here (../shared/kuberay)")
@each_example
def test_the_rayservice_is_valid_for_kuberay(values: Values) -> None:
    schema = closed(json.loads((KUBERAY / "rayservice.schema.json").read_text())["v1"])
    schema["properties"].update(
        apiVersion={"const": "ray.io/v1"}, kind={"const": "RayService"}, metadata={"type": "object"}
    )
    jsonschema.validate(only(render(values), "RayService"), schema)


def closed(node: Any) -> Any:  # noqa: ANN401  # a JSON schema
    """Refuse what a schema does not name: an API server would drop it without a word."""
    if isinstance(node, list):
        return [closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    schema = {key: closed(value) for key, value in node.items()}
    # Metadata of pods is not spelt out there.
    if isinstance(node.get("properties"), dict) and "type" in node and not _is_metadata(node["properties"]):
        schema.setdefault("additionalProperties", False)
    return schema


def _is_metadata(properties: dict[str, Any]) -> bool:
    return {"labels", "annotations", "name", "namespace"} <= properties.keys()


def test_monitoring_is_what_the_operators_expect() -> None:
    manifests = render(EXAMPLES["tenants-values"])
    monitor = only(manifests, "ServiceMonitor")
    service = only(manifests, "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [endpoint["path"] for endpoint in monitor["spec"]["endpoints"]] == ["/metrics"]
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= {
        p["name"] for p in service["spec"]["ports"]
    }
    assert monitor["metadata"]["labels"]["release"] == "prometheus"

    dashboards = only(manifests, "ConfigMap")
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = {path.name: path.read_text() for path in (ROOT / "deploy" / "grafana").glob("*.json")}
    assert dashboards["data"] == files

    rules = only(manifests, "PrometheusRule")["spec"]["groups"] or []
    written = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "deploy" / "prometheus").glob("*.yaml"))]
    assert rules == [group for file in written for group in file["groups"]]


def test_the_package_carries_what_the_chart_links_to(tmp_path: Path) -> None:
    helm.package(CHART, destination=tmp_path)
    (archive,) = tmp_path.glob("*.tgz")
    unpacked = helm.Chart.load_archive(archive.read_bytes())
    values = dict(EXAMPLES["tenants-values"])
    assert unpacked.render(values, name="demo", namespace="llm") == helm.Chart.load(CHART).render(
        values, name="demo", namespace="llm"
    )


@each_example
def test_settings_are_those_of_kvorum(values: Values) -> None:
    config = serve_config(render(values))
    (application,) = config["applications"]
    settings = check_config(application["args"], {})
    assert settings.host == "0.0.0.0"
    assert (config["http_options"]["port"], config["grpc_options"]["port"]) == (settings.port, settings.grpc_port)
    assert config["grpc_options"]["grpc_servicer_functions"] == list(GRPC_SERVICERS)
    router, _ = application["deployments"]
    tenants = router["user_config"]["tenants"]
    assert check_config({"tenants": tenants}, {}).tenants == ClusterConfig(**values.get("config", {})).tenants
    assert "tenants" not in application["args"], "whatever stands there restarts everything when it changes"


def test_each_setting_of_kvorum_can_be_set_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    in_values = set(schema["properties"]["config"]["properties"])
    manifests = manifests_with(apiKey={"existingSecret": "s"}, controlTLS={"existingSecret": "s"})
    by_chart = set(serve_config(manifests)["applications"][0]["args"]) - in_values
    assert by_chart == {"host", "router_resource", "control_tls", "api_key_file"}
    # A key in a manifest would be no secret.
    assert in_values | by_chart | {"api_key"} == set(ClusterConfig.model_fields)


@each_example
def test_all_nodes_have_what_serve_reads_from_the_environment(values: Values) -> None:
    manifests = render(values)
    settings = check_config(serve_config(manifests)["applications"][0]["args"], {})
    # One router on a node, which Serve lets answer until Kubernetes has taken it out.
    expected = serve_environment(settings.model_copy(update={"num_routers": 1})) | {LEAVE: "15"}
    for name, pod in pods(manifests):
        assert expected.items() <= environment(pod).items(), name


@pytest.mark.parametrize("drain_s", [0, 0.5, 30, 600])
def test_pods_live_longer_than_their_requests_are_drained(drain_s: float) -> None:
    for _, pod in pods(manifests_with(config={"drain_timeout_s": drain_s})):
        node_s = float(environment(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        # Serve stops a replica that early before the node's end that it can finish.
        assert max(drain_s + ENGINE_STOP_S, float(environment(pod)[LEAVE]) + SERVE_BUFFER_S) < node_s
        assert node_s < pod["spec"]["terminationGracePeriodSeconds"]


def test_kubernetes_takes_a_router_out_before_it_stops_answering() -> None:
    router = dict(pods(render({})))["routers"]
    for container in router["spec"]["containers"]:
        probe = container["readinessProbe"]
        seen_s = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
        assert seen_s + ENDPOINTS_S < float(environment(router)[LEAVE])


def test_routers_are_probed_by_both_protocols_on_their_ports() -> None:
    manifests = manifests_with(config={"port": 8080, "grpc_port": 50051})
    router = dict(pods(manifests))["routers"]
    ray, by_grpc, by_serve = router["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in ray["ports"]}
    assert (ports["serve"], ports["serve-grpc"]) == (8080, 50051)
    assert ray["readinessProbe"]["httpGet"] == {"path": "/health", "port": "serve"}
    assert by_grpc["readinessProbe"]["grpc"] == {"port": 50051}
    assert by_serve["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8080}
    service = {port["name"]: (port["port"], port["targetPort"]) for port in only(manifests, "Service")["spec"]["ports"]}
    assert service == {"http": (8080, "serve"), "grpc": (50051, "serve-grpc")}


@each_example
def test_what_pods_refer_to_is_rendered_or_declared_as_existing(values: Values) -> None:
    manifests = render(values)
    rendered = {manifest["metadata"]["name"] for manifest in manifests}
    declared = set(strings_under(dict(values), "existingSecret", "existingClaim"))
    references: set[str] = set(strings_under(manifests, "secretName", "claimName"))
    for _, pod in pods(manifests):
        for each in ray_container(pod)["env"]:
            references.update(strings_under(each.get("valueFrom", {}), "name"))
        mounts = {mount["name"] for mount in ray_container(pod)["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert references <= rendered | declared
    assert declared <= set(strings_under(manifests, "secretName", "claimName", "name")), "a value that nothing uses"


@each_example
def test_one_selector_finds_the_pods_that_each_object_means(values: Values) -> None:
    manifests = render(values)
    labels = {
        name: pod["metadata"]["labels"] | {"ray.io/group": "headgroup" if name == "head" else name}
        for name, pod in pods(manifests)
    }

    def found_by(selector: dict[str, str]) -> set[str]:
        return {name for name, each in labels.items() if selector.items() <= each.items()}

    assert found_by(only(manifests, "Service")["spec"]["selector"]) == {"routers"}
    for manifest in manifests:
        if manifest["kind"] == "PodDisruptionBudget":
            (group,) = found_by(manifest["spec"]["selector"]["matchLabels"])
            assert 0 < manifest["spec"]["minAvailable"] < pod_groups(manifests)[group]["replicas"]
    policies = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "NetworkPolicy"}
    internal = policies["demo-kvorum-internal"]
    assert found_by(internal["podSelector"]["matchLabels"]) == set(labels)
    # The control plane's ports are chosen at run time.
    (peer,) = internal["ingress"][0]["from"]
    assert peer["podSelector"] == internal["podSelector"]
    assert "ports" not in internal["ingress"][0]
    assert found_by(policies["demo-kvorum-clients"]["podSelector"]["matchLabels"]) == {"routers"}
    assert found_by(policies["demo-kvorum-operator"]["podSelector"]["matchLabels"]) == {"head"}


def test_engines_are_placed_where_their_gpus_are() -> None:
    manifests = render(EXAMPLES["gpu-values"])
    groups = pod_groups(manifests)
    for name in ("h200", "h100"):
        container = ray_container(dict(pods(manifests))[name])
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert json.loads(json.loads(groups[name]["rayStartParams"]["resources"])) == {"kvorum_engine": 1}
    two_per_pod = pod_groups(render(EXAMPLES["autoscaling-values"]))["l4"]
    assert json.loads(json.loads(two_per_pod["rayStartParams"]["resources"])) == {"kvorum_engine": 2}
    for name in ("head", "routers"):
        assert groups[name]["rayStartParams"]["num-cpus"] == "0", "ranks and tasks stay away"
    _, engine = serve_config(manifests)["applications"][0]["deployments"]
    assert engine["ray_actor_options"]["resources"] == {"kvorum_engine": 1}


def test_an_engine_may_be_larger_than_a_pod() -> None:
    resources = {"requests": {"cpu": "16", "memory": "64Gi"}, "limits": {"memory": "64Gi"}}
    group = {"name": "big", "replicas": 2, "gpus": 8, "resources": resources}
    manifests = manifests_with(config={"tensor_parallel_size": 16}, engineGroups=[group])
    assert json.loads(json.loads(pod_groups(manifests)["big"]["rayStartParams"]["resources"])) == {"kvorum_engine": 1}


def test_the_autoscaler_may_change_engine_groups_only() -> None:
    manifests = render(EXAMPLES["autoscaling-values"])
    cluster = only(manifests, "RayService")["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] is True
    bounds = {name: (g["minReplicas"], g["maxReplicas"]) for name, g in pod_groups(manifests).items() if name != "head"}
    assert bounds == {"routers": (2, 2), "l4": (1, 4)}
    fixed = pod_groups(render({}))["cpu"]
    assert fixed["minReplicas"] == fixed["replicas"] == fixed["maxReplicas"]


def test_ray_is_of_the_version_that_kvorum_is_tested_with() -> None:
    assert only(render({}), "RayService")["spec"]["rayClusterConfig"]["rayVersion"] == version("ray")


@each_example
def test_rays_object_store_leaves_room_in_shared_memory(values: Values) -> None:
    manifests = render(values)
    sizes = {
        name: next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")["emptyDir"]
        for name, pod in pods(manifests)
    }
    for name, group in pod_groups(manifests).items():
        assert sizes[name]["medium"] == "Memory"
        assert (
            int(group["rayStartParams"]["object-store-memory"])
            < int(sizes[name]["sizeLimit"].removesuffix("Gi")) * 2**30
        )


def test_large_numbers_stay_whole() -> None:
    config = {"kv_cache_memory_bytes": 2**40, "seed": 2**52 + 1}
    args = serve_config(manifests_with(config=config))["applications"][0]["args"]
    assert config.items() <= args.items()
