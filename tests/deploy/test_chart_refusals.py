"""Values that cannot work are refused before anything is installed, with their path."""

from __future__ import annotations

from typing import Any

import helm_python as helm
import pytest

from kvtest.charts import render

GROUP = {"name": "g", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}}
KEY = "0" * 64


@pytest.mark.parametrize(
    ("values", "path", "reason"),
    [
        ({"replicas": 2}, "at ''", "additional properties 'replicas' not allowed"),
        ({"image": {"repo": "x"}}, "at '/image'", "'repo' not allowed"),
        ({"image": {"tag": 1}}, "at '/image/tag'", "got number"),
        ({"config": {"max_num_seq": 8}}, "at '/config'", "'max_num_seq' not allowed"),
        ({"config": {"max_num_seqs": 0}}, "at '/config/max_num_seqs'", "minimum"),
        ({"config": {"max_num_seqs": "8"}}, "at '/config/max_num_seqs'", "got string, want integer"),
        ({"config": {"dtype": "fp8"}}, "at '/config/dtype'", "must be one of"),
        ({"config": {"port": 0}}, "at '/config/port'", "minimum"),
        ({"config": {"port": None}}, "at '/config'", "missing property 'port'"),
        ({"config": {"api_key": "k"}}, "at '/config'", "'api_key' not allowed"),
        ({"config": {"host": "::"}}, "at '/config'", "'host' not allowed"),
        ({"config": {"tenants": {"a b": {}}}}, "at '/config/tenants'", "'a b' not allowed"),
        ({"config": {"tenants": {"a": {"wieght": 1}}}}, "at '/config/tenants/a'", "'wieght' not allowed"),
        ({"config": {"tenants": {"a": {"weight": 0}}}}, "at '/config/tenants/a/weight'", "exclusiveMinimum"),
        ({"config": {"tenants": {"a": {"floor": 1.0}}}}, "at '/config/tenants/a/floor'", "not"),
        (
            {"config": {"tenants": {"a": {"api_key_sha256": ["kv-plain"]}}}},
            "at '/config/tenants/a/api_key_sha256/0'",
            "does not match pattern",
        ),
        ({"engineGroups": []}, "at '/engineGroups'", "minItems"),
        ({"engineGroups": [{"name": "g"}]}, "at '/engineGroups/0'", "missing property 'resources'"),
        ({"engineGroups": [GROUP | {"name": "routers"}]}, "at '/engineGroups/0/name'", "not"),
        ({"engineGroups": [GROUP | {"gpu": 8}]}, "at '/engineGroups/0'", "'gpu' not allowed"),
        ({"engineGroups": [GROUP | {"shmSize": "1 GB"}]}, "at '/engineGroups/0/shmSize'", "does not match pattern"),
        (
            {"engineGroups": [GROUP | {"resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {}}}]},
            "at '/engineGroups/0/resources/requests/cpu'",
            "got number, want string",
        ),
        ({"service": {"type": "Headless"}}, "at '/service/type'", "must be one of"),
        ({"networkPolicy": {"clients": [{}]}}, "at '/networkPolicy/clients/0'", "minProperties"),
        ({"monitoring": {"serviceMonitor": {"interval": "often"}}}, "/serviceMonitor/interval'", "pattern"),
        ({"upgrade": {"type": "Rolling"}}, "at '/upgrade/type'", "must be one of"),
        ({"apiKey": {"existingSecret": "Not A Name"}}, "at '/apiKey/existingSecret'", "does not match pattern"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_path(values: dict[str, Any], path: str, reason: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        render(values)
    assert path in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"config": {"tenants": {"a": {"api_key_sha256": [KEY]}, "b": {"api_key_sha256": [KEY]}}}},
            "config.tenants: a and b have the same API key",
        ),
        ({"config": {"tenants": {"a": {}}, "cache_manager": False}}, "config.cache_manager: tenants have limits only"),
        (
            {"config": {"tenants": {"a": {}}}, "apiKey": {"existingSecret": "s"}},
            "apiKey.existingSecret: with config.tenants",
        ),
        ({"config": {"num_engines": 2}}, "engineGroups: their pods have room for 1 of the 2 engines"),
        (
            {
                "config": {"max_engines": 5},
                "autoscaling": {"enabled": True},
                "engineGroups": [GROUP | {"maxReplicas": 4}],
            },
            "engineGroups: their pods have room for 4 of the 5 engines",
        ),
        (
            {"config": {"tensor_parallel_size": 16}, "engineGroups": [GROUP | {"gpus": 8}]},
            "engineGroups: they have 8 GPUs for 1 engines with tensor_parallel_size 16",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        render(values)
